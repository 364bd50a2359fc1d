"""One operator call as a padding rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy

from graphpass.regions.padding.nodes import ResultShape, TensorShape
from graphpass.regions.padding.sizes import Sizes
from graphpass.regions.padding.values import Factors, PaddedValue, PaddingFinding, Place, Size, Verdict

__all__ = ["OpCall", "PaddingReason", "PaddingRule", "Unknown", "padded_sizes_in", "tensors_of"]


@dataclass(frozen=True, slots=True)
class PaddingReason:
    """Why no entry of an operator's results can be trusted in a padded run.

    Attributes:
        why: what the operator does, for the report: "mean over the padded dimension 1".
        verdict: RUNTIME where the contents of a call decide, else UNPROVED.
        size: the padded size at fault, where one can be named.
    """

    why: str
    verdict: Verdict = Verdict.UNPROVED
    size: Size | None = None


class Unknown(Exception):  # noqa: N818 - control flow within the rules, never seen by a caller
    """Raised inside a rule: its results depend on padding, for ``reason``."""

    def __init__(self, reason: PaddingReason) -> None:
        super().__init__(reason.why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator.

    Attributes:
        op: its name, ``aten.mean.dim``.
        name: its base name, ``mean``.
        arguments: schema name -> argument, defaults included. A tensor is a :class:`PaddedValue`, a symbolic number a
            sympy expression, a list a tuple.
        result: the shape of the result, or of each result.
        where: the user's line.
        sizes: which sizes are padded.
        assumptions: what the proof rests on; rules add to it.
        everywhere: findings for the whole graph, whatever becomes of the results; rules add to it.
    """

    op: str
    name: str
    arguments: Mapping[str, Any]
    result: ResultShape
    where: str
    sizes: Sizes
    assumptions: set[str]
    everywhere: set[PaddingFinding]

    def tensor(self, *names: str) -> PaddedValue:
        """The tensor argument of one of these names.

        Raises:
            TypeError: the call has none.
        """
        value = self.argument(*names)
        if not isinstance(value, PaddedValue):
            raise TypeError(f"{self.op} has no tensor {names[0]!r}")
        return value

    def argument(self, *names: str, default: Any = None) -> Any:
        """The argument of the first of these names that the operator's schema has."""
        return next((self.arguments[name] for name in names if name in self.arguments), default)

    def padded(self, size: object) -> bool:
        """Whether ``size`` differs between the run at real sizes and the padded run."""
        return self.sizes.padded(size)

    @property
    def asks_independence(self) -> bool:
        """Whether the question is if an entry depends on other indices along a padded factor at all.

        Then a rule returns a reason also where only earlier or masked entries matter.
        """
        return not self.sizes.ordered

    @property
    def shape(self) -> TensorShape:
        """The shape of the one result."""
        if not isinstance(self.result, TensorShape):
            raise TypeError(f"{self.op} returns no single tensor")
        return self.result

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """The shapes of all results that are tensors."""
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        return tuple(result for result in results if isinstance(result, TensorShape))

    def fresh(self, shape: TensorShape | None = None) -> PaddedValue:
        """A clean value of the result's shape, with one factor for each dimension and unknown padding."""
        shape = shape or self.shape
        return PaddedValue(self.sizes.one_each(shape.sizes), dtype=shape.dtype)

    def places(self, value: PaddedValue, dims: Iterable[int] | None = None) -> list[Place]:
        """The padded factors of ``value``, within ``dims``."""
        return self.sizes.places(value, dims)

    def dim(self, dim: object, rank: int) -> int:
        """A dimension counted from the front."""
        if not isinstance(dim, int):
            raise TypeError(f"{self.op}: {dim!r} is no dimension")
        return dim % rank if rank else 0

    def refuse(self, why: str, size: object = None) -> Unknown:
        """The exception that says why the results depend on padding."""
        return Unknown(PaddingReason(why, size=size if self.padded(size) else None))

    def refuse_place(self, value: PaddedValue, place: Place, what: str) -> Unknown:
        """The exception that says ``what`` the call does over the padded factor at ``place``."""
        pad = value.pad_at(place)
        held = "" if pad is None else f" (padding holds {getattr(pad, 'value', pad)})"
        return self.refuse(f"{what} the padded dimension {place[0]}{held}", value.factors[place[0]][place[1]])

    def unpadded(self, value: PaddedValue, dims: Iterable[int], what: str) -> None:
        """Refuse the call if one of ``dims`` is padded.

        Raises:
            Unknown: one is.
        """
        for place in self.places(value, dims):
            raise self.refuse_place(value, place, what)

    def no_padded_numbers(self, *but: str) -> None:
        """Refuse the call if an argument besides those named ``but`` is a padded size used as a number.

        Raises:
            Unknown: one is.
        """
        for name, argument in self.arguments.items():
            if name not in but:
                for size in padded_sizes_in(argument, self.sizes):
                    raise self.refuse(f"the padded size {size} is a number in it", size)

    def unify(self, first: Factors, second: Factors) -> Factors:
        """The factors of a dimension in which two tensors meet.

        Raises:
            Unknown: the padding of the two lies at different entries.
        """
        found = self.sizes.unified(first, second)
        if found is None:
            at_fault = next(size for size in (*first, *second) if self.padded(size))
            raise self.refuse(f"a dimension of factors {list(first)} meets one of {list(second)}", at_fault)
        return found

    def findings_for(self, reason: PaddingReason) -> frozenset[PaddingFinding]:
        """The findings that ``reason`` stands for: one for each key field at fault."""
        fields = self.sizes.fields_of(reason.size) or self._fields_at_hand()
        return frozenset(PaddingFinding(field, self.op, reason.why, self.where, "", reason.verdict) for field in fields)

    def _fields_at_hand(self) -> tuple[str, ...]:
        sizes = [size for value in tensors_of(self.arguments.values()) for of_dim in value.factors for size in of_dim]
        sizes += [size for argument in self.arguments.values() for size in padded_sizes_in(argument, self.sizes)]
        sizes += [size for shape in self.shapes for size in shape.sizes]
        found = sorted({field for size in sizes for field in self.sizes.fields_of(size)})
        return tuple(found) or tuple(sorted(set(self.sizes.fields.values())))

    def reached(self, value: PaddedValue, reason: PaddingReason) -> PaddedValue:
        """``value``, with its clean entries dependent on padding for ``reason``."""
        return value.with_findings(self.findings_for(reason))

    def with_arguments(self, **arguments: Any) -> OpCall:
        """This call with other arguments."""
        return replace(self, arguments={**self.arguments, **arguments})


PaddingRule: TypeAlias = Callable[[OpCall], PaddedValue | tuple[PaddedValue | None, ...] | PaddingReason]
"""The abstract value of an operator's result, or of each result, or why the results depend on padding.

For an operator that writes to arguments, the values that these hold afterwards follow the results, in schema order.
"""


def tensors_of(arguments: Iterable[Any]) -> Iterator[PaddedValue]:
    """The tensors among ``arguments``, nested in tuples or not."""
    for argument in arguments:
        if isinstance(argument, PaddedValue):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_of(argument)


def padded_sizes_in(argument: Any, sizes: Sizes) -> Iterator[sympy.Basic]:
    """The padded sizes in an argument that is no tensor, nested in tuples or not."""
    if isinstance(argument, sympy.Basic):
        if sizes.padded(argument):
            yield argument
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for part in argument:
            yield from padded_sizes_in(part, sizes)
