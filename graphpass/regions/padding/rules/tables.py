"""Tables of rules by operator name."""

from __future__ import annotations

from graphpass.regions.padding.calls import PaddingRule

__all__ = ["aten", "prims"]


def aten(rule: PaddingRule, names: str) -> dict[str, PaddingRule]:
    """The aten operators of these names, separated by blanks, all with one rule."""
    return {f"aten::{name}": rule for name in names.split()}


def prims(rule: PaddingRule, names: str) -> dict[str, PaddingRule]:
    """The same for torch's primitive operators, into which compilers decompose others."""
    return {f"prims::{name}": rule for name in names.split()}
