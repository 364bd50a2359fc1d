"""Writes by index: RUNTIME if the index or the source is padded along the written dimension."""

from __future__ import annotations

from collections.abc import Sequence

from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule
from graphpass.regions.padding.rules.indexing import (
    by_contents,
    by_index,
    check_aligned,
    check_order,
    index_factors,
    is_whole,
)
from graphpass.regions.padding.rules.tables import aten
from graphpass.regions.padding.values import Factors, PaddedValue, Size

__all__ = ["RULES"]


def _written(call: OpCall, value: PaddedValue, *reasons: PaddingReason) -> PaddedValue:
    result = call.carried(PaddedValue(value.factors), value)
    for reason in reasons:
        result = call.reached(result, reason)
    return result


def _first_padded(call: OpCall, *factors: Factors) -> Size | None:
    return next((size for of_dim in factors for size in of_dim if call.padded(size)), None)


def _scatter(call: OpCall) -> PaddedValue:
    """``scatter``: in all dimensions except the written one, entry i goes to entry i."""
    value, index = call.tensor("self"), call.tensor("index")
    call.no_padded_numbers()
    dim = call.dim(call.argument("dim"), value.rank)
    others = [at for at in range(value.rank) if at != dim]
    check_aligned(call, value, index, others)
    source = call.argument("src", "value")
    if isinstance(source, PaddedValue) and source.rank:
        check_aligned(call, source, index, range(index.rank))
    # guard: proof_scattered_by_data
    size = _first_padded(call, value.factors[dim], index.factors[dim]) if value.rank else None
    if size is None:
        return _written(call, value)
    check_order(call, value.factors[dim])
    return _written(call, value, by_contents(call, f"data selects which entries of dimension {dim} are written", size))


def _index_add(call: OpCall) -> PaddedValue:
    """``index_add``, ``index_copy``, ``index_fill``, ``index_reduce``: an index tensor selects the rows to write."""
    value, index = call.tensor("self"), call.tensor("index")
    call.no_padded_numbers()
    dim = call.dim(call.argument("dim"), value.rank)
    source = call.argument("source", "src", "value")
    listed: Factors = index.factors[0] if index.rank else ()
    factors = list(value.factors)
    if isinstance(source, PaddedValue) and source.rank and source.constant is None:
        for at in range(value.rank):
            if at != dim:
                factors[at] = call.unify(value.factors[at], source.factors[at])
        if source.factors[dim] != listed and call.sizes.any_padded((*source.factors[dim], *listed)):
            raise call.refuse(f"a source of rows {list(source.factors[dim])} for indices {list(listed)}")
    of_dim: Factors = value.factors[dim] if value.rank else ()
    size = _first_padded(call, of_dim, listed)  # guard: proof_added_by_data
    result = PaddedValue(tuple(factors))
    if size is None:
        return result
    check_order(call, of_dim)
    counting = [index] if call.name == "index_fill" and call.sizes.any_padded(of_dim) else []  # the others refuse -1
    what = f"data selects which entries of dimension {dim} are written"
    return _written(call, result, by_index(call, what, size, *counting))


def _index_put(call: OpCall) -> PaddedValue:
    """``x[i, j] = values``: aligned along factors whose index is 0, 1, 2, ...; RUNTIME along other padded factors."""
    value, values = call.tensor("self"), call.tensor("values")
    call.no_padded_numbers()
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype is not None and not _is_index(index) for index in hit.values()):
        return _masked_put(call, value, values, list(hit.values()))
    picked = index_factors(call, list(hit.values()))
    dims = sorted(hit)
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest_factors = [value.factors[dim] for dim in range(value.rank) if dim not in hit]
    target = (*rest_factors[:at], *picked, *rest_factors[at:])
    for dim, of_dim in enumerate(values.factors, len(target) - values.rank):
        if call.sizes.unified(target[dim], of_dim) != target[dim]:
            raise call.refuse(
                f"values of factors {list(of_dim)} for entries {list(target[dim])}", _first_padded(call, of_dim)
            )
    walked = {
        len(picked) - index.rank + index.index.dim
        for dim, index in hit.items()
        if index.index is not None and is_whole(index, value.factors[dim])
    }
    at_fault = [size for position, of_dim in enumerate(picked) if position not in walked for size in of_dim]
    at_fault += [
        size for dim, index in hit.items() if not is_whole(index, value.factors[dim]) for size in value.factors[dim]
    ]
    size = _first_padded(call, tuple(at_fault))  # guard: proof_put_by_data
    if size is None:
        return _written(call, value)
    for dim in hit:
        check_order(call, value.factors[dim])
    counting = [index for dim, index in hit.items() if call.sizes.any_padded(value.factors[dim])]
    return _written(call, value, by_index(call, "data selects the entries that are written", size, *counting))


def _is_index(index: PaddedValue) -> bool:
    return index.dtype is not None and not index.dtype.is_floating_point and index.dtype.itemsize > 1


def _masked_put(call: OpCall, value: PaddedValue, values: PaddedValue, masks: Sequence[PaddedValue]) -> PaddedValue:
    """``x[mask] = number``, for a mask over the leading dimensions: entry by entry."""
    if len(masks) > 1 or call.argument("indices")[0] is None:
        raise call.refuse("masks pick the entries that are written")
    if any(values.factors) and (call.places(values) or call.places(value) or call.places(masks[0])):
        raise call.refuse("values are written one by one to the entries that a mask picks")
    factors = list(value.factors)
    for dim, of_dim in enumerate(masks[0].factors):
        factors[dim] = call.unify(factors[dim], of_dim)
    return PaddedValue(tuple(factors))


RULES: dict[str, PaddingRule] = {
    **aten(_scatter, "scatter scatter_add scatter_reduce"),
    **aten(_index_add, "index_add index_copy index_fill index_reduce"),
    **aten(_index_put, "index_put _unsafe_index_put"),
}
