"""Operators that compute each entry from the entries of the same indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.scalars import Entry, cast_pad, evaluated
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.values import (
    ALL_FINITE,
    LOW_SCORES,
    Approximate,
    Factors,
    IndexAlong,
    Pad,
    PaddedValue,
    Place,
    blurred,
    either,
    is_finite,
    is_low,
    is_number,
    is_zero,
)

__all__ = ["RULES", "broadcast", "cast", "entry_by_entry"]


def entry_by_entry(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """A pointwise operator: the operands' factors must agree; the padding of the result is computed from theirs."""
    call.no_padded_numbers()  # guard: proof_size_as_number
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, PaddedValue)}
    rank = len(call.shapes[0].sizes)
    factors = _common_factors(call, list(tensors.values()), rank)
    aligned = {name: broadcast(call, value, factors) for name, value in tensors.items()}
    result = PaddedValue(factors)
    if isinstance(call.result, tuple):
        result = call.carried(result, *aligned.values())
        return tuple(result if isinstance(shape, TensorShape) else None for shape in call.result)
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
    return replace(value, factors=tuple(factors), index=index).with_pads(pads)


def cast(call: OpCall) -> PaddedValue:
    """A copy, possibly with another dtype."""
    call.no_padded_numbers()
    return call.tensor("self", "a", "input")


def _copy(call: OpCall) -> PaddedValue | tuple[PaddedValue, ...]:
    """``copy`` and ``copy_``: the source, broadcast to the shape of the tensor that it overwrites."""
    target, source = call.tensor("self"), call.tensor("src")
    factors = list(target.factors)
    for dim, of_dim in enumerate(source.factors, target.rank - source.rank):
        if source.constant is None:
            factors[dim] = call.unify(factors[dim], of_dim)
    copied = broadcast(call, source, factors)
    return (copied, copied) if call.name == "copy_" else copied


# --- the value of the padding


def _pad(
    call: OpCall, values: Mapping[str, PaddedValue], aligned: Mapping[str, PaddedValue], place: Place
) -> Pad | None:
    pads = {name: value.pad_at(place) for name, value in aligned.items()}
    if call.name in ("where", "masked_fill"):
        return _chosen(call, pads)
    absorbed = _absorbed(call, pads)
    if absorbed is not None or all(pad is None for pad in pads.values()):
        return absorbed
    found = _evaluated(call, pads)
    found = cast_pad(blurred(*pads.values()), call.shape.dtype) if found is None else found
    if found is Approximate.NOT_FINITE or is_number(found):
        return found
    rank = len(call.shapes[0].sizes)
    dims = {name: place[0] - rank + value.rank for name, value in values.items() if value.constant is None}
    padded = (name for name, dim in dims.items() if dim >= 0 and call.sizes.any_padded(values[name].factors[dim]))
    # Beside real contents, what is known of an operand says nothing: their sum is as any sum of real contents.
    return None if any(pads[name] is None for name in padded) else found


def _operand(call: OpCall, pads: Mapping[str, Pad | None], *names: str) -> Pad | None:
    """The known value of an operand in the padding: the pad of a tensor, or the number."""
    for name in names:
        if name in pads:
            return pads[name]
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
    fills = [is_number(pad) and not is_finite(pad) for pad in (first, second)]
    if first != second and any(fills):  # infinities where data says so: as in real rows, which a mask fills alike
        others = [pad for pad, fill in zip((first, second), fills, strict=True) if not fill]
        call.assumptions.update([ALL_FINITE] if others not in ([], [None]) else [])
        return blurred(*others)  # guard: proof_zeros_beside_infinities
    return either(first, second)  # guard: proof_unknown_condition, proof_unknown_mask


def _absorbed(call: OpCall, pads: Mapping[str, Pad | None]) -> Pad | None:
    """The result if one operand alone determines it."""
    first = _operand(call, pads, "self", "a", "input", "x")
    second = _operand(call, pads, "other", "b", "min")
    name = call.name
    if name in ("mul", "div", "true_divide"):
        return _zero_times(call, first, second, name == "mul")
    if name in ("logical_and", "bitwise_and", "__and__"):
        return _logical(call, first, second, absorbing=False)  # guard: proof_conjunction
    if name in ("logical_or", "bitwise_or", "__or__"):
        return _logical(call, first, second, absorbing=True)  # guard: proof_disjunction
    if name in ("add", "sub"):
        return _lowered(call, first, second, both=name == "add")
    if name in ("exp", "exp2") and first is Approximate.MASKED:
        return 0.0
    if name in ("maximum", "clamp_min") and is_low(first) and is_low(second) and Approximate.MASKED in (first, second):
        return Approximate.MASKED
    return None


_NEVER_ZERO = (Approximate.MASKED, Approximate.POSITIVE)


def _zero_times(call: OpCall, first: Pad | None, second: Pad | None, is_product: bool) -> Pad | None:
    zero, other = (first, second) if is_zero(first) else (second, first)
    if not is_zero(zero) or (not is_product and zero is not first):  # guard: proof_zero_divisor
        return None
    if other is None:
        call.assumptions.add(ALL_FINITE)
    # guard: proof_nan_is_kept
    elif is_number(other) or not is_finite(other) or not (is_product or other in _NEVER_ZERO):
        return None
    return 0


def _logical(call: OpCall, first: Pad | None, second: Pad | None, *, absorbing: bool) -> Pad | None:
    truths = [value for value in call.arguments.values() if isinstance(value, PaddedValue)]
    if call.name.startswith("bitwise") and any(value.dtype is not torch.bool for value in truths):
        return 0 if not absorbing and (is_zero(first) or is_zero(second)) else None
    return absorbing if any(is_number(pad) and bool(pad) is absorbing for pad in (first, second)) else None


def _lowered(call: OpCall, first: Pad | None, second: Pad | None, *, both: bool) -> Pad | None:
    """Scores plus a mask: a very low entry stays very low unless a known number raises it."""
    low, other = (first, second) if is_low(first) else (second, first)
    # guard: proof_subtracted_mask
    if call.argument("alpha", default=1) != 1 or not is_low(low) or (not both and low is not first):
        return None
    if is_number(other):
        sinks = other <= 0 if both else other >= 0  # type: ignore[operator]
        return Approximate.MASKED if low is Approximate.MASKED and sinks else None  # guard: proof_raised_mask
    if not is_finite(other) or (other is Approximate.MASKED and not both):
        return None
    if low == -math.inf:
        call.assumptions.update([ALL_FINITE] if other is None else [])
        return low
    call.assumptions.add(LOW_SCORES)
    return Approximate.MASKED


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
        arguments.append((name, Entry.of(pad, argument.dtype, has_dims=argument.rank > 0)))
    return cast_pad(evaluated(call.op.replace(".", "::", 1), arguments), call.shape.dtype)


# --- indices


def _shifted_index(call: OpCall, values: Mapping[str, PaddedValue]) -> IndexAlong | None:
    """Indices plus an integer are indices with another offset."""
    first, second = (_index_or_number(call, values, names) for names in (("self", "a"), ("other", "b")))
    if call.name not in ("add", "sub") or call.argument("alpha", default=1) != 1:
        return None
    if isinstance(first, IndexAlong) and type(second) is int:
        return first._replace(offset=first.offset + (second if call.name == "add" else -second))
    if isinstance(second, IndexAlong) and type(first) is int and call.name == "add":
        return second._replace(offset=second.offset + first)
    return None


def _index_or_number(call: OpCall, values: Mapping[str, PaddedValue], names: Sequence[str]) -> IndexAlong | Pad | None:
    name = next((name for name in names if name in call.arguments), "")
    value = values.get(name)
    if value is None:
        number = call.arguments.get(name)
        return number if isinstance(number, (int, float)) else None
    return value.index if value.index is not None else value.constant


_COMPARISONS: dict[str, tuple[Callable[[int], bool], bool]] = {
    "gt": (lambda least: least > 0, True),
    "ge": (lambda least: least >= 0, True),
    "ne": (lambda least: least > 0, True),
    "lt": (lambda least: least >= 0, False),
    "le": (lambda least: least > 0, False),
    "eq": (lambda least: least > 0, False),
}
_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


def _order_of_indices(call: OpCall, values: Mapping[str, PaddedValue]) -> dict[Place, Pad]:
    """The comparison of two indices along factors of the same size: an index in padding exceeds all real ones.

    If the first operand's index is in padding and the second's is real, first minus second is at least one plus the
    difference of the offsets; likewise with the operands exchanged.
    """
    if call.name not in _COMPARISONS or len(values) != 2:
        return {}
    first, second = (value for value in values.values())
    if first.index is None or second.index is None or first.index[:2] == second.index[:2]:
        return {}
    a, b = first.index, second.index
    if first.factors[a.dim][a.factor] != second.factors[b.dim][b.factor]:  # guard: proof_index_sizes
        return {}
    pads: dict[Place, Pad] = {}
    for larger, smaller, name in ((a, b, call.name), (b, a, _MIRRORED[call.name])):  # guard: proof_index_order
        decided, answer = _COMPARISONS[name]
        if decided(1 + larger.offset - smaller.offset):  # guard: proof_index_offsets
            pads[larger.dim, larger.factor] = answer
    return pads


RULES: dict[str, PaddingRule] = {
    **prims(
        entry_by_entry,
        "abs acos acosh asin asinh atan atan2 atanh add bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos cosh"
        " div eq erf erfc exp exp2 expm1 floor fmax fmin fmod ge gt isfinite le lgamma log log10 log1p log2 lt maximum"
        " minimum mul ne neg pow reciprocal remainder round rsqrt shift_left sign signbit sin sinh sqrt sub tan tanh"
        " trunc where",
    ),
    **aten(
        entry_by_entry,
        "where masked_fill floor_divide logical_and logical_or logical_xor logical_not clamp polar complex"
        " leaky_relu",  # without the tag in torch 2.11
    ),
    **aten(_copy, "copy copy_"),
    **aten(cast, "clone alias detach lift_fresh lift_fresh_copy _to_copy contiguous to positive"),
    **prims(cast, "convert_element_type device_put view_of clone"),
}
"""Copies, and pointwise operators without the tag ``pointwise``."""
