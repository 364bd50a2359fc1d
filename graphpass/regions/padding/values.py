"""The abstract value of a tensor in the padding pass: size factors, contents of padding, and findings."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import sympy
import torch

__all__ = [
    "ALL_FINITE",
    "COUNT_FROM_START",
    "LOW_SCORES",
    "VISIBLE_ENTRY",
    "Approximate",
    "Factors",
    "IndexAlong",
    "Pad",
    "PaddedValue",
    "PaddingFinding",
    "Place",
    "Sign",
    "Size",
    "Verdict",
]

Size: TypeAlias = int | sympy.Expr
"""A size: an int, or a sympy expression over the symbols of the graph."""

Factors: TypeAlias = tuple[Size, ...]
"""The factors of one dimension, outermost first; their product is its size. A dimension of size 1 has no factors."""

Place: TypeAlias = tuple[int, int]
"""A factor of a tensor: (dimension, position among the factors of that dimension)."""

ALL_FINITE = "padding is finite, also in intermediate results"
VISIBLE_ENTRY = "every real row of a softmax has a visible real entry"
LOW_SCORES = "attention scores are small beside the mask's -1e4"
COUNT_FROM_START = (
    "pass indices that are not negative (`i % x.shape[0]` before the call), and write `i.clamp(min=0)` at that line"
)
"""The remedy for an index that may be negative, and so may count from a padded end."""


class Verdict(enum.Enum):
    """Whether real entries depend on the padding of a size. See Note [Padding verdicts]."""

    PROVED = "proved"
    RUNTIME = "decided by contents at run time"
    UNPROVED = "not proved"


class Approximate(enum.Enum):
    """What is known of padding that follows from known values, where the value itself is not followed."""

    MASKED = "about -1e4 or less, and finite"
    POSITIVE = "finite numbers above zero"
    NONNEGATIVE = "finite numbers, zero or more"
    FINITE = "finite numbers, zero among them"
    NOT_FINITE = "NaN or infinities"


class Sign(enum.Enum):
    """What is known of the entries of a tensor in the run at the real sizes."""

    UNKNOWN = "any"
    NONNEGATIVE = "0 or more"
    REAL_SIZE = "the real size of a dimension, also in a padded run"


Pad: TypeAlias = bool | int | float | Approximate
"""What entries in padding hold, a number or a kind of numbers. NaN is NOT_FINITE. See Note [Numbers in padding]."""


@dataclass(frozen=True, slots=True)
class PaddingFinding:
    """A way in which real entries depend on padding.

    Attributes:
        field: the key field of the padding.
        op: the operator that makes real entries depend on it, ``aten.mean.dim``.
        why: the operator's effect, for the report.
        where: the line of the user's code and its text; empty if unknown.
        target: the output, written input or effect that depends on the padding; empty for values inside a graph.
        verdict: RUNTIME if the contents of a call decide, else UNPROVED.
        remedy: a change of the model after which the size can be padded; empty if no padding suits the operator.
    """

    field: str
    op: str
    why: str
    where: str = ""
    target: str = ""
    verdict: Verdict = Verdict.UNPROVED
    remedy: str = ""

    @property
    def is_by_contents(self) -> bool:
        """Whether only the contents of a call decide, be it by an index or by its sign."""
        return self.verdict is Verdict.RUNTIME or self.remedy == COUNT_FROM_START

    def reaching(self, target: str) -> PaddingFinding:
        """This finding for ``target``."""
        return replace(self, target=target)

    def __str__(self) -> str:
        rows = f"row i of {self.target}" if self.target.startswith(("output", "written")) else self.target or "a value"
        place, _, source = self.where.partition(": ")
        line = f" at {place}: `{source}`" if source else f" at {place}" if place else ""
        several = rows.endswith("numbers")
        may = "may depend" if self.verdict is Verdict.RUNTIME else "depend" if several else "depends"
        return f"{rows} {may} on padding of '{self.field}' through {self.op} ({self.why}){line}"


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

    Attributes:
        factors: the factors of each dimension.
        padding: (place, value) pairs, sorted by place. The value is that of the entries whose index is in the padding
            along the factor at that place and real along every *other* padded factor. Nothing is known of entries with
            two indices in padding.
        index: set if each entry equals its index along a factor plus an offset.
        constant: the value of all entries, if it is known; then also the value of all padding.
        sign: what is known of the sign of real entries, which say whether an index counts from the start.
        dtype: the dtype; a rule may leave it None to use the dtype of the graph.
        findings: the ways in which clean entries depend on padding; empty if they do not.
        new_fields: key fields along which padding may have values that no real entry has.
            See Note [Contents of padding].
        by_position: findings for the index of each entry in its batch, which the contents depend on. Only ``mixing_of``
            asks for them; they do not count where the value is an index that pairs each entry with itself.
    """

    factors: tuple[Factors, ...]
    padding: tuple[tuple[Place, Pad], ...] = ()
    index: IndexAlong | None = None
    constant: Pad | None = None
    sign: Sign = Sign.UNKNOWN
    dtype: torch.dtype | None = None
    findings: frozenset[PaddingFinding] = frozenset()
    new_fields: frozenset[str] = frozenset()
    by_position: frozenset[PaddingFinding] = frozenset()

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.factors)

    @property
    def pads(self) -> dict[Place, Pad]:
        """Place -> the value of its padding; does not include ``constant``."""
        return dict(self.padding)

    def pad_at(self, place: Place) -> Pad | None:
        """The value of the padding along one factor; None if unknown."""
        if self.constant is not None:
            return self.constant
        return next((value for at, value in self.padding if at == place), None)

    def with_pads(self, pads: Mapping[Place, Pad | None]) -> PaddedValue:
        """This value with ``pads`` in place of its padding; None means unknown."""
        return replace(self, padding=sorted_pads(pads))

    def with_findings(self, findings: Iterable[PaddingFinding]) -> PaddedValue:
        """This value with ``findings`` added."""
        added = frozenset(findings)
        return replace(self, findings=self.findings | added) if not added <= self.findings else self


def sorted_pads(pads: Mapping[Place, Pad | None]) -> tuple[tuple[Place, Pad], ...]:
    """The known entries of ``pads``, sorted for ``PaddedValue.padding``."""
    return tuple((place, value) for place, value in sorted(pads.items(), key=lambda item: item[0]) if value is not None)


def is_low(pad: Pad | None) -> bool:
    """Whether a score of ``pad`` has zero weight in a softmax: MASKED, or a number of at most -1e4."""
    return pad is Approximate.MASKED or (isinstance(pad, float) and pad <= -1e4)


def is_number(pad: Pad | None) -> bool:
    """Whether ``pad`` is an exact number, neither unknown nor approximate."""
    return pad is not None and not isinstance(pad, Approximate)


def is_zero(pad: Pad | None) -> bool:
    """Whether ``pad`` is exactly zero, or False."""
    return is_number(pad) and pad == 0


def is_finite(pad: Pad | None) -> bool:
    """Whether entries of ``pad`` times zero are zero; unknown contents are assumed to be finite."""
    return pad is not Approximate.NOT_FINITE and not (isinstance(pad, float) and math.isinf(pad))


def blurred(*pads: Pad | None) -> Pad | None:
    """What holds of entries that each depend on some of ``pads`` in a way that is not followed."""
    if not all(map(is_finite, pads)):
        return Approximate.NOT_FINITE
    return None if None in pads or not pads else Approximate.FINITE


def either(first: Pad | None, second: Pad | None) -> Pad | None:
    """What holds of entries that are each of the one or of the other."""
    same = type(first) is type(second) and repr(first) == repr(second)
    return first if same else blurred(first, second)
