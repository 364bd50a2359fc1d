"""Helpers for tables of padding rules."""

from __future__ import annotations

from graphpass.regions.padding.calls import PaddingRule

__all__ = ["aten", "prims"]


def aten(rule: PaddingRule, names: str) -> dict[str, PaddingRule]:
    """A table that maps each aten operator in ``names`` (separated by blanks) to ``rule``."""
    return {f"aten::{name}": rule for name in names.split()}


def prims(rule: PaddingRule, names: str) -> dict[str, PaddingRule]:
    """A table like :func:`aten` for the ``prims`` operators, into which compilers decompose others."""
    return {f"prims::{name}": rule for name in names.split()}
