"""Relations of operators that combine entries along dimensions: reduces and contracts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from graphpass.padding.opcall import (
    DECLARE_MASK,
    HIDE_PADDING,
    OpCall,
    PaddingReason,
    PaddingRule,
    Returned,
)
from graphpass.padding.pointwise import broadcast, entry_by_entry
from graphpass.padding.sizes import product
from graphpass.padding.values import (
    ALL_FINITE,
    Approximate,
    Pad,
    PaddedValue,
    Place,
    TensorShape,
    blurred,
    is_finite,
    is_number,
    shown,
)

# --- reduces: entries are combined within some dimensions, whose padding must be neutral; all others stay as they are

Dims = Callable[[OpCall, PaddedValue], Iterable[int]]

Neutral = Callable[[torch.dtype], bool | int | float]
"""What an operator takes for nothing in an operand of this type."""


def _beside(call: OpCall, value: PaddedValue, dims: Sequence[int], shape: TensorShape) -> PaddedValue:
    """A result that has the dimensions of ``value`` except ``dims``, which are resized, or gone in a smaller result."""
    new = call.fresh(shape).factors
    kept = [dim for dim in range(value.rank) if len(new) >= value.rank or dim not in dims]
    factors = [new[at] if dim in dims else value.factors[dim] for at, dim in enumerate(kept)]
    result = PaddedValue((*factors, *new[len(kept) :]))
    # guard: proof_computed_zeros
    pads = {(kept.index(dim), at): blurred(value.pad_at((dim, at))) for dim, at in call.places(value) if dim in kept}
    return result.with_pads(pads)


def last(count: int) -> Dims:
    """The last ``count`` dimensions."""
    return lambda call, value: range(max(value.rank - count, 0), value.rank)


def named_dims(call: OpCall, value: PaddedValue) -> list[int]:
    """The dimensions that the call names; all if it names none."""
    return call.dims(call.argument("dim", "dims", "axis", "dimension"), value.rank)


def channels_and_positions(call: OpCall, value: PaddedValue) -> range:
    """The channels of a convolution, and the positions that its window moves over."""
    return range(1 if value.rank == call.tensor("weight").rank else 0, value.rank)


def _windows(call: OpCall, name: str, dims: Sequence[int], neutral: Neutral) -> None:
    """Require that windows which move over ``dims`` read only what they take for nothing behind the real end."""
    value = call.tensor(name)
    places = call.places(value, dims)
    call.wants([name], places, neutral(value.known_dtype))  # guard: made_windows
    is_whole = len(places) < 2 or value.whole.issuperset(places) or value.constant is not None
    for place in places:  # guard: proof_convolved_zeros
        pad = value.pad_at(place)
        known = _is_neutral(neutral, pad, value.known_dtype)
        if call.asks_independence or not is_whole or not known or len(value.factors[place[0]]) > 1:
            raise call.refuse_place(value, place, "moves a window over")


def convolution(call: OpCall) -> Returned:
    """Behind its end a convolution reads zeros, and so it does where padding holds zeros; channels are mixed."""
    value = call.tensor("input")
    dims = channels_and_positions(call, value)
    _windows(call, "input", dims[1:], zero)
    call.unpadded(value, dims[:1], "moves a window over")
    call.unpadded_weights("weight", "bias")
    return call.each(lambda shape: _beside(call, value, dims, shape))


def windows(neutral: Neutral) -> PaddingRule:
    """A pool, where windows reach behind the real end only if padding is neutral, and count what is there."""

    def rule(call: OpCall) -> Returned:
        value = call.tensor("self")
        dims = positions(call, value)
        places = call.places(value, dims)
        padding, ceil = call.argument("padding", default=0), call.argument("ceil_mode", default=False)
        extends = any(padding) if isinstance(padding, tuple) else bool(padding)
        counts = extends and not call.argument("count_include_pad", default=True)
        divides = neutral is zero and call.argument("divisor_override") is None
        if places and divides and (ceil or counts):  # guard: proof_counted_windows
            raise call.refuse_place(value, places[0], "counts the entries of windows over")
        _windows(call, "self", dims, neutral)
        result = call.each(lambda shape: _beside(call, value, dims, shape))
        reasons = [PaddingReason("places count padded entries", size=value.factors[dim][at]) for dim, at in places]
        if not isinstance(result, tuple):
            return result
        return (result[0], *(None if side is None else call.reached(side, *reasons) for side in result[1:]))

    return rule


def whole_maxima(call: OpCall) -> Returned | PaddingReason:
    """An adaptive pool to a size of 1, a maximum of all entries. Where parts of another size end is not followed."""
    value = call.tensor("self")
    dims = positions(call, value)
    for place in call.places(value, dims):
        if call.argument("output_size")[place[0] - dims.start] != 1:  # guard: proof_adaptive_parts
            raise call.refuse_place(value, place, "divides into parts")
    return windows(lowest)(call)


def positions(call: OpCall, value: PaddedValue) -> range:
    """The last dimensions, over which a window moves; their number is in the operator's name or in its window."""
    named = re.search(r"([123])d", call.name)
    count = int(named[1]) if named else len(call.argument("kernel_size", "output_size", default=()))
    if not 1 <= count <= value.rank:
        raise call.refuse("its window is not known")
    return range(value.rank - count, value.rank)


_SUMS = f"compute it from sums {DECLARE_MASK}"
_FROM_SUMS = ("mean", "var", "var_mean")
_REDUCED = ("self", "inp", "x", "a", "input")


def zero(dtype: torch.dtype) -> int:
    """The neutral number of a sum."""
    return 0


def one(dtype: torch.dtype) -> int:
    """The neutral number of a product, and of ``all``."""
    return 1


def hidden(dtype: torch.dtype) -> float:
    """The score that has no weight in a softmax."""
    return -math.inf


def lowest(dtype: torch.dtype) -> float | int:
    """The neutral number of a maximum."""
    return False if dtype is torch.bool else -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def greatest(dtype: torch.dtype) -> float | int:
    """The neutral number of a minimum."""
    return True if dtype is torch.bool else math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _is_neutral(neutral: Neutral, pad: Pad | None, dtype: torch.dtype) -> bool:
    return is_number(pad) and pad == neutral(dtype)


def reduces(neutral: Neutral | None, over: Dims = named_dims, what: str = "") -> PaddingRule:
    """The relation of an operator whose entries depend on all entries along some dimensions, resized or gone in it.

    Their padding must be neutral, or there must be none.
    """

    def rule(call: OpCall) -> Returned:
        value = call.tensor(*_REDUCED)
        dims = list(over(call, value))
        places = _require_neutral(call, value, dims, neutral, what)
        if isinstance(call.result, tuple) and places and call.name in ("max", "min"):
            raise call.refuse_place(value, places[0], f"the index of {call.name} over")
        return call.each(lambda shape: _beside(call, value, dims, shape))

    return rule


def _require_neutral(
    call: OpCall, value: PaddedValue, dims: Sequence[int], neutral: Neutral | None, what: str = ""
) -> list[Place]:
    """The places of the padded factors in ``dims``, all of them neutral, and one alone or all entries alike."""
    places = call.places(value, dims)
    if neutral is not None:
        call.wants(_REDUCED, places, neutral(value.known_dtype))
    for place in places:
        pad = value.pad_at(place)
        # guard: proof_any_padding_is_neutral, proof_statistics
        known = neutral is not None and _is_neutral(neutral, pad, value.known_dtype)
        is_whole = value.constant is not None or value.whole.issuperset(places)
        if known and len(places) > 1 and not is_whole:  # guard: proof_two_padded_factors
            sizes = tuple(value.factors[dim][at] for dim, at in places)
            raise call.refuse(f"{call.name.strip('_')} over several padded dimensions at once", product(sizes))
        if not known:
            remedy = HIDE_PADDING if neutral is not None else _SUMS if call.name in _FROM_SUMS else ""
            raise call.refuse_place(value, place, what or f"{call.name.strip('_')} over", remedy)
    return places


def extremes(neutral: Neutral) -> PaddingRule:
    """``max`` and ``min``, of one tensor or of two entry by entry."""
    reduction = reduces(neutral)
    return lambda call: entry_by_entry(call) if "other" in call.arguments else reduction(call)


def place_of_extreme(call: OpCall) -> Returned | PaddingReason:
    """``argmax`` and ``argmin``: among equal entries the first place wins, which is real if there is a real entry."""
    value = call.tensor("self")
    if call.argument("dim") is None and value.rank > 1:
        call.unpadded(value, range(value.rank), f"{call.name} over")
    for dim in named_dims(call, value):  # guard: made_places_of_extremes
        if not call.sizes.is_prefix(value.factors[dim]):
            raise call.refuse(f"{call.name} counts entries over padding between them", product(value.factors[dim]))
    return reduces(lowest if call.name == "argmax" else greatest)(call)


def softmax(call: OpCall) -> PaddedValue:
    """Softmax: along a masked dimension, the padding of the result is zero (unknown for ``log_softmax``).

    In a row with a real NaN, and in one whose real scores are all -inf, all weights are NaN, those of padding, too.
    """
    value = call.tensor("self")
    places = _require_neutral(call, value, named_dims(call, value), hidden)
    pads = {at: weight_of(call.name, value.pad_at(at), is_along=at in places) for at in call.places(value)}
    call.assumptions.update([ALL_FINITE] if places else [])  # guard: proof_rows_of_nan
    rows = frozenset(at for at in places if pads[at] == 0)
    return PaddedValue(value.factors, rows=rows).with_pads(pads)


def weight_of(name: str, score: Pad | None, *, is_along: bool = False) -> Pad | None:
    """What a softmax makes of entries of ``score``, or of hidden ones along its dimension (``is_along``)."""
    is_log, seen = "log_" in name, shown(score)
    if is_along:
        # guard: proof_logarithm_of_zero
        return Approximate.NOT_FINITE if is_log else 0.0
    if score is None or (is_log and score is Approximate.HIDDEN):
        return score
    is_hidden = name == "_safe_softmax" and seen == -math.inf
    # guard: proof_hidden_rows
    return Approximate.FINITE if is_hidden or is_finite(seen) else Approximate.NOT_FINITE


def scan(call: OpCall) -> Returned:
    """Forward scans: an entry depends on earlier entries only, which are real if it is real."""
    value = call.tensor("self")
    dim = call.dim(call.argument("dim"), value.rank)
    if value.rank:
        call.at_the_start(value, dim, f"{call.name} along")  # guard: proof_scan_inside
    result = call.carried(PaddedValue(value.factors))
    return call.each(lambda _: result)


def recurrent_layer(call: OpCall) -> Returned:
    """One direction of a layer over [steps, rows, features]: each row by itself, and each step after earlier ones.

    Behind padded steps only the first result is followed: the others are the states after the last step.
    """
    value, states = call.tensor("input"), [call.tensor("hx_"), call.tensor("cx_")]
    call.unpadded(value, [2], "sums products over")
    call.unpadded_weights("weight0", "weight1", "weight2", "weight3")
    steps, rows = value.factors[:2]
    for state in states:
        rows = call.unify(rows, state.factors[1])
    if call.argument("batch_first") or call.argument("batch_sizes"):
        raise call.refuse("its steps are not the first dimension")
    padded = call.places(value, [0])
    if padded and (call.argument("reverse") or not call.sizes.starts_clean(steps)):  # guard: proof_recurrent_order
        raise call.refuse_place(value, padded[0], "runs backwards over")
    reasons = [PaddingReason("its state is that after padded steps", size=steps[at]) for _, at in padded]
    result = call.carried(PaddedValue((steps, rows, *call.fresh(call.shapes[0]).factors[2:])), value, *states)

    def after(shape: TensorShape) -> PaddedValue:
        fresh = call.fresh(shape)
        factors = ((), rows, *fresh.factors[2:]) if fresh.rank == 3 else fresh.factors  # no workspace
        return call.reached(replace(fresh, factors=factors), *reasons)

    return (result, *call.sides(after))


# --- contracts: products are summed over a dimension of two operands, where padding of zeros is neutral


def contracts(first: Sequence[str], second: Sequence[str], bias: str = "") -> PaddingRule:
    """The relation of a matrix product of the arguments ``first`` and ``second``, plus ``bias``."""

    def rule(call: OpCall) -> PaddedValue:
        ours, theirs = call.tensor(*first), call.tensor(*second)
        for names, value, dim in (first, ours, ours.rank - 1), (second, theirs, max(theirs.rank - 2, 0)):
            places = call.places(value, [dim])
            if len(places) > 1 or not all(map(value.adds_nothing, places)):
                call.wants(names, places, 0)  # guard: made_products
        matrix = _product_of(call, ours, theirs)
        return _with_bias(call, matrix, call.argument(bias))

    return rule


def distances(call: OpCall) -> PaddedValue:
    """``cdist``: the sizes are those of a product of matrices, by which it is computed if one of them is large."""
    first, second = call.tensor("x1"), call.tensor("x2")
    dims = [*range(second.rank - 2), second.rank - 1, second.rank - 2]
    columns = second.moved(tuple(second.factors[dim] for dim in dims), {dim: at for at, dim in enumerate(dims)})
    result = _product_of(call, first, columns)
    for place in call.places(result, [result.rank - 2, result.rank - 1]):
        if call.argument("p") == 2 and not call.argument("compute_mode"):  # guard: proof_distances
            raise call.refuse_place(result, place, "computes another way, and less exactly, above 25 entries of")
    return result.with_pads({place: blurred(pad) for place, pad in result.padding})


def rows_of_a_product(call: OpCall) -> PaddedValue:
    """Products of rows with a weight of 8 bits or of packed entries, by scales of the weight, and of each row."""
    first = call.tensor("self")
    call.unpadded(first, [1], "sums products over")  # guard: proof_packed_product
    scale = call.argument("scale_a")
    of_rows = isinstance(scale, PaddedValue) and (
        scale.factors[:1] == first.factors[:1] and not call.places(scale, [1])
    )
    if isinstance(scale, PaddedValue) and call.places(scale) and not of_rows:
        raise call.refuse("scale_a has other rows than its operand")
    call.unpadded_weights(*(name for name in call.arguments if name not in ("self", "scale_a")))
    return call.carried(PaddedValue((first.factors[0], *call.fresh().factors[1:])), first)


def _check_summed(call: OpCall, first: PaddedValue, second: PaddedValue) -> None:
    """Refuse padding that is not neutral in the dimensions of two operands that are summed."""
    dims = first.rank - 1, max(second.rank - 2, 0)
    ours, theirs = first.factors[dims[0]], second.factors[dims[1]]
    if not call.sizes.any_padded((*ours, *theirs)):
        return
    places = call.places(first, dims[:1]), call.places(second, dims[1:])
    are_whole = first.whole.issuperset(places[0]) and second.whole.issuperset(places[1])
    if ours != theirs or (len(places[0]) != 1 and not are_whole):  # guard: proof_contracted_factors
        why = f"sums products over dimensions of factors {list(ours)} and {list(theirs)}"
        raise call.refuse(why, call.sizes.first_padded(ours, theirs))
    pairs = (first, places[0][0]), (second, places[1][0])
    for (zero, zero_at), (beside, at) in (pairs, pairs[::-1]):
        other = beside.pad_at(at)
        # guard: proof_masked_sum_of_products, proof_nan_in_products
        if zero.adds_nothing(zero_at) and (is_finite(other) or beside.adds_nothing(at)):
            if other is None:
                call.assumptions.add(ALL_FINITE)
            return
    raise call.refuse_place(first, places[0][0], "sums products over", HIDE_PADDING)


def _product_of(call: OpCall, first: PaddedValue, second: PaddedValue) -> PaddedValue:
    """The matrix product of two operands with at least one dimension each; batch dimensions are broadcast."""
    _check_summed(call, first, second)
    depth = max(first.rank - 2, second.rank - 2, 0)
    sources = [(at - depth + first.rank - 2, at - depth + second.rank - 2) for at in range(depth)]
    factors = [
        call.unify(first.factors[ours] if ours >= 0 else (), second.factors[theirs] if theirs >= 0 else ())
        for ours, theirs in sources
    ]
    if first.rank > 1:
        factors.append(first.factors[-2])
        sources.append((first.rank - 2, -1))
    if second.rank > 1:
        factors.append(second.factors[-1])
        sources.append((-1, second.rank - 1))
    pads: dict[Place, Pad | None] = {}
    for dim, at in call.places(PaddedValue(tuple(factors))):
        held = [
            value.pad_at((own, at))
            for value, own in zip((first, second), sources[dim], strict=True)
            if value.real is not None or (own >= 0 and value.factors[own] == factors[dim])
        ]
        pads[dim, at] = blurred(*held)
    return PaddedValue(tuple(factors)).with_pads(pads)


def _with_bias(call: OpCall, matrix: PaddedValue, bias: object) -> PaddedValue:
    if not isinstance(bias, PaddedValue):
        return matrix
    offset = matrix.rank - bias.rank
    factors = call.unify_into(matrix.factors, bias)
    result, added = PaddedValue(tuple(factors)), broadcast(call, bias, factors)
    pads: dict[Place, Pad | None] = {}
    for place in call.places(result):
        ours, theirs = matrix.pad_at(place), added.pad_at(place)
        varies = place[0] >= offset and call.sizes.any_padded(bias.factors[place[0] - offset])
        pads[place] = blurred(ours, theirs) if varies or theirs is not None else blurred(ours)
    return result.with_pads(pads)
