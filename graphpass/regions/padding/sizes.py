"""Sizes as products of factors: which are padded, and how a view regroups them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from graphpass.regions.padding.values import Factors, PaddedValue, Place, Size

__all__ = ["Regrouping", "Sizes", "as_size", "product", "quotient"]


def as_size(value: object) -> Size:
    """``value`` as an int if it is a whole number, else as a sympy expression."""
    if isinstance(value, int):
        return int(value)
    expression = sympy.sympify(value)
    return int(expression) if expression.is_Integer else expression


@functools.lru_cache(maxsize=8192)
def product(factors: Factors) -> Size:
    """The product of ``factors``; 1 without any."""
    return as_size(math.prod(factors))


@functools.lru_cache(maxsize=8192)
def quotient(size: Size, factor: Size) -> Size | None:
    """``size / factor`` where that is a polynomial with whole coefficients for all sizes, else None."""
    if size == factor:
        return 1
    if factor == 1:
        return size
    if factor == 0:
        return None
    if isinstance(size, int):
        return size // factor if isinstance(factor, int) and size % factor == 0 else None
    if isinstance(factor, int):
        content, rest = size.primitive()
        return as_size(content // factor * rest) if content % factor == 0 else None
    if not size.has(sympy.Add) and not factor.has(sympy.Add):
        return _quotient_of_monomials(size, factor)
    numerator, denominator = sympy.cancel(size / factor).as_numer_denom()
    return as_size(numerator) if denominator == 1 else None


def _quotient_of_monomials(size: sympy.Expr, factor: sympy.Expr) -> Size | None:
    left = dict(size.as_powers_dict())
    for base, power in factor.as_powers_dict().items():
        if base.is_Integer:
            continue
        remaining = left.get(base, 0) - power
        if remaining < 0:
            return None
        left[base] = remaining
    size_coefficient, factor_coefficient = size.as_coeff_Mul()[0], factor.as_coeff_Mul()[0]
    if size_coefficient % factor_coefficient != 0:
        return None
    powers = (base**power for base, power in left.items() if not base.is_Integer)
    return as_size(math.prod(powers, start=size_coefficient / factor_coefficient))


class Sizes:
    """The padded symbols of one run of the pass, and what follows for sizes.

    Args:
        fields: candidate symbol -> key field. The symbols of one field are one size.
        ordered: the real entries are the first ones. Where they may be any (``independent_along``), no entry may reach
            another's place, and no value of the padding is known.
    """

    def __init__(self, fields: Mapping[sympy.Symbol, str], *, ordered: bool = True) -> None:
        self.fields = dict(fields)
        self.ordered = ordered
        first: dict[str, sympy.Symbol] = {}
        for symbol, field in self.fields.items():
            first.setdefault(field, symbol)
        self._same = {symbol: first[field] for symbol, field in self.fields.items() if first[field] != symbol}
        self._named: dict[Size, tuple[str, ...]] = {}
        self._renamed: dict[sympy.Basic, Size] = {}
        self._grows: dict[Size, bool] = {}

    def fields_of(self, size: object) -> tuple[str, ...]:
        """The key fields whose padding changes ``size``."""
        if not isinstance(size, sympy.Basic):
            return ()
        found = self._named.get(size)
        if found is None:
            names = (self.fields[symbol] for symbol in size.free_symbols if symbol in self.fields)
            found = self._named[size] = tuple(sorted(set(names)))
        return found

    def padded(self, size: object) -> bool:
        """Whether ``size`` has one value in the run at real sizes and another in the padded run."""
        return bool(self.fields_of(size))

    def grows(self, size: Size) -> bool:
        """Whether ``size`` is at least as large in the padded run as in the real one, whatever the sizes are."""
        if not self.padded(size):
            return True
        found = self._grows.get(size)
        if found is None:
            found = self._grows[size] = self._grows_by_parts(size)
        return found

    def _grows_by_parts(self, size: Any) -> bool:
        kind = type(size).__name__
        if size.is_Symbol:
            return True
        if kind in ("Add", "Max", "Min"):
            return all(self.grows(part) for part in size.args)
        if kind == "Mul":
            return all(self.grows(part) and (self.padded(part) or part.is_nonnegative is True) for part in size.args)
        if kind in ("FloorDiv", "CeilDiv", "CleanDiv", "Pow"):
            positive = not self.padded(size.args[1]) and size.args[1].is_positive is True
            return positive and self.grows(size.args[0])
        return False

    def renamed(self, size: Size) -> Size:
        """``size`` with one symbol for each key field."""
        if isinstance(size, int) or not self._same:
            return size
        found = self._renamed.get(size)
        if found is None:
            found = self._renamed[size] = as_size(size.xreplace(self._same))
        return found

    def one_each(self, shape: Iterable[Size]) -> tuple[Factors, ...]:
        """The factors of a shape of which nothing but the sizes is known: one for each dimension."""
        return tuple((size,) if size != 1 else () for size in map(self.renamed, shape))

    def places(self, value: PaddedValue, dims: Iterable[int] | None = None) -> list[Place]:
        """The places of the padded factors of ``value``, in order, within ``dims`` (all by default)."""
        wanted = range(value.rank) if dims is None else dims
        return [(dim, at) for dim in wanted for at, size in enumerate(value.factors[dim]) if self.padded(size)]

    def any_padded(self, factors: Factors) -> bool:
        """Whether one of the factors is padded."""
        return any(self.padded(size) for size in factors)

    def is_prefix(self, factors: Factors) -> bool:
        """Whether at most the outermost factor of a dimension is padded: no padding stands between real entries."""
        return not self.any_padded(factors[1:])

    def starts_clean(self, factors: Factors) -> bool:
        """Whether the clean entries of a dimension are its first ones, so that earlier entries may be used."""
        return self.is_prefix(factors) if self.ordered else not self.any_padded(factors)

    def merged(self, factors: Sequence[Size]) -> Factors:
        """``factors`` with neighbours that are not padded multiplied, and without ones."""
        result: list[Size] = []
        for size in factors:
            if size == 1:
                continue
            if result and not self.padded(size) and not self.padded(result[-1]):
                result[-1] = product((result[-1], size))
            else:
                result.append(size)
        return tuple(result)

    def unified(self, first: Factors, second: Factors) -> Factors | None:
        """The factors of a dimension in which two tensors meet entry by entry; None if their clean entries differ.

        A dimension of size 1 meets any other.
        """
        if first == second or not second:
            return first
        if not first:
            return second
        padded = self.any_padded(first), self.any_padded(second)
        if not any(padded):
            return first
        if (
            self.ordered
            and all(padded)
            and self.is_prefix(first)
            and self.is_prefix(second)
            and product(first) == product(second)
        ):
            return (product(first),)
        return None


class Regrouping:
    """A row-major walk over the factors of a tensor that cuts them into the dimensions of a view.

    Args:
        sizes: which sizes are padded.
        factors: the factors of each dimension of the viewed tensor.
    """

    def __init__(self, sizes: Sizes, factors: Sequence[Factors]) -> None:
        self._sizes = sizes
        self._left: list[tuple[Size, Place | None]] = []
        for dim, of_dim in enumerate(factors):
            for at, size in enumerate(of_dim):
                self._push(size, (dim, at) if sizes.padded(size) else None)
        self._next = 0

    def _push(self, size: Size, place: Place | None) -> None:
        if place is None and self._left and self._left[-1][1] is None:
            self._left[-1] = (product((self._left[-1][0], size)), None)
        else:
            self._left.append((size, place))

    def take(self, size: Size) -> list[tuple[Size, Place | None]] | None:
        """The factors of the next dimension, of ``size``, each with its padded place; None if one is cut through."""
        taken: list[tuple[Size, Place | None]] = []
        while size != 1:
            if self._next == len(self._left):
                return None
            found, place = self._left[self._next]
            rest = quotient(size, found)
            if rest is not None:
                taken.append((found, place))
                self._next, size = self._next + 1, rest
                continue
            inner = quotient(found, size)
            if inner is None or (place is not None and not self._splits(size, inner)):
                return None
            taken.append((size, place))
            self._left[self._next] = (inner, None)
            self._merge_following()
            size = 1
        return taken

    def _splits(self, outer: Size, inner: Size) -> bool:
        return self._sizes.ordered and self._sizes.padded(outer) and not self._sizes.padded(inner)

    def _merge_following(self) -> None:
        at = self._next
        if at + 1 < len(self._left) and self._left[at][1] is None and self._left[at + 1][1] is None:
            self._left[at : at + 2] = [(product((self._left[at][0], self._left[at + 1][0])), None)]

    def finished(self) -> bool:
        """Whether every factor was taken."""
        return self._next == len(self._left)
