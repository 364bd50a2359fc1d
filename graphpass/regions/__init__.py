"""Split an FX graph into captured and eager regions. Knows no CUDA and no compiler.

``eagerrules`` say why a node cannot be captured, ``assign`` groups the nodes, ``split`` makes a graph module of each
group, ``stitch`` writes the code that runs them in order, and ``partitionproof`` proves which sizes may be padded.
"""

from graphpass.padding import (
    AtenGraph,
    OpCall,
    PaddedValue,
    PaddingFinding,
    PaddingProof,
    PaddingReason,
    PaddingRule,
    Verdict,
    padding_of,
    register_padding_rule,
)
from graphpass.regions.analysis import SplitReason
from graphpass.regions.assign import Region
from graphpass.regions.eagerrules import DEFAULT_RULES, SplitRule, splits_at
from graphpass.regions.split import Partition
from graphpass.regions.symbols import GraphInput

__all__ = [
    "DEFAULT_RULES",
    "AtenGraph",
    "GraphInput",
    "OpCall",
    "PaddedValue",
    "PaddingFinding",
    "PaddingProof",
    "PaddingReason",
    "PaddingRule",
    "Partition",
    "Region",
    "SplitReason",
    "SplitRule",
    "Verdict",
    "padding_of",
    "register_padding_rule",
    "splits_at",
]
