"""What the padding pass knows of a tensor: its size factors, its padding, and what reached its real entries."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import sympy
import torch

__all__ = [
    "ALL_FINITE",
    "LOW_SCORES",
    "VISIBLE_ENTRY",
    "Approximate",
    "Factors",
    "IndexAlong",
    "Pad",
    "PaddedValue",
    "PaddingFinding",
    "Place",
    "Size",
    "Verdict",
]

Size: TypeAlias = int | sympy.Expr
"""A size: an int, or a sympy expression over the symbols of the graph."""

Factors: TypeAlias = tuple[Size, ...]
"""The factors of one dimension, outermost first; their product is the size. A dimension of size 1 has none."""

Place: TypeAlias = tuple[int, int]
"""One factor of a tensor: its dimension, and its position among that dimension's factors."""

ALL_FINITE = "padding is finite, also in intermediate results"
VISIBLE_ENTRY = "every real row of a softmax has a visible real entry"
LOW_SCORES = "attention scores are small beside the mask's -1e4"


class Verdict(enum.Enum):
    """Whether the padding of a size reaches real entries."""

    PROVED = "proved"
    RUNTIME = "decided by contents at run time"
    UNPROVED = "not proved"


class Approximate(enum.Enum):
    """A padding value that is not known exactly."""

    MASKED = "about -1e4 or less"


Pad: TypeAlias = bool | int | float | Approximate
"""The value that an entry of the padding is known to hold; never NaN."""


@dataclass(frozen=True, slots=True)
class PaddingFinding:
    """One way in which padding reaches real entries.

    Attributes:
        field: the key field whose padding does.
        op: the operator through which it does, ``aten.mean.dim``.
        why: what the operator does with the padding.
        where: the user's line and its source text, empty where unknown.
        target: what depends on the padding; empty inside a graph, until an output or a written input is reached.
        verdict: RUNTIME where only contents decide, else UNPROVED.
    """

    field: str
    op: str
    why: str
    where: str = ""
    target: str = ""
    verdict: Verdict = Verdict.UNPROVED

    def reaching(self, target: str) -> PaddingFinding:
        """This finding, as it reaches ``target``."""
        return replace(self, target=target)

    def __str__(self) -> str:
        rows = f"row i of {self.target}" if self.target.startswith(("output", "written")) else self.target or "a value"
        place, _, source = self.where.partition(": ")
        line = f" at {place}: `{source}`" if source else f" at {place}" if place else ""
        several = rows.endswith("numbers")
        may = "may depend" if self.verdict is Verdict.RUNTIME else "depend" if several else "depends"
        return f"{rows} {may} on padding of '{self.field}' through {self.op} ({self.why}){line}"


class IndexAlong(NamedTuple):
    """Every entry of the tensor, real or padded, is its own index along one factor, plus an offset."""

    dim: int
    factor: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """The abstract value of a tensor.

    An entry is *clean* if its index along each padded factor lies below that factor's real size. Unless there are
    findings, each clean entry equals the entry of the same indices in the run at the real sizes.

    Attributes:
        factors: the factors of each dimension.
        padding: (place, value) pairs, sorted by place: the value stands wherever the index along the factor at that
            place is padding and the index along every *other* padded factor is real. Nothing is said where two
            indices are padding at once.
        index: set if the tensor's entries are their own indices along a factor.
        constant: the value of every entry, if that is one known value. It implies padding along every factor.
        dtype: the type of the entries; None in a rule's result stands for the type that the graph has.
        findings: how padding reached clean entries.
        new_fields: key fields along which padding may hold what no real entry holds, such as a count that goes on.
            Other padding repeats real entries, so that its indices are valid.
    """

    factors: tuple[Factors, ...]
    padding: tuple[tuple[Place, Pad], ...] = ()
    index: IndexAlong | None = None
    constant: Pad | None = None
    dtype: torch.dtype | None = None
    findings: frozenset[PaddingFinding] = frozenset()
    new_fields: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.factors)

    @property
    def pads(self) -> dict[Place, Pad]:
        """Place -> the value of its padding, without what ``constant`` implies."""
        return dict(self.padding)

    def pad_at(self, place: Place) -> Pad | None:
        """The value of the padding along one factor, None where unknown."""
        if self.constant is not None:
            return self.constant
        return next((value for at, value in self.padding if at == place), None)

    def with_pads(self, pads: Mapping[Place, Pad | None]) -> PaddedValue:
        """This value with ``pads`` instead of its padding; None stands for unknown."""
        return replace(self, padding=sorted_pads(pads))

    def with_findings(self, findings: Iterable[PaddingFinding]) -> PaddedValue:
        """This value with more findings."""
        added = frozenset(findings)
        return replace(self, findings=self.findings | added) if not added <= self.findings else self


def sorted_pads(pads: Mapping[Place, Pad | None]) -> tuple[tuple[Place, Pad], ...]:
    """The known entries of ``pads`` in the order in which :class:`PaddedValue` holds them."""
    return tuple((place, value) for place, value in sorted(pads.items(), key=lambda item: item[0]) if value is not None)


def is_low(pad: Pad | None) -> bool:
    """Whether ``pad`` counts for nothing in a softmax: MASKED, or a number of at most -1e4."""
    return pad is Approximate.MASKED or (isinstance(pad, float) and pad <= -1e4)


def is_number(pad: Pad | None) -> bool:
    """Whether ``pad`` is an exact number."""
    return pad is not None and not isinstance(pad, Approximate)
