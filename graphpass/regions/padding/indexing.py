"""Relations of operators that read or write by index.

Along a padded dimension the indices must be known to be real, else the verdict is RUNTIME.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphpass.regions.padding.calls import CHECK_IF_DECLARED, OpCall, PaddingReason, Returned
from graphpass.regions.padding.pointwise import entry_by_entry
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

FROM_START = "index_from_start"
"""``where(i < 0, i + n, i)``, as ``patterns`` writes it."""


def stays_real(call: OpCall, index: PaddedValue, of_dim: Factors) -> bool:
    """Whether each clean index selects the same, real entry of a dimension in both runs."""
    if call.asks_independence:
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


def by_contents(what: str, size: Size | None, *counting: PaddedValue) -> PaddingReason:
    """A RUNTIME reason: only the contents of a call decide whether padding is read or written.

    Negative indices among ``counting`` count from the padded end of a dimension, and no contents make up for that.
    """
    if any(index.sign is Sign.UNKNOWN for index in counting):  # guard: proof_negative_index
        return PaddingReason(f"{what}, and a negative index counts from its end", size=size, remedy=COUNT_FROM_START)
    return PaddingReason(what, verdict=Verdict.RUNTIME, size=size)


def check_order(call: OpCall, of_dim: Factors) -> None:
    """Refuse data that names entries of a dimension which stand at other indices in a padded run."""
    if not call.asks_independence and not call.sizes.is_prefix(of_dim):  # guard: proof_index_into_flattened
        inside = call.sizes.first_padded(of_dim[1:])
        why = f"data names entries of {list(of_dim)}, which stand at other indices in a padded run"
        raise call.refuse(why, inside, "index each size by itself: `x[i, j]` in place of `x.flatten(0, 1)[k]`")


def _broadcast_factors(call: OpCall, indices: Sequence[PaddedValue]) -> tuple[Factors, ...]:
    """The factors of several index tensors, broadcast together."""
    factors: list[Factors] = [()] * max(index.rank for index in indices)
    for index in indices:
        factors = call.unify_into(factors, index)
    return tuple(factors)


def _first_picked(dims: Sequence[int]) -> int:
    """Where the indices' dimensions stand in ``x[i, :, j]``: in place of adjacent ones, else in front."""
    return dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0


def index(call: OpCall) -> PaddedValue:
    """``x[i, j]`` with index tensors; the broadcast indices replace the indexed dimensions."""
    call.no_padded_numbers()
    value = call.tensor("self")
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if not hit:
        return value
    if any(index.dtype in (torch.bool, torch.uint8) for index in hit.values()):
        raise call.refuse("a mask picks entries, as many as contents say")
    picked = _broadcast_factors(call, list(hit.values()))
    at = _first_picked(list(hit))
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
            size = call.sizes.first_padded(value.factors[dim])
            reasons.append(by_contents(f"data selects entries of the padded dimension {dim}", size, index))
    places = call.places(result)
    return call.reached(result.with_pads({at: pad for at, pad in pads.items() if at in places}), *reasons)


def _stands_alone(hit: dict[int, PaddedValue], dim: int, along: int, rank: int) -> bool:
    """Whether only the index of ``dim`` varies along dimension ``along`` of the broadcast indices."""
    others = (index for other, index in hit.items() if other != dim)
    return all(along - rank + index.rank < 0 or not index.factors[along - rank + index.rank] for index in others)


def _along(call: OpCall, value: PaddedValue, index: PaddedValue, dim: int, result: PaddedValue) -> PaddedValue:
    """``result``, with findings if the entries selected along one dimension may be padding."""
    of_dim = value.factors[dim] if value.rank else ()
    check_order(call, of_dim)
    if call.sizes.any_padded(of_dim) and not stays_real(call, index, of_dim):
        dimension = "rows of a padded table" if call.name == "embedding" else f"entries of the padded dimension {dim}"
        return call.reached(result, by_contents(f"data selects {dimension}", call.sizes.first_padded(of_dim)))
    return result


def index_select(call: OpCall) -> PaddedValue:
    """``index_select`` and ``embedding``: the index's dimensions take the place of one."""
    value = call.tensor("self", "weight")
    index = call.tensor("index", "indices")
    call.no_padded_numbers("padding_idx")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    pads = {place: pad for place, pad in value.padding if place[0] != dim} if call.name == "index_select" else {}
    result = PaddedValue((*value.factors[:dim], *index.factors, *value.factors[dim + 1 :])).with_pads(pads)
    return _along(call, value, index, dim, result)


def gather(call: OpCall) -> PaddedValue:
    """In all dimensions except the gathered one, entry i comes from entry i."""
    value, index = call.tensor("self"), call.tensor("index", "indices")
    call.no_padded_numbers()
    dim = call.argument("dim")
    if dim is None:
        raise call.refuse("takes entries of the flattened tensor")
    dim = call.dim(dim, value.rank)
    _check_aligned(call, value, index, [at for at in range(value.rank) if at != dim])
    return _along(call, value, index, dim, call.carried(PaddedValue(index.factors), value))


def take(call: OpCall) -> PaddedValue:
    """An index into the flattened tensor."""
    value, index = call.tensor("self"), call.tensor("index")
    flat = tuple(size for of_dim in value.factors for size in of_dim)
    result = PaddedValue(index.factors)
    if not call.sizes.any_padded(flat):
        return result
    check_order(call, flat)
    what = "data selects entries of the flattened, padded tensor"
    return call.reached(result, by_contents(what, call.sizes.first_padded(flat), index))


def from_start(call: OpCall) -> Returned:
    """An index that is known not to be negative stays as it is; of others, padding of 0 or more does."""
    index, length = call.tensor("self"), call.tensor("length")
    if index.sign is not Sign.UNKNOWN and not length.rank:
        return index
    counted = entry_by_entry(call)
    if length.sign is not Sign.REAL_SIZE or not isinstance(counted, PaddedValue):
        return counted
    return counted.with_pads({at: pad for at, pad in index.padding if is_number(pad) and pad >= 0})  # type: ignore[operator]


def _check_aligned(call: OpCall, value: PaddedValue, index: PaddedValue, dims: Sequence[int]) -> None:
    """Refuse an index that is not aligned with ``value`` in ``dims``: entry i must select from entry i.

    An index may be shorter than the tensor along a dimension; it then selects from the first entries.
    """
    for dim in dims:
        ours, theirs = value.factors[dim], index.factors[dim]
        if ours == theirs or not call.sizes.any_padded((*ours, *theirs)):
            continue
        if (not theirs and call.sizes.starts_clean(ours)) or (theirs and call.sizes.unified(ours, theirs) is not None):
            continue
        why = f"an index of factors {list(theirs)} names entries of {list(ours)}"
        raise call.refuse(why, call.sizes.first_padded(ours, theirs), CHECK_IF_DECLARED)


def bucketize(call: OpCall) -> PaddedValue:
    """Each entry is looked up in a table, which must be unpadded."""
    entries = call.argument("self", "input", "elements")
    table: Any = call.argument("boundaries", "test_elements")
    call.no_padded_numbers()
    if isinstance(table, PaddedValue):
        call.unpadded(table, range(table.rank), "looks entries up in")
    if not isinstance(entries, PaddedValue):
        return call.fresh()
    return PaddedValue(entries.factors)


# --- writes: RUNTIME if the index or the source is padded along the written dimension


def _written(call: OpCall, value: PaddedValue, *reasons: PaddingReason) -> PaddedValue:
    return call.reached(call.carried(PaddedValue(value.factors), value), *reasons)


def scatter(call: OpCall) -> PaddedValue:
    """``scatter``: in all dimensions except the written one, entry i goes to entry i."""
    value, index = call.tensor("self"), call.tensor("index")
    call.no_padded_numbers()
    dim = call.dim(call.argument("dim"), value.rank)
    others = [at for at in range(value.rank) if at != dim]
    _check_aligned(call, value, index, others)
    source = call.argument("src", "value")
    if isinstance(source, PaddedValue) and source.rank:
        _check_aligned(call, source, index, range(index.rank))
    # guard: proof_scattered_by_data
    size = call.sizes.first_padded(value.factors[dim], index.factors[dim]) if value.rank else None
    if size is None:
        return _written(call, value)
    check_order(call, value.factors[dim])
    return _written(call, value, by_contents(f"data selects which entries of dimension {dim} are written", size))


def index_add(call: OpCall) -> PaddedValue:
    """``index_add``, ``index_copy``, ``index_fill``, ``index_reduce``: an index tensor selects the rows to write."""
    value, index = call.tensor("self"), call.tensor("index")
    call.no_padded_numbers()
    dim = call.dim(call.argument("dim"), value.rank)
    source = call.argument("source", "src", "value")
    listed: Factors = index.factors[0] if index.rank else ()
    factors = list(value.factors)
    if isinstance(source, PaddedValue) and source.rank and source.constant is None:
        factors = call.unify_into(factors, source, dim)
        if source.factors[dim] != listed and call.sizes.any_padded((*source.factors[dim], *listed)):
            raise call.refuse(f"a source of rows {list(source.factors[dim])} for indices {list(listed)}")
    of_dim: Factors = value.factors[dim] if value.rank else ()
    size = call.sizes.first_padded(of_dim, listed)  # guard: proof_added_by_data
    result = PaddedValue(tuple(factors))
    if size is None:
        return result
    check_order(call, of_dim)
    counting = [index] if call.name == "index_fill" and call.sizes.any_padded(of_dim) else []  # the others refuse -1
    what = f"data selects which entries of dimension {dim} are written"
    return _written(call, result, by_contents(what, size, *counting))


def index_put(call: OpCall) -> PaddedValue:
    """``x[i, j] = values``: aligned along factors whose index is 0, 1, 2, ...; RUNTIME along other padded factors."""
    value, values = call.tensor("self"), call.tensor("values")
    call.no_padded_numbers()
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype is not None and not _is_index(index) for index in hit.values()):
        return _masked_put(call, value, values, list(hit.values()))
    picked = _broadcast_factors(call, list(hit.values()))
    at = _first_picked(list(hit))
    rest_factors = [value.factors[dim] for dim in range(value.rank) if dim not in hit]
    target = (*rest_factors[:at], *picked, *rest_factors[at:])
    for dim, of_dim in enumerate(values.factors, len(target) - values.rank):
        if call.sizes.unified(target[dim], of_dim) != target[dim]:
            why = f"values of factors {list(of_dim)} for entries {list(target[dim])}"
            raise call.refuse(why, call.sizes.first_padded(of_dim))
    walked = {
        len(picked) - index.rank + index.index.dim
        for dim, index in hit.items()
        if index.index is not None and is_whole(index, value.factors[dim])
    }
    at_fault = [size for position, of_dim in enumerate(picked) if position not in walked for size in of_dim]
    at_fault += [
        size for dim, index in hit.items() if not is_whole(index, value.factors[dim]) for size in value.factors[dim]
    ]
    size = call.sizes.first_padded(tuple(at_fault))  # guard: proof_put_by_data
    if size is None:
        return _written(call, value)
    for dim in hit:
        check_order(call, value.factors[dim])
    counting = [index for dim, index in hit.items() if call.sizes.any_padded(value.factors[dim])]
    return _written(call, value, by_contents("data selects the entries that are written", size, *counting))


def _is_index(index: PaddedValue) -> bool:
    return index.dtype is not None and not index.dtype.is_floating_point and index.dtype.itemsize > 1


def _masked_put(call: OpCall, value: PaddedValue, values: PaddedValue, masks: Sequence[PaddedValue]) -> PaddedValue:
    """``x[mask] = number``, for a mask over the leading dimensions: entry by entry."""
    if len(masks) > 1 or call.argument("indices")[0] is None:
        raise call.refuse("masks pick the entries that are written")
    if any(values.factors) and (call.places(values) or call.places(value) or call.places(masks[0])):
        raise call.refuse("values are written one by one to the entries that a mask picks")
    leading = PaddedValue((*masks[0].factors, *[()] * (value.rank - masks[0].rank)))
    return PaddedValue(tuple(call.unify_into(value.factors, leading)))
