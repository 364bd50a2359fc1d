"""One operator call, as padding rules receive it, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy

from graphpass.ledger import PaddingFinding, Reason
from graphpass.padding.sizes import Question, Sizes, product
from graphpass.padding.values import (
    Factors,
    Pad,
    PaddedValue,
    Place,
    ResultShape,
    Size,
    TensorShape,
    blurred,
    is_finite,
    shown,
)

DECLARE_MASK = "under a mask that is an argument, not one that the model computes, declared with padding={'mask': 0}"
HIDE_PADDING = f"hide the padding from it {DECLARE_MASK}"
ROWS_APART = (
    "if row i of its result depends on row i of its arguments alone, say so: make it a function, and"
    " call graphpass.rows_apart(function, dims) of it instead"
)
MAKE_FINITE = (
    "keep the padding finite: bound the divisor (x / norm.clamp(min=1e-6)), or replace what is not"
    " (x.masked_fill(mask == 0, 0), torch.where); zero times NaN is NaN"
)
_ONE_NAME = (
    "if the two sizes are equal in every call, declare both under one name"
    " (dynamic_dims={'x': {0: 'rows'}, 'y': {0: 'rows'}})"
)
_MOST_LETTERS = 160
REGISTER_RULE = "say what the operator does with padding (graphpass.regions.register_padding_rule)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingReason(Reason):
    """Why every entry of an operator's results may differ in a padded run: ``why`` is the operator's effect."""

    is_by_contents: bool = False  #: data selects the entries, so that the contents of a call decide
    size: Size | None = None  #: the padded size that causes it, if it is known


class Unknown(Exception):  # noqa: N818 - control flow within the rules, never raised to a caller
    """Raised in a rule: the results depend on padding, for ``reason``."""

    def __init__(self, reason: PaddingReason) -> None:
        super().__init__(reason.why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator."""

    op: str  #: the operator's name with its overload, ``aten.mean.dim``
    name: str  #: the operator's base name, ``mean``
    #: Schema name -> argument, defaults included. A tensor is a :class:`PaddedValue`, a symbolic number a sympy
    #: expression, a list a tuple.
    arguments: Mapping[str, Any]
    result: ResultShape  #: the shape of the result, or of each result
    where: str  #: the line of the user's code
    sizes: Sizes  #: which sizes are padded, and what is asked
    assumptions: set[str]  #: the conditions on which the proof depends; rules add to them
    #: Findings for the whole graph, even if its outputs do not use the results; rules add to them.
    everywhere: set[PaddingFinding]
    #: Fills the padding of an argument, where the pass makes padding and asks the rule what it needs.
    fills: Callable[[str, Sequence[Place], bool | int | float], None] | None = None

    def wants(self, names: Sequence[str], places: Sequence[Place], fill: bool | int | float) -> None:
        """Say what the operator takes for nothing in the padding of the argument under the first of ``names``."""
        if self.fills is not None and places:
            self.fills(next(name for name in names if name in self.arguments), places, fill)

    def tensor(self, *names: str) -> PaddedValue:
        """The tensor argument under the first of ``names`` that the operator's schema has.

        Raises:
            TypeError: there is none, or it is no tensor.
        """
        value = self.argument(*names)
        if not isinstance(value, PaddedValue):
            raise TypeError(f"{self.op} has no tensor {names[0]!r}")
        return value

    def argument(self, *names: str, default: Any = None) -> Any:
        """The argument under the first of ``names`` that the operator's schema has, else ``default``."""
        return next((self.arguments[name] for name in names if name in self.arguments), default)

    def padded(self, size: object) -> bool:
        """Whether ``size`` differs between the run at the real sizes and the padded run."""
        return self.sizes.padded(size)

    @property
    def asks_independence(self) -> bool:
        """Whether the pass looks for any dependence between indices along a padded factor, not only on padding.

        If so, a rule must return a reason also where an entry depends on earlier or masked entries only.
        """
        return self.sizes.question is Question.INDEPENDENCE

    @property
    def shape(self) -> TensorShape:
        """The shape of the result.

        Raises:
            TypeError: the operator does not return exactly one tensor.
        """
        if not isinstance(self.result, TensorShape):
            raise TypeError(f"{self.op} does not return a single tensor")
        return self.result

    @property
    def results(self) -> tuple[ResultShape, ...]:
        """The shape of each result."""
        return self.result if isinstance(self.result, tuple) else (self.result,)

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """The shapes of all results that are tensors."""
        return tuple(result for result in self.results if isinstance(result, TensorShape))

    def each(self, make: Callable[[TensorShape], PaddedValue]) -> PaddedValue | tuple[PaddedValue | None, ...]:
        """What a rule returns: ``make`` of the result's shape, or of each result that is a tensor."""
        if isinstance(self.result, tuple):
            return tuple(make(shape) if isinstance(shape, TensorShape) else None for shape in self.result)
        return make(self.shape)

    def sides(self, make: Callable[[TensorShape], PaddedValue | None]) -> Iterator[PaddedValue | None]:
        """``make`` of each result after the first; None for one that is no tensor."""
        return (make(shape) if isinstance(shape, TensorShape) else None for shape in self.results[1:])

    def fresh(self, shape: TensorShape | None = None) -> PaddedValue:
        """A value of the result's shape with no findings, one factor for each dimension, and unknown padding."""
        shape = shape or self.shape
        return PaddedValue(self.sizes.one_each(shape.sizes), dtype=shape.dtype)

    def carried(self, value: PaddedValue, *operands: PaddedValue) -> PaddedValue:
        """``value`` with what the operands' padding says of its own, where the operator is not followed.

        Operands of another rank, and dimensions that an operand broadcasts, say nothing.
        """
        pads: dict[Place, Pad | None] = dict(value.pads)
        for dim, at in self.places(value):
            fields = self.sizes.fields_of(value.factors[dim][at])
            beside = [
                operand.pad_at((dim, other))
                for operand in operands or tuple(tensors_of(self.arguments.values()))
                if operand.rank == value.rank
                for other, size in enumerate(operand.factors[dim])
                if not set(fields).isdisjoint(self.sizes.fields_of(size))
            ]
            if (pad := blurred(*beside)) is not None:
                pads.setdefault((dim, at), pad)
        return value.with_pads(pads)

    def places(self, value: PaddedValue, dims: Iterable[int] | None = None) -> list[Place]:
        """The places of the padded factors of ``value``, within ``dims`` (all by default)."""
        return self.sizes.places(value, dims)

    def dim(self, dim: object, rank: int) -> int:
        """``dim`` as a non-negative dimension of a tensor of this rank.

        Raises:
            TypeError: ``dim`` is no integer.
        """
        if not isinstance(dim, int):
            raise TypeError(f"{self.op}: {dim!r} is not a dimension")
        return dim % rank if rank else 0

    def dims(self, dims: Any, rank: int) -> list[int]:
        """``dims`` as non-negative dimensions; all dimensions if there are none."""
        if dims is None or dims == ():
            return list(range(rank))
        return sorted({self.dim(dim, rank) for dim in (dims if isinstance(dims, tuple) else (dims,))} if rank else ())

    def refuse(self, why: str, size: object = None, remedy: str = "") -> Unknown:
        """The exception to raise because the results depend on padding, for the reason ``why``."""
        text = why if len(why) <= _MOST_LETTERS else f"{why[:_MOST_LETTERS]}..."  # sizes may be long expressions
        return Unknown(PaddingReason(text, size=size if self.padded(size) else None, remedy=remedy))

    def refuse_place(self, value: PaddedValue, place: Place, what: str, remedy: str = "") -> Unknown:
        """The exception to raise because the call does ``what`` ("sums products over") with the factor at ``place``."""
        pad = value.pad_at(place)
        contents = "" if pad is None else f" (padding holds {getattr(pad, 'value', pad)})"
        if remedy and not is_finite(shown(pad)):
            remedy = MAKE_FINITE
        size = value.factors[place[0]][place[1]]
        return self.refuse(f"{what} the padded dimension {place[0]}{contents}", size, remedy)

    def unpadded(self, value: PaddedValue, dims: Iterable[int], what: str, remedy: str = "") -> None:
        """Require that none of ``dims`` is padded.

        Raises:
            Unknown: one of them is padded; the reason says that the call does ``what`` with it.
        """
        for place in self.places(value, dims):
            raise self.refuse_place(value, place, what, remedy)

    def at_the_start(self, value: PaddedValue, dim: int, what: str) -> None:
        """Require that the clean entries along a dimension are its first ones.

        Raises:
            Unknown: padding lies between them; the reason says that the call does ``what`` with the dimension.
        """
        of_dim = value.factors[dim]
        if not self.sizes.starts_clean(of_dim):
            raise self.refuse(f"{what} the padded dimension {dim} of {list(of_dim)}", product(of_dim))

    def unpadded_weights(self, *names: str) -> None:
        """Require that none of the tensors among these arguments has a padded dimension."""
        for name in names:
            weight = self.argument(name)
            if isinstance(weight, PaddedValue):
                self.unpadded(weight, range(weight.rank), f"has a {name} with")

    def no_padded_numbers(self, *but: str) -> None:
        """Require that no argument except those named ``but`` contains a padded size as a number.

        Raises:
            Unknown: one of them contains a padded size.
        """
        for name, argument in self.arguments.items():
            if name not in but:
                for size in padded_sizes_in(argument, self.sizes):
                    raise self.refuse(f"the padded size {size} is a number in it", size)

    def unify(self, first: Factors, second: Factors) -> Factors:
        """The common factors of a dimension of two tensors that are combined entry by entry.

        Raises:
            Unknown: the tensors have their padding at different entries.
        """
        common = self.sizes.unified(first, second)
        if common is None:
            fields = [
                {field for size in factors for field in self.sizes.fields_of(size)} for factors in (first, second)
            ]
            remedy = _ONE_NAME if all(fields) and fields[0] != fields[1] else ""
            why = f"a dimension of factors {list(first)} meets one of {list(second)}"
            raise self.refuse(why, self.sizes.first_padded(first, second), remedy)
        return common

    def unify_into(self, factors: Sequence[Factors], other: PaddedValue, *but: int) -> list[Factors]:
        """``factors`` unified with those of a tensor that is broadcast to them, in all dimensions except ``but``."""
        offset = len(factors) - other.rank
        return [
            self.unify(of_dim, other.factors[dim - offset]) if dim >= offset and dim not in but else of_dim
            for dim, of_dim in enumerate(factors)
        ]

    def findings_for(self, reason: PaddingReason) -> frozenset[PaddingFinding]:
        """One finding for each key field whose padding ``reason`` is about."""
        fields = self.sizes.fields_of(reason.size) or {
            field for size in self.sizes_at_hand() for field in self.sizes.fields_of(size)
        }
        return frozenset(
            PaddingFinding(
                reason.why, reason.remedy, self.where, field=field, op=self.op, is_by_contents=reason.is_by_contents
            )
            for field in fields or self.sizes.fields.values()
        )

    def sizes_at_hand(self) -> Iterator[Size]:
        """The sizes of its tensors and results, and the padded ones among its numbers."""
        for value in tensors_of(self.arguments.values()):
            yield from (size for of_dim in value.factors for size in of_dim)
        for shape in self.shapes:
            yield from shape.sizes
        for argument in self.arguments.values():
            yield from padded_sizes_in(argument, self.sizes)

    def reached(self, value: PaddedValue, *reasons: PaddingReason) -> PaddedValue:
        """``value`` with findings for ``reasons``: its clean entries depend on padding."""
        return value.with_findings(finding for reason in reasons for finding in self.findings_for(reason))

    def with_arguments(self, /, **arguments: Any) -> OpCall:
        """This call with some arguments replaced."""
        return replace(self, arguments={**self.arguments, **arguments})


Returned: TypeAlias = PaddedValue | tuple[PaddedValue | None, ...]

PaddingRule: TypeAlias = Callable[[OpCall], Returned | PaddingReason]
"""A rule returns the abstract value of the result, a tuple of them for several results, or a reason.

The reason says why the results depend on padding. For an operator that writes to arguments, the new values of these
arguments follow the results, in schema order.
"""


def tensors_of(arguments: Iterable[Any]) -> Iterator[PaddedValue]:
    """The tensors in ``arguments``, also those nested in tuples."""
    for argument in arguments:
        if isinstance(argument, PaddedValue):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_of(argument)


def words(*lines: str) -> frozenset[str]:
    """The words of some lines of text."""
    return frozenset(" ".join(lines).split())


MOVES = words(
    "clone alias detach lift_fresh lift_fresh_copy _to_copy to convert_element_type copy fill view _unsafe_view",
    "reshape _reshape_alias view_copy squeeze unsqueeze permute transpose t expand broadcast_in_dim select",
    "slice split split_with_sizes unbind cat stack flip roll index _unsafe_index index_select gather embedding",
    "constant_pad_nd scatter index_put _unsafe_index_put slice_scatter select_scatter zero_padding copy_ unfold",
    "amax amin max min sort topk kthvalue cummax cummin",
)
"""Operators whose results hold entries of their arguments, perhaps beside numbers."""


def padded_sizes_in(argument: Any, sizes: Sizes) -> Iterator[sympy.Basic]:
    """The padded sizes in a non-tensor argument, also those nested in sequences."""
    if isinstance(argument, sympy.Basic):
        if sizes.padded(argument):
            yield argument
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for part in argument:
            yield from padded_sizes_in(part, sizes)
