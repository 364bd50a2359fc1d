"""Reads by index: along a padded dimension the indices must be known to be real, else the verdict is RUNTIME."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphpass.regions.padding.calls import CHECK_IF_DECLARED, OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.rules.pointwise import entry_by_entry
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.sizes import as_size, product
from graphpass.regions.padding.values import (
    COUNT_FROM_START,
    Factors,
    Pad,
    PaddedValue,
    Place,
    Sign,
    Size,
    Verdict,
    is_number,
)

__all__ = ["FROM_START", "RULES", "by_contents", "by_index", "check_order", "index_factors", "is_whole", "stays_real"]

FROM_START = "index_from_start"
"""``where(i < 0, i + n, i)``, as ``patterns`` writes it."""


def stays_real(call: OpCall, index: PaddedValue, of_dim: Factors) -> bool:
    """Whether each clean index selects the same, real entry of a dimension in both runs."""
    if not call.sizes.ordered:
        return is_whole(index, of_dim)
    if index.constant is not None:
        # guard: proof_picked_by_data
        return type(index.constant) is int and index.constant >= 0 and call.sizes.is_prefix(of_dim)
    if index.index is None or len(of_dim) > 1:
        return False  # guard: proof_picked_unknown
    along = index.factors[index.index.dim][index.index.factor]
    left = as_size(product(of_dim) - along - index.index.offset)
    return index.index.offset >= 0 and isinstance(left, int) and left >= 0


def is_whole(index: PaddedValue, of_dim: Factors) -> bool:
    """Whether the indices are 0, 1, 2, ... along one factor, over exactly one dimension."""
    if index.index is None or index.index.offset != 0 or len(of_dim) != 1:
        return False
    return index.factors[index.index.dim] == of_dim


def by_contents(call: OpCall, what: str, size: Size) -> PaddingReason:
    """A RUNTIME reason: only the contents of a call decide whether padding is read or written."""
    return PaddingReason(what, verdict=Verdict.RUNTIME, size=size)


def by_index(call: OpCall, what: str, size: Size, *indices: PaddedValue) -> PaddingReason:
    """The reason for an operator in which a negative index counts from the padded end of a dimension."""
    if any(index.sign is Sign.UNKNOWN for index in indices):  # guard: proof_negative_index
        return PaddingReason(f"{what}, and a negative index counts from its end", size=size, remedy=COUNT_FROM_START)
    return by_contents(call, what, size)


def check_order(call: OpCall, of_dim: Factors) -> None:
    """Refuse data that names entries of a dimension which stand at other indices in a padded run."""
    if call.sizes.ordered and not call.sizes.is_prefix(of_dim):  # guard: proof_index_into_flattened
        inside = _first_padded(call, of_dim[1:])
        why = f"data names entries of {list(of_dim)}, which stand at other indices in a padded run"
        raise call.refuse(why, inside, "index each size by itself: `x[i, j]` in place of `x.flatten(0, 1)[k]`")


def _first_padded(call: OpCall, factors: Factors) -> Size:
    return next(size for size in factors if call.padded(size))


def index_factors(call: OpCall, indices: Sequence[PaddedValue]) -> tuple[Factors, ...]:
    """The factors of several index tensors, broadcast together."""
    rank = max(index.rank for index in indices)
    factors: list[Factors] = [()] * rank
    for index in indices:
        for dim, of_dim in enumerate(index.factors, rank - index.rank):
            factors[dim] = call.unify(factors[dim], of_dim)
    return tuple(factors)


def _index(call: OpCall) -> PaddedValue:
    """``x[i, j]`` with index tensors; the broadcast indices replace the indexed dimensions."""
    call.no_padded_numbers()
    value = call.tensor("self")
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if not hit:
        return value
    _refuse_masks(call, list(hit.values()))
    picked = index_factors(call, list(hit.values()))
    dims = sorted(hit)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if adjacent else 0
    rest = [dim for dim in range(value.rank) if dim not in hit]
    to = {dim: position + (len(picked) if position >= at else 0) for position, dim in enumerate(rest)}
    rest_factors = [value.factors[dim] for dim in rest]
    result = PaddedValue((*rest_factors[:at], *picked, *rest_factors[at:]))
    pads: dict[Place, Pad | None] = {(to[dim], factor): pad for (dim, factor), pad in value.padding if dim in to}
    reasons = []
    for dim, index in hit.items():
        check_order(call, value.factors[dim])
        if is_whole(index, value.factors[dim]) and index.index is not None:
            along = at + len(picked) - index.rank + index.index.dim
            if _stands_alone(hit, dim, len(picked) - index.rank + index.index.dim, len(picked)):
                pads[along, index.index.factor] = value.pad_at((dim, 0))
        if call.sizes.any_padded(value.factors[dim]) and not stays_real(call, index, value.factors[dim]):
            size = _first_padded(call, value.factors[dim])
            reasons.append(by_index(call, f"data selects entries of the padded dimension {dim}", size, index))
    result = result.with_pads({place: pad for place, pad in pads.items() if _is_place(call, result, place)})
    for reason in reasons:
        result = call.reached(result, reason)
    return result


def _stands_alone(hit: dict[int, PaddedValue], dim: int, along: int, rank: int) -> bool:
    """Whether only the index of ``dim`` varies along dimension ``along`` of the broadcast indices."""
    others = (index for other, index in hit.items() if other != dim)
    return all(along - rank + index.rank < 0 or not index.factors[along - rank + index.rank] for index in others)


def _is_place(call: OpCall, value: PaddedValue, place: Place) -> bool:
    return place[1] < len(value.factors[place[0]]) and call.padded(value.factors[place[0]][place[1]])


def _refuse_masks(call: OpCall, indices: Sequence[PaddedValue]) -> None:
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise call.refuse("a mask picks entries, as many as contents say")


def _embedding(call: OpCall) -> PaddedValue:
    weight, indices = call.tensor("weight"), call.tensor("indices")
    call.no_padded_numbers("padding_idx")
    check_order(call, weight.factors[0])
    result = PaddedValue((*indices.factors, weight.factors[1]))
    if call.sizes.any_padded(weight.factors[0]) and not stays_real(call, indices, weight.factors[0]):
        size = _first_padded(call, weight.factors[0])
        return call.reached(result, by_contents(call, "data selects rows of a padded table", size))
    return result


def _along(call: OpCall, value: PaddedValue, index: PaddedValue, dim: int, result: PaddedValue) -> PaddedValue:
    """``result``, with findings if the entries selected along one dimension may be padding."""
    of_dim = value.factors[dim] if value.rank else ()
    check_order(call, of_dim)
    if call.sizes.any_padded(of_dim) and not stays_real(call, index, of_dim):
        why = f"data selects entries of the padded dimension {dim}"
        return call.reached(result, by_contents(call, why, _first_padded(call, of_dim)))
    return result


def _index_select(call: OpCall) -> PaddedValue:
    value, index = call.tensor("self"), call.tensor("index")
    dim = call.dim(call.argument("dim"), value.rank)
    of_index: Factors = index.factors[0] if index.rank else ()
    pads = {place: pad for place, pad in value.padding if place[0] != dim}
    result = PaddedValue((*value.factors[:dim], of_index, *value.factors[dim + 1 :])).with_pads(pads)
    return _along(call, value, index, dim, result)


def _gather(call: OpCall) -> PaddedValue:
    """In all dimensions except the gathered one, entry i comes from entry i."""
    value, index = call.tensor("self"), call.tensor("index", "indices")
    call.no_padded_numbers()
    dim = call.argument("dim")
    if dim is None:
        raise call.refuse("takes entries of the flattened tensor")
    dim = call.dim(dim, value.rank)
    check_aligned(call, value, index, [at for at in range(value.rank) if at != dim])
    return _along(call, value, index, dim, call.carried(PaddedValue(index.factors), value))


def _take(call: OpCall) -> PaddedValue:
    """An index into the flattened tensor."""
    value, index = call.tensor("self"), call.tensor("index")
    flat = tuple(size for of_dim in value.factors for size in of_dim)
    result = PaddedValue(index.factors)
    if not call.sizes.any_padded(flat):
        return result
    check_order(call, flat)
    what = "data selects entries of the flattened, padded tensor"
    return call.reached(result, by_index(call, what, _first_padded(call, flat), index))


def _from_start(call: OpCall) -> PaddedValue | tuple[PaddedValue | None, ...]:
    """An index that is known not to be negative stays as it is; of others, padding of 0 or more does."""
    index, length = call.tensor("self"), call.tensor("length")
    if index.sign is not Sign.UNKNOWN and not length.rank:
        return index
    counted = entry_by_entry(call)
    if length.sign is not Sign.REAL_SIZE or not isinstance(counted, PaddedValue):
        return counted
    return counted.with_pads({at: pad for at, pad in index.padding if is_number(pad) and pad >= 0})  # type: ignore[operator]


def check_aligned(call: OpCall, value: PaddedValue, index: PaddedValue, dims: Sequence[int]) -> None:
    """Refuse an index that is not aligned with ``value`` in ``dims``: entry i must select from entry i.

    An index may be shorter than the tensor along a dimension; it then selects from the first entries.
    """
    for dim in dims:
        ours, theirs = value.factors[dim], index.factors[dim]
        if ours == theirs or not call.sizes.any_padded((*ours, *theirs)):
            continue
        if (not theirs and call.sizes.starts_clean(ours)) or (theirs and call.sizes.unified(ours, theirs) is not None):
            continue
        at_fault = _first_padded(call, (*ours, *theirs))
        why = f"an index of factors {list(theirs)} names entries of {list(ours)}"
        raise call.refuse(why, at_fault, CHECK_IF_DECLARED)


def _bucketize(call: OpCall) -> PaddedValue:
    """Each entry is looked up in a table, which must be unpadded."""
    entries = call.argument("self", "input", "elements")
    table: Any = call.argument("boundaries", "test_elements")
    call.no_padded_numbers()
    if isinstance(table, PaddedValue):
        call.unpadded(table, range(table.rank), "looks entries up in")
    if not isinstance(entries, PaddedValue):
        return call.fresh()
    return PaddedValue(entries.factors)


RULES: dict[str, PaddingRule] = {
    **aten(_index, "index _unsafe_index"),
    **aten(_embedding, "embedding"),
    **aten(_index_select, "index_select"),
    **aten(_gather, "gather take_along_dim"),
    **aten(_take, "take"),
    **aten(_bucketize, "bucketize isin"),
    f"graphpass::{FROM_START}": _from_start,
}
