"""Operators that create tensors from sizes: constants and indices."""

from __future__ import annotations

from dataclasses import replace

import sympy

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.rules.scalars import cast_pad
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.values import IndexAlong, Pad, PaddedValue

__all__ = ["RULES"]


def _filled(call: OpCall, fill: object) -> PaddedValue:
    if call.padded(fill):  # guard: proof_filled_with_a_size
        raise call.refuse(f"the padded size {fill} is a number in it", fill)
    constant: Pad | None = None
    if isinstance(fill, (bool, int, float)):
        constant = cast_pad(fill, call.shape.dtype)
    elif isinstance(fill, PaddedValue):
        constant = fill.constant
    return replace(call.fresh(), constant=constant)


def _full(call: OpCall) -> PaddedValue:
    return _filled(call, call.argument("fill_value", "s", "value", "scalar"))


def _like(call: OpCall) -> PaddedValue:
    """A constant tensor with the factors of another tensor."""
    fill = {"zeros_like": 0, "ones_like": 1}.get(call.name)
    constant = _filled(call, call.argument("fill_value", "value") if fill is None else fill)
    return replace(constant, factors=call.tensor("self", "a").factors)


def _zeros(call: OpCall) -> PaddedValue:
    return _filled(call, 0)


def _ones(call: OpCall) -> PaddedValue:
    return _filled(call, 1)


def _empty(call: OpCall) -> PaddedValue:
    """Uninitialized memory: the contents are arbitrary in both runs."""
    return call.fresh()


def _arange(call: OpCall) -> PaddedValue:
    start, step = call.argument("start", default=0), call.argument("step", default=1)
    for number in (start, step):
        if call.padded(number):  # guard: proof_range_from_a_size
            raise call.refuse(f"the padded size {number} is where its numbers start or how they step", number)
    value = call.fresh()
    # guard: proof_range_in_steps
    whole = type(start) is int and type(step) is int and step == 1 and value.factors != ((),)
    return replace(value, index=IndexAlong(0, 0, start)) if whole else value


def _eye(call: OpCall) -> PaddedValue:
    """An identity matrix: padding columns are zero in real rows, and padding rows in real columns."""
    value = call.fresh()
    if value.factors[0] != value.factors[1]:
        return value
    return value.with_pads(dict.fromkeys(call.places(value), 0))


def _scalar(call: OpCall) -> PaddedValue:
    number = call.argument("s", "scalar", "value", "data")
    return _filled(call, None if isinstance(number, sympy.Basic) and not call.padded(number) else number)


RULES: dict[str, PaddingRule] = {
    **aten(_full, "full new_full"),
    **aten(_zeros, "zeros new_zeros zero"),
    **aten(_ones, "ones new_ones"),
    **aten(_like, "zeros_like ones_like full_like fill"),
    **aten(_empty, "empty new_empty empty_like empty_strided new_empty_strided empty_permuted"),
    **prims(_full, "full"),
    **prims(_like, "full_like"),
    **prims(_empty, "empty_strided"),
    **aten(_arange, "arange"),
    **prims(_arange, "iota"),
    **aten(_eye, "eye"),
    **aten(_scalar, "scalar_tensor"),
    **prims(_scalar, "scalar_tensor"),
}
