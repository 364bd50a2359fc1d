"""Which sizes of a graph may be padded: a proof over its aten operators, with no run of it.

``values`` is what the pass knows of a tensor, ``sizes`` how sizes factor, ``program`` the graph as a plain record,
``calls`` and ``rules`` what each operator does with padding, ``interpreter`` runs them, ``proof`` draws the verdict,
``independence`` asks if entries depend on each other at all.
"""

from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.independence import independent_along
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
    "independent_along",
    "interpret",
    "padding_of",
    "register_padding_rule",
]
