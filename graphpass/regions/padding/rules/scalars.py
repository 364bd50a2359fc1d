"""Arithmetic on padding values: casts, and the results of pointwise operators."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from graphpass.regions.padding.nodes import operator_named
from graphpass.regions.padding.values import Approximate, Pad

__all__ = ["Entry", "cast_pad", "evaluated"]


def cast_pad(pad: Pad | None, dtype: torch.dtype) -> Pad | None:
    """``pad`` cast to ``dtype``; None if the value becomes unknown."""
    if pad is None:
        return None
    if isinstance(pad, Approximate):
        return pad if dtype.is_floating_point or (dtype.is_complex and pad is Approximate.NOT_FINITE) else None
    if dtype is torch.bool:
        return bool(pad)
    if dtype.is_complex:
        return None if math.isfinite(pad) else Approximate.NOT_FINITE
    if dtype.is_floating_point:
        return _rounded(float(pad), dtype)
    if isinstance(pad, float) and not (math.isfinite(pad) and abs(pad) < 2**53):
        return None
    limits = torch.iinfo(dtype)
    return int(pad) if limits.min <= pad <= limits.max else None


@functools.lru_cache(maxsize=1024)
def _rounded(number: float, dtype: torch.dtype) -> Pad:
    rounded = float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item())
    return Approximate.NOT_FINITE if math.isnan(rounded) else rounded


_NUMBERS: dict[Approximate | None, tuple[float, ...]] = {
    Approximate.MASKED: (-1e4, -6e4),
    Approximate.POSITIVE: (1e-3, 0.5, 1.0, 2.0, 8.0),
    Approximate.NONNEGATIVE: (0.0, 1e-3, 0.5, 1.0, 2.0, 8.0),
    Approximate.FINITE: (-8.0, -2.0, -1.0, -0.5, 0.0, 1e-3, 0.5, 1.0, 2.0, 8.0),
    Approximate.NOT_FINITE: (math.nan, math.inf, -math.inf),
    None: (0.3, 0.9),
}
"""Numbers of each kind, on both sides of where pointwise functions have their poles and the ends of their domains.

Contents that follow from no known value (None) are assumed to lie where functions are finite.
"""


class Entry(tuple[str, torch.dtype, bool]):
    """A tensor entry as argument of :func:`evaluated`: (number or kind as text, dtype, whether it has dimensions)."""

    __slots__ = ()

    @staticmethod
    def of(pad: Pad | None, dtype: torch.dtype, *, has_dims: bool) -> Entry:
        """The entry that holds ``pad``."""
        return Entry((pad.name if isinstance(pad, Approximate) else repr(pad), dtype, has_dims))

    def numbers(self) -> tuple[bool | int | float, ...]:
        """The number of the entry, or numbers of its kind."""
        text, dtype, _ = self
        if text in Approximate.__members__:
            return _NUMBERS[Approximate[text]]
        if text == "None":
            return (False, True) if dtype is torch.bool else _NUMBERS[None] if dtype.is_floating_point else (1, 2)
        if text in ("True", "False"):
            return (text == "True",)
        return (float(text) if dtype is torch.bool or dtype.is_floating_point else int(text),)


def evaluated(op: str, arguments: Sequence[tuple[str, Any]]) -> Pad | None:
    """The result of a pointwise operator for one entry of each tensor; None if nothing is known of it.

    It is a number if all entries are numbers. Otherwise the operator is computed for numbers of each kind.

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
    entries = {name: value for name, _, value in arguments if isinstance(value, Entry)}
    cases = list(itertools.product(*(entry.numbers() for entry in entries.values())))
    if called is None:
        return None
    keywords = {name: float(value) if kind == "float" else value for name, kind, value in arguments}
    for (name, (_, dtype, has_dims)), column in zip(entries.items(), zip(*cases, strict=True), strict=True):
        shape = (len(cases),) if has_dims or len(cases) > 1 else ()
        keywords[name] = torch.tensor(column, dtype=dtype, device="cpu").reshape(shape)
    try:
        result = called(**keywords)
        numbers = result.tolist() if result.numel() == len(cases) else None
    except Exception:
        return None
    if numbers is None or result.dtype.is_complex:
        return None
    if len(cases) == 1:
        return _plain(result.item())
    return _kind_of(numbers, signed=all(entry[0] != "None" for entry in entries.values()))


def _plain(number: bool | int | float) -> Pad:
    return Approximate.NOT_FINITE if isinstance(number, float) and math.isnan(number) else number


def _kind_of(numbers: Sequence[bool | int | float], *, signed: bool) -> Approximate | None:
    if not isinstance(numbers[0], float):
        return None
    if not all(map(math.isfinite, numbers)):
        return Approximate.NOT_FINITE
    if not signed or min(numbers) < 0:
        return Approximate.FINITE
    return Approximate.POSITIVE if min(numbers) > 0 else Approximate.NONNEGATIVE
