"""Sizes as products of factors: which factors are padded, and how a view regroups them."""

from __future__ import annotations

import enum
import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from graphpass.padding.values import Factors, PaddedValue, Place, Size


class Question(enum.Enum):
    """What a run of the pass asks."""

    #: Is padding harmless? The real entries are the first ones of each padded factor.
    PADDING = "padding"
    #: Are the rows independent? Any entries may be the real ones: none may move, and nothing is known of padding.
    INDEPENDENCE = "independence"


def is_zero_size(size: Any) -> bool:
    """Whether an expression is zero at all sizes."""
    return bool(sympy.expand(size) == 0)


def as_size(value: object) -> Size:
    """``value`` as an int if it is a whole number, else as a sympy expression."""
    if isinstance(value, int):
        return int(value)
    expression = sympy.sympify(value)
    return int(expression) if expression.is_Integer else expression


@functools.lru_cache(maxsize=8192)
def product(factors: Factors) -> Size:
    """The product of ``factors``; 1 if there are none."""
    return as_size(math.prod(factors))


@functools.lru_cache(maxsize=8192)
def quotient(size: Size, factor: Size) -> Size | None:
    """``size / factor`` if it is a polynomial with integer coefficients, else None."""
    if size == factor:
        return 1
    if factor == 1:
        return size
    if factor == 0:
        return None
    if isinstance(size, int):
        return size // factor if isinstance(factor, int) and size % factor == 0 else None
    if isinstance(factor, int):
        content, rest = sympy.factor_terms(size).primitive()  # sympy writes 2 * (n + 17) as 2 * n + 34
        return as_size(content // factor * rest) if content % factor == 0 else None
    ratio = size / factor
    if size.has(sympy.Add) or factor.has(sympy.Add):
        ratio = sympy.cancel(ratio)
    numerator, denominator = ratio.as_numer_denom()
    return as_size(numerator) if denominator == 1 else None


class Sizes:
    """The padded symbols of one run of the pass, and questions about sizes that depend on them."""

    def __init__(self, fields: Mapping[sympy.Symbol, str], question: Question = Question.PADDING) -> None:
        self.fields = dict(fields)
        self.question = question
        self.real_first = question is Question.PADDING  #: the real entries come first along each padded factor
        first: dict[str, sympy.Symbol] = {}
        for symbol, field in self.fields.items():
            first.setdefault(field, symbol)
        self._same = {symbol: first[field] for symbol, field in self.fields.items() if first[field] != symbol}
        self._fields_of = functools.cache(self._fields_of_expression)
        self._replaced = functools.cache(lambda size: as_size(size.xreplace(self._same)))
        self.grows = functools.cache(self._grows)

    def fields_of(self, size: object) -> tuple[str, ...]:
        """The key fields whose padding changes ``size``."""
        return self._fields_of(size) if isinstance(size, sympy.Basic) else ()

    def _fields_of_expression(self, size: sympy.Basic) -> tuple[str, ...]:
        return tuple(sorted({self.fields[symbol] for symbol in size.free_symbols if symbol in self.fields}))

    def padded(self, size: object) -> bool:
        """Whether ``size`` differs between the run at the real sizes and the padded run."""
        return bool(self.fields_of(size))

    def _grows(self, size: Any) -> bool:
        """Whether ``size`` is at least as large in the padded run as in the run at the real sizes, for all sizes."""
        if not self.padded(size) or size.is_Symbol:
            return True
        kind = type(size).__name__
        if kind in ("Add", "Max", "Min", "TruncToInt", "ToFloat"):
            return all(self.grows(part) for part in size.args)
        if kind == "Mul":
            return all(self.grows(part) and (self.padded(part) or part.is_nonnegative is True) for part in size.args)
        if kind in ("FloorDiv", "CeilDiv", "CleanDiv", "Pow"):
            positive = not self.padded(size.args[1]) and size.args[1].is_positive is True
            return positive and self.grows(size.args[0])
        return False

    def renamed(self, size: Size) -> Size:
        """``size`` with all symbols of a key field replaced by the first of them."""
        return size if isinstance(size, int) or not self._same else self._replaced(size)

    def one_each(self, shape: Iterable[Size]) -> tuple[Factors, ...]:
        """The factors of a shape, with one factor for each dimension."""
        return tuple((size,) if size != 1 else () for size in map(self.renamed, shape))

    def places(self, value: PaddedValue, dims: Iterable[int] | None = None) -> list[Place]:
        """The places of the padded factors of ``value``, in order, within ``dims`` (all by default)."""
        wanted = range(value.rank) if dims is None else dims
        return [(dim, at) for dim in wanted for at, size in enumerate(value.factors[dim]) if self.padded(size)]

    def any_padded(self, factors: Factors) -> bool:
        """Whether one of the factors is padded."""
        return any(self.padded(size) for size in factors)

    def first_padded(self, *factors: Factors) -> Size | None:
        """The first padded factor of these dimensions."""
        return next((size for of_dim in factors for size in of_dim if self.padded(size)), None)

    def is_prefix(self, factors: Factors) -> bool:
        """Whether only the outermost factor of a dimension is padded, if any: no padding lies between real entries."""
        return not self.any_padded(factors[1:])

    def starts_clean(self, factors: Factors) -> bool:
        """Whether the clean entries of a dimension are its first ones, so an entry may depend on earlier entries."""
        return self.is_prefix(factors) if self.real_first else not self.any_padded(factors)

    def merged(self, factors: Sequence[Size]) -> Factors:
        """``factors`` with adjacent unpadded factors multiplied, and without factors of 1."""
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
        """The common factors of a dimension of two tensors combined entry by entry; None if their clean entries differ.

        A dimension of size 1 broadcasts to any other.
        """
        if first == second or not second:
            return first
        if not first:
            return second
        padded = self.any_padded(first), self.any_padded(second)
        if not any(padded):
            return first
        if not (self.real_first and all(padded) and product(first) == product(second)):
            return None
        # guard: proof_mirrored_factors
        return (product(first),) if self.is_prefix(first) and self.is_prefix(second) else None


class Regrouping:
    """Divides the factors of a tensor, in row-major order, into dimensions of a view; padded ones keep their order."""

    def __init__(self, sizes: Sizes, factors: Sequence[Factors]) -> None:
        self._sizes = sizes
        #: The factors that no dimension of the view has yet; unpadded ones are merged.
        self.left = deque(sizes.merged([size for of_dim in factors for size in of_dim]))

    def take(self, size: Size) -> Factors | None:
        """The factors of the view's next dimension; None if one of this size would cut through a padded factor."""
        of_dim: list[Size] = []
        padded = self._sizes.padded
        while size != 1:
            if not self.left:
                return None
            factor = self.left[0]
            rest = quotient(size, factor)
            if rest is not None:
                of_dim.append(self.left.popleft())
                size = rest
                continue
            inner = quotient(factor, size)
            if inner is None:
                return None
            # guard: proof_split_size
            if padded(factor) and not (self._sizes.real_first and padded(size) and not padded(inner)):
                return None
            self.left.popleft()
            self.left = deque(self._sizes.merged([inner, *self.left]))
            return (*of_dim, size)
        return tuple(of_dim)
