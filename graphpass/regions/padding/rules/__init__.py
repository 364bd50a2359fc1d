"""Built-in padding rules, one module for each kind of operator."""

from __future__ import annotations

import torch

from graphpass.compat import operators
from graphpass.regions.padding.calls import PaddingRule
from graphpass.regions.padding.rules import (
    attention,
    contractions,
    creation,
    indexing,
    marked,
    normalisations,
    pointwise,
    randomness,
    reductions,
    rowwise,
    scatters,
    shapes,
    slices,
    windows,
)

__all__ = ["BUILT_IN", "rule_of_tags"]

BUILT_IN: dict[str, PaddingRule] = {
    name: rule
    for module in (
        attention,
        contractions,
        creation,
        indexing,
        marked,
        normalisations,
        pointwise,
        randomness,
        reductions,
        rowwise,
        scatters,
        shapes,
        slices,
        windows,
    )
    for name, rule in module.RULES.items()
}
"""Qualified name without overload -> rule."""


def rule_of_tags(op: operators.OpOverload) -> PaddingRule | None:
    """The rule implied by an operator's tags (pointwise, random); None if there is none."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return randomness.random_numbers
    if torch.Tag.pointwise in op.tags:
        return pointwise.entry_by_entry
    return None
