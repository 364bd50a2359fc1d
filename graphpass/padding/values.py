"""The abstract value of a tensor, its findings, and what is known of the numbers in its padding."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch

from graphpass.compat import operators
from graphpass.ledger import PaddingFinding

Size: TypeAlias = int | sympy.Expr
"""A size: an int, or a sympy expression over the symbols of the graph."""

Factors: TypeAlias = tuple[Size, ...]
"""The factors of one dimension, outermost first; their product is its size. A dimension of size 1 has no factors."""

Place: TypeAlias = tuple[int, int]
"""A factor of a tensor: (dimension, position among the factors of that dimension)."""

ALL_FINITE = "padding is finite, also in intermediate results"


_LARGEST_SQUARED = math.sqrt(torch.finfo(torch.float32).max)


class Approximate(enum.Enum):
    """What is known of padding that follows from known values, where the value itself is not followed."""

    FINITE = "finite numbers, zero among them"
    HIDDEN = "finite numbers, and -inf or as low where a mask says so"
    NOT_FINITE = "NaN or infinities"
    BEHIND = "the index behind the last entry, where a write leaves no trace"


Pad: TypeAlias = bool | int | float | Approximate
"""What entries in padding hold, a number or a kind of numbers. NaN is NOT_FINITE. See Note [Numbers in padding]."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The symbolic sizes and the dtype of a tensor."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype


ResultShape: TypeAlias = "TensorShape | Size | tuple[ResultShape, ...] | None"
"""The shape of a node's result: a tensor, a number, a tuple of these, or None."""


class IndexAlong(NamedTuple):
    """Every entry of the tensor, real or padding, equals its index along one factor plus ``offset``."""

    dim: int
    factor: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """The abstract value of a tensor.

    An entry is *clean* if its index along each padded factor is below that factor's real size. Without findings, each
    clean entry equals the entry with the same indices in the run at the real sizes. See Note [Padding verdicts].
    """

    factors: tuple[Factors, ...]  #: the factors of each dimension
    #: (place, value) pairs, sorted by place. The value is that of the entries whose index is in the padding along the
    #: factor at that place and real along every *other* padded factor. Nothing is known of entries with two indices
    #: in padding.
    padding: tuple[tuple[Place, Pad | None], ...] = ()
    index: IndexAlong | None = None  #: set if each entry equals its index along a factor plus an offset
    constant: Pad | None = None  #: the value of all entries, if it is known; then also the value of all padding
    #: What real entries hold if the graph makes some of them infinite, else None; so does padding that is not listed.
    real: Pad | None = None
    dtype: torch.dtype | None = None  #: the dtype; a rule may leave it None to use the dtype of the graph
    findings: frozenset[PaddingFinding] = frozenset()  #: the ways in which clean entries depend on padding
    #: Key fields along which padding may have values that no real entry has. See Note [Contents of padding].
    new_fields: frozenset[str] = frozenset()
    #: Places whose padding holds its pad also where other indices are in padding. Only made padding is known so.
    whole: frozenset[Place] = frozenset()
    #: Places whose padding is zero, but for NaN where all real entries along the factor are NaN: weights of a softmax.
    rows: frozenset[Place] = frozenset()
    counted: Size | None = None  #: set if real entries are indices into a dimension of this size at its real size
    #: Findings for the index of each entry in its batch, which the contents depend on. Only ``mixing_of`` asks for
    #: them; they do not count where the value is an index that pairs each entry with itself.
    by_position: frozenset[PaddingFinding] = frozenset()

    @property
    def known_dtype(self) -> torch.dtype:
        """The dtype of an argument, which a walk has set."""
        assert self.dtype is not None, "a walk sets the dtype of each value"
        return self.dtype

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.factors)

    @property
    def pads(self) -> dict[Place, Pad | None]:
        """Place -> the value of its padding; does not include ``constant``."""
        return dict(self.padding)

    @property
    def held(self) -> Pad | None:
        """What real entries hold; None for finite contents that are not known."""
        return self.constant if self.constant is not None else self.real

    def pad_at(self, place: Place) -> Pad | None:
        """The value of the padding along one factor; None for finite contents that are not known."""
        if self.constant is not None:
            return self.constant
        return next((value for at, value in self.padding if at == place), self.real)  # guard: proof_infinite_entries

    def with_pads(self, pads: Mapping[Place, Pad | None]) -> PaddedValue:
        """This value with ``pads`` in place of its padding; None means finite and otherwise unknown."""
        return replace(self, padding=tuple((place, pads[place]) for place in sorted(pads)))

    def with_real(self, real: Pad | None) -> PaddedValue:
        """This value with ``real`` in its real entries; if that is None, it need not be told from padding."""
        pads = tuple((place, pad) for place, pad in self.padding if pad is not None or real is not None)
        return replace(self, real=real, padding=pads)

    def with_findings(self, findings: Iterable[PaddingFinding]) -> PaddedValue:
        """This value with ``findings`` added."""
        added = frozenset(findings)
        return replace(self, findings=self.findings | added) if not added <= self.findings else self

    def moved(self, factors: tuple[Factors, ...], to: Mapping[int, int]) -> PaddedValue:
        """This value with ``factors``, its old dimension d now being dimension ``to[d]``; others are gone."""
        pads = {(to[dim], at): pad for (dim, at), pad in self.padding if dim in to}
        index = self.index._replace(dim=to[self.index.dim]) if self.index and self.index.dim in to else None
        rows = frozenset((to[dim], at) for dim, at in self.rows if dim in to)
        return replace(self, factors=factors, index=index, rows=rows).with_pads(pads)

    def adds_nothing(self, place: Place) -> bool:
        """Whether padding along a factor changes no sum of products along it: it is zero, or NaN where that is."""
        return is_zero(self.pad_at(place)) or place in self.rows


def is_number(pad: Pad | None) -> bool:
    """Whether ``pad`` is an exact number, neither unknown nor approximate."""
    return isinstance(pad, (bool, int, float))


def is_zero(pad: Pad | None) -> bool:
    """Whether ``pad`` is exactly zero, or False."""
    return is_number(pad) and pad == 0


def is_extreme(pad: Pad | None) -> bool:
    """Whether ``pad``, or its square in float32, may be infinite."""
    if isinstance(pad, float):
        return abs(pad) > _LARGEST_SQUARED  # guard: proof_squares_overflow
    return pad in (Approximate.NOT_FINITE, Approximate.HIDDEN)


def is_finite(pad: Pad | None) -> bool:
    """Whether entries of ``pad`` times zero are zero; unknown contents are assumed to be finite."""
    return not (math.isinf(pad) if isinstance(pad, float) else is_extreme(pad))


def shown(pad: Pad | None) -> Pad | None:
    """What counts in a softmax over entries of ``pad``: not those that a mask hides."""
    return Approximate.FINITE if pad is Approximate.HIDDEN else pad


def blurred(*pads: Pad | None) -> Pad | None:
    """What holds of entries that each depend on some of ``pads`` in a way that is not followed."""
    if not all(map(is_finite, pads)):
        return Approximate.NOT_FINITE
    return None if None in pads or not pads else Approximate.FINITE


def by_data(first: Pad | None, second: Pad | None) -> Pad | None:
    """What holds of entries that are each of the one or of the other, as contents say, so that a row may have both."""
    if (type(first) is type(second) and repr(first) == repr(second)) or (is_zero(first) and is_zero(second)):
        return first
    extreme = [pad for pad in (first, second) if is_extreme(pad)]
    if extreme and all(pad is Approximate.HIDDEN or (isinstance(pad, float) and pad < 0) for pad in extreme):
        return Approximate.HIDDEN
    return Approximate.NOT_FINITE if extreme else blurred(first, second)


# --- pads through casts and pointwise operators


def cast_pad(pad: Pad | None, dtype: torch.dtype) -> Pad | None:
    """``pad`` cast to ``dtype``; None if the value becomes unknown."""
    if pad is None or pad is Approximate.BEHIND:
        return pad
    if isinstance(pad, Approximate):
        of_complex = Approximate.NOT_FINITE if dtype.is_complex and is_extreme(pad) else None
        return pad if dtype.is_floating_point else of_complex
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
    return _without_nan(float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item()))


def _without_nan(number: bool | int | float) -> Pad:
    return Approximate.NOT_FINITE if isinstance(number, float) and math.isnan(number) else number


_FINITE = (-8.0, -2.0, -1.0, -0.5, 0.0, 1e-3, 0.5, 1.0, 2.0, 8.0)
_NUMBERS: dict[Approximate | None, tuple[float, ...]] = {
    Approximate.FINITE: _FINITE,
    Approximate.HIDDEN: (*_FINITE, -1e38, -math.inf),
    Approximate.NOT_FINITE: (math.nan, math.inf, -math.inf),
    None: (0.3, 0.9),
}
"""Numbers of each kind, on both sides of where pointwise functions have their poles and the ends of their domains.

Contents that follow from no known value (None) are assumed to lie where functions are finite. Beside infinities they
may have either sign.
"""


class Entry(NamedTuple):
    """A tensor entry as argument of :func:`evaluated`."""

    pad: Pad | None  #: what it holds
    dtype: torch.dtype
    has_dims: bool  #: whether the tensor has dimensions; one without does not decide the type of a result

    def numbers(self, unknown: Approximate | None) -> tuple[bool | int | float, ...]:
        """The number of the entry, or numbers of its kind, which is ``unknown`` of others; a zero has either sign."""
        if is_zero(self.pad) and self.dtype.is_floating_point:  # guard: proof_signed_zero
            return 0.0, -0.0
        if isinstance(self.pad, (bool, int, float)):
            return (self.pad,)
        if self.pad is None and self.dtype is torch.bool:
            return False, True  # guard: proof_either_truth
        kind = unknown if self.pad is None else self.pad
        return (0, 1, 2) if kind is None and not self.dtype.is_floating_point else _NUMBERS[kind]


@dataclass(frozen=True, slots=True)
class _Evaluation:
    op: str
    arguments: Sequence[tuple[str, Any]] = field(compare=False)
    text: str  #: of the arguments, by which evaluations are equal: 1, 1.0 and True are not, nor are 0.0 and -0.0


def evaluated(op: str, arguments: Sequence[tuple[str, Any]]) -> Pad | None:
    """The result of a pointwise operator for one entry of each tensor; None if nothing is known of it.

    It is a number if all entries are numbers, or truths that all give the same, and where zero or an infinity absorbs
    others. Otherwise the operator is computed for numbers of each kind.
    """
    return _evaluated(_Evaluation(op, arguments, repr(arguments)))


@functools.lru_cache(maxsize=4096)
def _evaluated(evaluation: _Evaluation) -> Pad | None:
    called, keywords = operator_named(evaluation.op), dict(evaluation.arguments)
    entries = {name: value for name, value in keywords.items() if isinstance(value, Entry)}
    has_extremes = any(is_extreme(getattr(value, "pad", value)) for value in keywords.values())
    unknown = Approximate.FINITE if has_extremes else None  # guard: proof_beside_infinities
    cases = list(itertools.product(*(entry.numbers(unknown) for entry in entries.values())))
    if called is None:
        return None
    is_exact = all(is_number(entry.pad) or entry.dtype is torch.bool for entry in entries.values())
    numbers: list[bool | int | float] = []
    # Each case of exact numbers is computed by itself: a tensor without dimensions does not decide the type there.
    for some in [[case] for case in cases] if is_exact else [cases]:
        try:
            for (name, entry), column in zip(entries.items(), zip(*some, strict=True), strict=True):
                shape = (len(some),) if entry.has_dims or len(some) > 1 else ()
                keywords[name] = torch.tensor(column, dtype=entry.dtype, device="cpu").reshape(shape)
            result = called(**keywords)
        except Exception:
            return None
        if result.numel() != len(some) or result.dtype.is_complex:
            return None
        numbers += result.flatten().tolist()
    pads, name, found = {entry.pad for entry in entries.values()}, evaluation.op.partition(".")[0], numbers[0]
    is_exact |= name in ("aten::mul", "aten::div") and found == 0 and any(map(is_zero, pads))  # guard: proof_zero_times
    is_exact |= name in ("aten::add", "aten::sub") and found in (math.inf, -math.inf)  # guard: proof_added_infinities
    if is_exact and len({repr(number + 0) for number in numbers}) == 1:
        return _without_nan(found + 0 if isinstance(found, float) else found)
    return _kind_of(numbers)


def _kind_of(numbers: Sequence[bool | int | float]) -> Approximate | None:
    if not isinstance(numbers[0], float):
        return None
    extreme = [number for number in numbers if math.isnan(number) or is_extreme(number)]
    if extreme:
        return Approximate.HIDDEN if all(number < 0 for number in extreme) else Approximate.NOT_FINITE
    return Approximate.FINITE


@functools.lru_cache(maxsize=4096)
def operator_named(name: str) -> operators.OpOverload | None:
    """The operator with a qualified name (``aten::add.Tensor``); None if it does not exist."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    op = getattr(operators.operator_packet(namespace, base), overload or "default", None)
    return op if isinstance(op, operators.OpOverload) else None
