"""Arithmetic on padding values: casts, and the results of pointwise operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from graphpass.regions.padding.nodes import operator_named
from graphpass.regions.padding.values import Approximate, Pad

__all__ = ["Entry", "cast_pad", "evaluated"]


def cast_pad(pad: Pad | None, dtype: torch.dtype) -> Pad | None:
    """``pad`` cast to ``dtype``; None if the value becomes unknown."""
    if pad is None or (isinstance(pad, float) and math.isnan(pad)):
        return None
    if isinstance(pad, Approximate):
        return pad if dtype.is_floating_point else None
    if dtype is torch.bool:
        return bool(pad)
    if dtype.is_complex:
        return None
    if dtype.is_floating_point:
        return _rounded(float(pad), dtype)
    if isinstance(pad, float) and not (math.isfinite(pad) and abs(pad) < 2**53):
        return None
    limits = torch.iinfo(dtype)
    return int(pad) if limits.min <= pad <= limits.max else None


@functools.lru_cache(maxsize=1024)
def _rounded(number: float, dtype: torch.dtype) -> float | None:
    rounded = float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item())
    return None if math.isnan(rounded) else rounded


class Entry(tuple[str, torch.dtype, bool]):
    """A tensor entry as argument of :func:`evaluated`: (number as text, dtype, whether the tensor has dimensions)."""

    __slots__ = ()

    @staticmethod
    def of(number: bool | int | float, dtype: torch.dtype, *, has_dims: bool) -> Entry:
        """The entry with the value ``number``."""
        return Entry((repr(number), dtype, has_dims))

    def tensor(self) -> torch.Tensor:
        """A tensor with this entry alone."""
        text, dtype, has_dims = self
        number: bool | float = text == "True" if text in ("True", "False") else float(text)
        exact = int(text) if dtype not in (torch.bool,) and not dtype.is_floating_point else number
        return torch.full((1,) if has_dims else (), exact, dtype=dtype, device="cpu")


def evaluated(op: str, arguments: Sequence[tuple[str, Any]]) -> Pad | None:
    """The result of a pointwise operator for one entry of each tensor; None if it cannot be computed.

    Args:
        op: the operator's qualified name.
        arguments: (schema name, argument) pairs, each tensor as an :class:`Entry`.
    """
    try:
        return _evaluated(op, tuple((name, type(value).__name__, _hashable(value)) for name, value in arguments))
    except TypeError:
        return None


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value


@functools.lru_cache(maxsize=4096)
def _evaluated(op: str, arguments: tuple[tuple[str, str, Any], ...]) -> Pad | None:
    called = operator_named(op)
    if called is None:
        return None
    keywords = {
        name: value.tensor() if isinstance(value, Entry) else float(value) if kind == "float" else value
        for name, kind, value in arguments
    }
    try:
        result = called(**keywords)
        number = result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else None
    except Exception:
        return None
    if not isinstance(number, (bool, int, float)) or (isinstance(number, float) and math.isnan(number)):
        return None
    return number
