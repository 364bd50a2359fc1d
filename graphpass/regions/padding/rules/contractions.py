"""Matrix products: the summed dimension may be padded only if one operand has zeros in the padding."""

from __future__ import annotations

from graphpass.regions.padding.calls import HIDE_PADDING, OpCall, PaddingRule
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.rules.pointwise import broadcast
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.values import (
    ALL_FINITE,
    Factors,
    Pad,
    PaddedValue,
    Place,
    blurred,
    is_finite,
    is_zero,
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
    if ours != theirs or len(places[0]) != 1:  # guard: proof_contracted_factors
        at_fault = next(size for size in (*ours, *theirs) if call.padded(size))
        raise call.refuse(f"sums products over dimensions of factors {list(ours)} and {list(theirs)}", at_fault)
    pads = first.pad_at(places[0][0]), second.pad_at(places[1][0])
    for zero, other in (pads, pads[::-1]):
        if is_zero(zero) and is_finite(other):  # guard: proof_masked_sum_of_products, proof_nan_in_products
            if other is None:
                call.assumptions.add(ALL_FINITE)
            return True
    raise call.refuse_place(first, places[0][0], "sums products over", HIDE_PADDING)


def _product_pad(call: OpCall, *factors: Pad | None) -> Pad | None:
    """The padding of a product whose factors hold ``factors`` there: zero if one is zero and all are finite."""
    if all(map(is_finite, factors)) and any(map(is_zero, factors)):
        call.assumptions.add(ALL_FINITE)
        return 0
    return blurred(*factors)


def product_of(call: OpCall, first: PaddedValue, second: PaddedValue) -> PaddedValue:
    """The matrix product of two operands with at least one dimension each; batch dimensions are broadcast."""
    left, right = first.rank - 1, max(second.rank - 2, 0)
    summed_padding = _contract(call, first, left, second, right)
    depth = max(first.rank - 2, second.rank - 2, 0)
    sources = [(at - depth + first.rank - 2, at - depth + second.rank - 2) for at in range(depth)]
    factors: list[Factors] = []
    for dims in sources:
        sides = [value.factors[dim] if dim >= 0 else () for value, dim in zip((first, second), dims, strict=True)]
        factors.append(call.unify(sides[0], sides[1]))
    if first.rank > 1:
        factors.append(first.factors[-2])
        sources.append((first.rank - 2, -1))
    if second.rank > 1:
        factors.append(second.factors[-1])
        sources.append((-1, second.rank - 1))
    pads: dict[Place, Pad | None] = {}
    for dim, at in call.places(PaddedValue(tuple(factors))):
        operands = zip((first, second), sources[dim], strict=True)
        held = [value.pad_at((own, at)) for value, own in operands if own >= 0 and value.factors[own] == factors[dim]]
        # guard: proof_rows_of_a_product
        pads[dim, at] = blurred(*held) if summed_padding else _product_pad(call, *held)
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
    result, added = PaddedValue(tuple(factors)), broadcast(call, bias, factors)
    pads: dict[Place, Pad | None] = {}
    for place in call.places(result):
        ours, theirs = matrix.pad_at(place), added.pad_at(place)
        varies = place[0] >= offset and call.sizes.any_padded(bias.factors[place[0] - offset])
        pads[place] = blurred(ours, theirs) if varies else blurred(ours)
        if is_zero(ours) and is_zero(theirs):  # guard: proof_bias_of_zero_rows
            pads[place] = 0
    return result.with_pads(pads)


def _linear(call: OpCall) -> PaddedValue:
    call.no_padded_numbers()
    value, weight, bias = call.tensor("input"), call.tensor("weight"), call.argument("bias")
    call.unpadded(weight, range(weight.rank), "has a weight with")
    call.unpadded(value, [value.rank - 1], "sums products over")
    features = weight.factors[:1] if weight.rank > 1 else ()
    matrix = PaddedValue((*value.factors[:-1], *features))
    matrix = matrix.with_pads({place: _product_pad(call, value.pad_at(place)) for place in call.places(matrix)})
    return _with_bias(call, matrix, bias) if isinstance(bias, PaddedValue) else matrix


def _outer(call: OpCall) -> PaddedValue:
    first, second = call.tensor("self"), call.tensor("vec2")
    result = PaddedValue((first.factors[0], second.factors[0]))
    sides = (first, second)
    pads = {(dim, at): _product_pad(call, sides[dim].pad_at((0, at))) for dim, at in call.places(result)}
    return result.with_pads(pads)


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
    matrix = call.carried(PaddedValue((first.factors[0], second.factors[1])), first)
    matrix = _with_bias(call, matrix, bias) if isinstance(bias, PaddedValue) else matrix
    return matrix if isinstance(call.result, TensorShape) else call.fresh()


RULES: dict[str, PaddingRule] = {
    **aten(_matmul, "mm bmm matmul mv dot vdot _int_mm"),
    **aten(_added, "addmm baddbmm addmv"),
    **aten(_linear, "linear"),
    **aten(_outer, "outer ger"),
    **aten(_scaled, "_scaled_mm"),
}
