"""Operators that compute each entry from the entries of the same indices, and those that make tensors from sizes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sympy
import torch

from graphpass.padding.opcall import OpCall, PaddingReason, Returned
from graphpass.padding.values import (
    ALL_FINITE,
    Entry,
    Factors,
    IndexAlong,
    Pad,
    PaddedValue,
    Place,
    blurred,
    by_data,
    cast_pad,
    evaluated,
    is_extreme,
    is_number,
)

ZERO_PADDING = "graphpass::zero_padding"
"""The operator that asks for zeros, whether or not another needs them."""


def entry_by_entry(call: OpCall) -> Returned:
    """A pointwise operator: the operands' factors must agree; the padding of the result is computed from theirs."""
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, PaddedValue)}
    rank = len(call.shapes[0].sizes)
    factors = _common_factors(call, list(tensors.values()), rank)
    aligned = {name: broadcast(call, value, factors) for name, value in tensors.items()}
    result = PaddedValue(factors)
    if isinstance(call.result, tuple):
        result = call.carried(result, *aligned.values())
        return call.each(lambda _: result)
    pads = {place: _pad(call, tensors, aligned, place) for place in call.places(result)}
    constant = None
    if all(value.constant is not None for value in aligned.values()):
        constant = _evaluated(call, {name: value.constant for name, value in aligned.items()})
    pads |= _order_of_indices(call, aligned)
    return replace(result.with_pads(pads), constant=constant, index=_shifted_index(call, aligned))


def _common_factors(call: OpCall, values: Sequence[PaddedValue], rank: int) -> tuple[Factors, ...]:
    """The factors of the result. Constant tensors fit any factors, so they are unified last."""
    factors: list[Factors] = [()] * rank
    for value in sorted(values, key=lambda value: value.constant is not None):
        for dim, of_dim in enumerate(value.factors, rank - value.rank):
            if value.constant is None or not factors[dim]:
                factors[dim] = call.unify(factors[dim], of_dim)
    sizes = call.shapes[0].sizes
    return tuple(
        of_dim if call.sizes.any_padded(of_dim) else call.sizes.merged([size])
        for of_dim, size in zip(factors, sizes, strict=True)
    )


def broadcast(call: OpCall, value: PaddedValue, factors: Sequence[Factors]) -> PaddedValue:
    """``value`` broadcast to ``factors``, with which its factors must be compatible."""
    offset = len(factors) - value.rank
    pads: dict[Place, Pad | None] = {}
    for (dim, at), pad in value.padding:
        target = factors[dim + offset]
        if target == value.factors[dim] or (at == 0 and len(target) == 1):
            pads[dim + offset, at] = pad
    index = value.index
    if index is not None:
        same = factors[index.dim + offset] == value.factors[index.dim]
        index = index._replace(dim=index.dim + offset) if same else None
    rows = frozenset((dim + offset, at) for dim, at in value.rows if (dim + offset, at) in pads)
    return replace(value, factors=tuple(factors), index=index, rows=rows).with_pads(pads)


def cast(call: OpCall) -> PaddedValue:
    """A copy, possibly with another dtype."""
    return call.tensor("self", "a", "input", "x", "tensor")


def zeroed(call: OpCall) -> PaddedValue:
    """A copy with zeros in the rows of padding; the forward context of a call marks others."""
    value = call.tensor("x")
    call.wants(["x"], call.places(value, range(call.argument("num_dims"))), 0)  # guard: made_zeroed_rows
    return value


def over_ranks(call: OpCall) -> PaddedValue:
    """Entries of the same indices of all ranks, which call it at the same sizes, together."""
    value = call.tensor("input")
    return call.carried(PaddedValue(value.factors), value)


def copied(call: OpCall) -> Returned:
    """``copy`` and ``copy_``: the source, broadcast to the shape of the tensor that it overwrites."""
    target, source = call.tensor("self"), call.tensor("src")
    factors = target.factors if source.constant is not None else call.unify_into(target.factors, source)
    copy = broadcast(call, source, factors)
    return (copy, copy) if call.name == "copy_" else copy


# --- the value of the padding


def _pad(
    call: OpCall, values: Mapping[str, PaddedValue], aligned: Mapping[str, PaddedValue], place: Place
) -> Pad | None:
    rank = len(call.shapes[0].sizes)
    dims = {name: place[0] - rank + value.rank for name, value in values.items() if value.constant is None}
    padded = [name for name, dim in dims.items() if dim >= 0 and call.sizes.any_padded(values[name].factors[dim])]
    return _of_pads(call, {name: value.pad_at(place) for name, value in aligned.items()}, padded)


def real_entries(call: OpCall) -> Pad | None:
    """What real entries of the result hold if the graph makes some of them infinite."""
    held = {name: value.held for name, value in call.arguments.items() if isinstance(value, PaddedValue)}
    return _of_pads(replace(call, assumptions=set()), held, list(held))


def _of_pads(call: OpCall, pads: Mapping[str, Pad | None], padded: Sequence[str]) -> Pad | None:
    if call.name in ("where", "masked_fill"):
        return _chosen(call, pads)
    extremes = [number for number in call.arguments.values() if isinstance(number, float) and is_extreme(number)]
    if not extremes and all(pad is None for pad in pads.values()):
        return None
    found = _evaluated(call, pads)
    if is_number(found) and any(pad is None and call.tensor(n).dtype is not torch.bool for n, pad in pads.items()):
        call.assumptions.add(ALL_FINITE)
    found = cast_pad(blurred(*pads.values()), call.shape.dtype) if found is None else found
    if is_extreme(found) or is_number(found):
        return found
    # Beside real contents, what is known of an operand says nothing: their sum is as any sum of real contents.
    return None if any(pads[name] is None for name in padded) else found


_Known = TypeVar("_Known")


def _operand(call: OpCall, known: Mapping[str, _Known], *names: str) -> _Known | Pad | None:
    """What is known of the operand under one of ``names``: of a tensor what ``known`` has, or the number."""
    for name in names:
        if name in known:
            return known[name]
        if name in call.arguments:
            number = call.arguments[name]
            return number if isinstance(number, (bool, int, float)) else None
    return None


def _chosen(call: OpCall, pads: Mapping[str, Pad | None]) -> Pad | None:
    """``where`` and ``masked_fill``: what is not chosen does not matter."""
    condition = _operand(call, pads, "condition", "pred", "mask")
    if call.name == "where":
        first, second = _operand(call, pads, "self", "a"), _operand(call, pads, "other", "b")
    else:
        first, second = _operand(call, pads, "value"), _operand(call, pads, "self")
    if is_number(condition):
        return first if condition else second  # guard: proof_chosen_branch
    return by_data(first, second)  # guard: proof_unknown_condition, proof_unknown_mask, proof_zeros_beside_infinities


def _evaluated(call: OpCall, pads: Mapping[str, Pad | None]) -> Pad | None:
    arguments: list[tuple[str, Any]] = []
    for name, argument in call.arguments.items():
        if not isinstance(argument, PaddedValue):
            if isinstance(argument, sympy.Basic):
                return None
            arguments.append((name, argument))
            continue
        pad = pads.get(name)
        if argument.dtype is None or argument.dtype.is_complex:
            return None
        arguments.append((name, Entry(pad, argument.dtype, argument.rank > 0)))
    return cast_pad(evaluated(call.op.replace(".", "::", 1), arguments), call.shape.dtype)


# --- indices


def _shifted_index(call: OpCall, values: Mapping[str, PaddedValue]) -> IndexAlong | None:
    """Indices plus an integer are indices with another offset."""
    if call.name not in ("add", "sub") or call.argument("alpha", default=1) != 1:
        return None
    known = {name: value.constant if value.index is None else value.index for name, value in values.items()}
    first, second = _operand(call, known, "self", "a"), _operand(call, known, "other", "b")
    if isinstance(first, IndexAlong) and type(second) is int:
        return first._replace(offset=first.offset + (second if call.name == "add" else -second))
    return None


def _order_of_indices(call: OpCall, values: Mapping[str, PaddedValue]) -> dict[Place, Pad]:
    """The comparison of two indices along factors of the same size: an index in padding exceeds all real ones.

    If the first operand's index is in padding and the second's is real, first minus second is at least one plus the
    difference of the offsets; likewise with the operands exchanged.
    """
    compare = getattr(operator, call.name) if call.name in ("gt", "ge", "ne", "lt", "le", "eq") else None
    if compare is None or len(values) != 2:
        return {}
    first, second = (value for value in values.values())
    if first.index is None or second.index is None or first.index[:2] == second.index[:2]:
        return {}
    a, b = first.index, second.index
    if first.factors[a.dim][a.factor] != second.factors[b.dim][b.factor]:  # guard: proof_index_sizes
        return {}
    pads: dict[Place, Pad] = {}
    for larger, smaller, sign in ((a, b, 1), (b, a, -1)):  # guard: proof_index_order
        least = 1 + larger.offset - smaller.offset  # guard: proof_index_offsets
        answers = {compare(sign * difference, 0) for difference in (least, -1, 0, 1) if difference >= least}
        if len(answers | {compare(sign, 0)}) == 1:
            pads[larger.dim, larger.factor] = answers.pop()
    return pads


# --- tensors made from sizes: constants, indices, random numbers

_FILLS = {"zeros": 0, "new_zeros": 0, "zero": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


def filled(call: OpCall) -> PaddedValue:
    """A tensor of one value, with the factors of another tensor where the operator is like it."""
    fill = _FILLS.get(call.name, call.argument("fill_value", "s", "value", "scalar", "data"))
    if call.padded(fill):  # guard: proof_filled_with_a_size
        raise call.refuse(f"the padded size {fill} is a number in it", fill)
    constant = cast_pad(fill, call.shape.dtype) if isinstance(fill, (bool, int, float)) else None
    if isinstance(fill, PaddedValue):
        constant = fill.constant
    value = call.fresh()
    factors = call.tensor("self", "a").factors if call.name == "fill" or "_like" in call.name else value.factors
    return replace(value, factors=factors, constant=constant)


def counted(call: OpCall) -> PaddedValue:
    """``arange``: indices, if it counts in steps of one."""
    start, step = call.argument("start", default=0), call.argument("step", default=1)
    for number in (start, step):
        if call.padded(number):  # guard: proof_range_from_a_size
            raise call.refuse(f"the padded size {number} is where its numbers start or how they step", number)
    value = call.fresh()
    # guard: proof_range_in_steps
    whole = type(start) is int and type(step) is int and step == 1 and value.factors != ((),)
    return replace(value, index=IndexAlong(0, 0, start)) if whole else value


def draws(call: OpCall) -> None:
    """Add a finding if the number of random numbers that the call draws depends on padding."""
    tensors = [value for value in call.arguments.values() if isinstance(value, PaddedValue)]
    padded = any(call.padded(size) for shape in call.shapes for size in shape.sizes)
    if padded or any(call.places(value) for value in tensors):  # guard: proof_drawn_numbers
        findings = call.findings_for(PaddingReason("it draws random numbers for padded entries"))
        call.everywhere.update(finding.reaching("random numbers") for finding in findings)


def random_numbers(call: OpCall) -> Returned:
    """A padded tensor gets other numbers than the real one, and advances the generator further."""
    draws(call)
    return call.each(call.fresh)


def dropout(call: OpCall) -> Returned:
    """Dropout; a copy outside of training or with probability zero."""
    value = call.tensor("input", "self")
    trains = call.argument("train", "training", default=True)
    if trains is not False and call.argument("p", default=0.5) != 0:
        draws(call)
    copy = call.carried(PaddedValue(value.factors))
    return call.each(lambda _: copy)
