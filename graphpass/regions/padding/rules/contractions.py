"""Matrix products: the summed dimension may be padded only if one operand has zeros in the padding."""

from __future__ import annotations

from collections.abc import Sequence

from graphpass.regions.padding.calls import HIDE_PADDING, OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.pointwise import broadcast
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.values import (
    ALL_FINITE,
    Approximate,
    Factors,
    Pad,
    PaddedValue,
    Place,
    is_number,
)

__all__ = ["RULES"]


def _contract(call: OpCall, first: PaddedValue, first_dim: int, second: PaddedValue, second_dim: int) -> bool:
    """Check the summed dimensions of two operands. Returns whether they are padded.

    Raises:
        Unknown: padding may change the sum.
    """
    ours, theirs = first.factors[first_dim], second.factors[second_dim]
    if not call.sizes.any_padded(ours) and not call.sizes.any_padded(theirs):
        return False
    places = call.places(first, [first_dim]), call.places(second, [second_dim])
    if ours != theirs or len(places[0]) != 1:
        at_fault = next(size for size in (*ours, *theirs) if call.padded(size))
        raise call.refuse(f"sums products over dimensions of factors {list(ours)} and {list(theirs)}", at_fault)
    pads = first.pad_at(places[0][0]), second.pad_at(places[1][0])
    for zero, other in (pads, pads[::-1]):
        if (
            is_number(zero)
            and zero == 0
            and (other is None or other is Approximate.MASKED or abs(other) < float("inf"))
        ):
            if other is None:
                call.assumptions.add(ALL_FINITE)
            return True
    raise call.refuse_place(first, places[0][0], "sums products over", HIDE_PADDING)


def _rows(value: PaddedValue, dims: Sequence[int]) -> dict[Place, Pad]:
    """The padding of an operand in ``dims`` that is zero; the products of these rows are zero too."""
    return {place: 0 for place, pad in value.padding if place[0] in dims and is_number(pad) and pad == 0}


def product_of(call: OpCall, first: PaddedValue, second: PaddedValue) -> PaddedValue:
    """The matrix product of two operands with at least one dimension each; batch dimensions are broadcast."""
    left, right = first.rank - 1, max(second.rank - 2, 0)
    summed_padding = _contract(call, first, left, second, right)
    batches: list[Factors] = []
    ranks = max(first.rank - 2, 0), max(second.rank - 2, 0)
    for at in range(max(ranks)):
        sides = [
            value.factors[at - max(ranks) + rank] if at - max(ranks) + rank >= 0 else ()
            for value, rank in zip((first, second), ranks, strict=True)
        ]
        batches.append(call.unify(sides[0], sides[1]))
    factors = list(batches)
    if first.rank > 1:
        factors.append(first.factors[-2])
    if second.rank > 1:
        factors.append(second.factors[-1])
    pads: dict[Place, Pad] = {}
    if not summed_padding and first.rank > 1:
        row = len(batches)
        pads = {(row, at): pad for (_, at), pad in _rows(first, [first.rank - 2]).items()}
        call.assumptions.update([ALL_FINITE] if pads else [])
    return PaddedValue(tuple(factors)).with_pads(pads)


def _matmul(call: OpCall) -> PaddedValue:
    call.no_padded_numbers()
    first, second = call.tensor("self"), call.tensor("mat2", "other", "vec", "vec2", "tensor")
    return product_of(call, first, second)


def _added(call: OpCall) -> PaddedValue:
    """``addmm``, ``baddbmm``, ``addmv``: a matrix product plus a bias."""
    call.no_padded_numbers()
    bias = call.tensor("self")
    matrix = product_of(call, call.tensor("mat1", "batch1", "mat"), call.tensor("mat2", "batch2", "vec"))
    return _with_bias(call, matrix, bias)


def _with_bias(call: OpCall, matrix: PaddedValue, bias: PaddedValue) -> PaddedValue:
    offset = matrix.rank - bias.rank
    factors = list(matrix.factors)
    for dim, of_dim in enumerate(bias.factors, offset):
        factors[dim] = call.unify(factors[dim], of_dim)
    added = broadcast(call, bias, factors)
    pads = {place: 0 for place, pad in matrix.padding if added.pad_at(place) == 0 and is_number(added.pad_at(place))}
    return PaddedValue(tuple(factors)).with_pads(pads)


def _linear(call: OpCall) -> PaddedValue:
    call.no_padded_numbers()
    value, weight, bias = call.tensor("input"), call.tensor("weight"), call.argument("bias")
    call.unpadded(weight, range(weight.rank), "has a weight with")
    call.unpadded(value, [value.rank - 1], "sums products over")
    features = weight.factors[:1] if weight.rank > 1 else ()
    matrix = PaddedValue((*value.factors[:-1], *features))
    return _with_bias(call, matrix, bias) if isinstance(bias, PaddedValue) else matrix


def _outer(call: OpCall) -> PaddedValue:
    first, second = call.tensor("self"), call.tensor("vec2")
    return PaddedValue((first.factors[0], second.factors[0]))


def _scaled(call: OpCall) -> PaddedValue:
    """Products of 8-bit operands, with one scale for each operand or for each row."""
    first, second = call.tensor("self"), call.tensor("mat2")
    call.no_padded_numbers()
    call.unpadded(first, [1], "sums products over")
    call.unpadded(second, [0, 1], "has a weight with")
    for name, value in call.arguments.items():
        if name.startswith("scale_") and isinstance(value, PaddedValue):
            rows = value.factors[:1]
            if call.places(value) and (name != "scale_a" or rows != first.factors[:1] or call.places(value, [1])):
                raise call.refuse(f"{name} has other rows than its operand")
    bias = call.argument("bias")
    matrix = PaddedValue((first.factors[0], second.factors[1]))
    matrix = _with_bias(call, matrix, bias) if isinstance(bias, PaddedValue) else matrix
    return matrix if isinstance(call.result, TensorShape) else call.fresh()


RULES: dict[str, PaddingRule] = {
    **aten(_matmul, "mm bmm matmul mv dot vdot _int_mm"),
    **aten(_added, "addmm baddbmm addmv"),
    **aten(_linear, "linear"),
    **aten(_outer, "outer ger"),
    **aten(_scaled, "_scaled_mm"),
}
