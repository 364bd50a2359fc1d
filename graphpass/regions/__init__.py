"""Split an FX graph into captured and eager regions. Knows no CUDA and no compiler.

``rules`` decide why a node cannot be captured, ``assign`` groups the nodes, ``regions`` turns each group into a graph
module, ``stitch`` generates the code that runs the modules in order, ``dump`` writes the result as canonical text, and
``padding`` proves which sizes may be padded.
"""

from graphpass.regions.padding import (
    AtenGraph,
    OpCall,
    PaddedValue,
    PaddingFinding,
    PaddingProof,
    PaddingReason,
    PaddingRule,
    Verdict,
    independent_along,
    padding_of,
    register_padding_rule,
)
from graphpass.regions.padding.compose import RegionGraph, prove_partition
from graphpass.regions.padding.mixing import mixing_of
from graphpass.regions.regions import Region
from graphpass.regions.rules import DEFAULT_RULES, SplitReason, SplitRule, splits_at
from graphpass.regions.split import Partition, partition
from graphpass.regions.symbols import GraphInput, GuardedSymbols, symbol_of_dim

__all__ = [
    "DEFAULT_RULES",
    "AtenGraph",
    "GraphInput",
    "GuardedSymbols",
    "OpCall",
    "PaddedValue",
    "PaddingFinding",
    "PaddingProof",
    "PaddingReason",
    "PaddingRule",
    "Partition",
    "Region",
    "RegionGraph",
    "SplitReason",
    "SplitRule",
    "Verdict",
    "independent_along",
    "mixing_of",
    "padding_of",
    "partition",
    "prove_partition",
    "register_padding_rule",
    "splits_at",
    "symbol_of_dim",
]
