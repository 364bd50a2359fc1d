"""Splitting an FX graph into captured and eager regions. Knows no CUDA and no compiler.

``rules`` say why a node cannot be captured, ``assign`` groups nodes by that, ``regions`` makes each group a graph
module, ``stitch`` generates the code that runs them in order, ``dump`` writes the result as canonical text.
"""

from graphpass.partition.regions import Region
from graphpass.partition.rules import DEFAULT_RULES, SplitReason, SplitRule, splits_at
from graphpass.partition.split import Partition, partition
from graphpass.partition.symbols import GraphInput, GuardedSymbols, symbol_of_dim

__all__ = [
    "DEFAULT_RULES",
    "GraphInput",
    "GuardedSymbols",
    "Partition",
    "Region",
    "SplitReason",
    "SplitRule",
    "partition",
    "splits_at",
    "symbol_of_dim",
]
