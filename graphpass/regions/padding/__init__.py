"""Prove which sizes of a graph may be padded, from its aten operators alone. See Note [Padding verdicts].

``values`` has the abstract value of a tensor, ``sizes`` the arithmetic of size factors, ``program`` the graph as a
plain record, ``calls`` and ``rules`` the effect of each operator on padding. ``interpreter`` runs a graph over abstract
values, ``proof`` derives the verdict, ``mixing`` answers whether entries depend on each other at all.
"""

from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.interpreter import Interpretation, interpret
from graphpass.regions.padding.program import AtenGraph
from graphpass.regions.padding.proof import PaddingProof, padding_of
from graphpass.regions.padding.registry import register_padding_rule
from graphpass.regions.padding.values import PaddedValue, PaddingFinding, Verdict

__all__ = [
    "AtenGraph",
    "Interpretation",
    "OpCall",
    "PaddedValue",
    "PaddingFinding",
    "PaddingProof",
    "PaddingReason",
    "PaddingRule",
    "Verdict",
    "interpret",
    "padding_of",
    "register_padding_rule",
]
