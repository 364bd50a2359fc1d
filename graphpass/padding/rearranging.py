"""Relations of operators that move entries: regroups, permutes, repeats, cuts, joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from graphpass.padding.opcall import OpCall, Returned, Unknown
from graphpass.padding.pointwise import broadcast
from graphpass.padding.sizes import Regrouping, as_size, product
from graphpass.padding.values import (
    Factors,
    IndexAlong,
    Pad,
    PaddedValue,
    Place,
    Size,
    blurred,
    is_number,
    operator_named,
)


def regrouped(call: OpCall, value: PaddedValue, shape: Sequence[Size]) -> PaddedValue:
    """``value`` viewed with the sizes ``shape``."""
    if value.constant is not None or any(size == 0 for size in shape):
        return PaddedValue(call.sizes.one_each(shape), constant=value.constant)
    sizes = list(map(call.sizes.renamed, shape))
    walk = Regrouping(call.sizes, value.factors)
    dims: list[Any] = list(map(walk.take, sizes))
    if walk.left or None in dims:
        dims = _free_behind(call, value, sizes)
    if not dims:
        was_as = str([list(of_dim) for of_dim in value.factors])
        raise call.refuse(f"a view of factors {was_as} as {list(shape)} cuts through a padded one")
    result = PaddedValue(tuple(dims))
    places = dict(zip(call.places(value), call.places(result), strict=True))
    index = value.index
    if index is not None:
        at = places.get(index[:2])
        whole = at is not None and result.factors[at[0]][at[1]] == value.factors[index.dim][index.factor]
        index = IndexAlong(*at, index.offset) if at is not None and whole else None
    pads = {places[was]: pad for was, pad in value.padding if was in places}
    rows = frozenset(places[was] for was in value.rows if was in places)
    return replace(result.with_pads(pads), index=index, rows=rows)


def _free_behind(call: OpCall, value: PaddedValue, sizes: Sequence[Size]) -> list[Any]:
    """The dimensions of a view that regroups what lies behind all padded factors in any way; none if it cannot be."""
    walk, dims = Regrouping(call.sizes, value.factors), list[Any]()
    for at, size in enumerate(sizes):
        rest = (*walk.left, *sizes[at:])  # a view keeps the number of entries
        if not call.sizes.any_padded(rest):  # guard: proof_view_behind_padding
            return [*dims, *call.sizes.one_each(sizes[at:])]
        dims.append(walk.take(size))
        if dims[-1] is None:
            break
    return []


def view(call: OpCall) -> PaddedValue:
    """A view with other sizes, or with another dtype of the same width."""
    value = call.tensor("self", "a", "input")
    if "dtype" not in call.arguments:
        return regrouped(call, value, call.shape.sizes)
    call.unpadded(value, [value.rank - 1] if value.rank else [], "reinterprets the bytes of")
    return PaddedValue((*value.factors[:-1], *call.fresh().factors[-1:])) if value.rank else call.fresh()


def permute(call: OpCall) -> PaddedValue:
    """``permute``, ``transpose`` and ``movedim``: the dimensions in another order."""
    value, operator = call.tensor("self", "a"), operator_named(call.op.replace(".", "::", 1))
    assert operator is not None, "a call is of an operator"
    numbered = torch.empty(tuple(range(value.rank)), device="meta")  # its size names each dimension
    order = operator(numbered, *list(call.arguments.values())[1:]).shape
    return value.moved(tuple(value.factors[dim] for dim in order), {dim: at for at, dim in enumerate(order)})


def expand(call: OpCall) -> PaddedValue:
    """Dimensions of size 1 get any size; the entries along them are equal."""
    value, wanted = call.tensor("self", "a"), call.fresh().factors
    if call.name == "broadcast_in_dim":
        to = dict(enumerate(call.argument("broadcast_dimensions")))
        spread: list[Factors] = [()] * len(wanted)
        for dim, target in to.items():
            spread[target] = value.factors[dim]
        value = value.moved(tuple(spread), to)
    offset = len(wanted) - value.rank
    factors = (value.factors[dim - offset] if dim >= offset else () for dim in range(len(wanted)))
    return broadcast(call, value, [own or of_dim for own, of_dim in zip(factors, wanted, strict=True)])


def gathered(call: OpCall) -> PaddedValue:
    """The entries of all ranks, one rank after the other along the first dimension."""
    value = call.tensor("input")
    first = call.sizes.merged([call.argument("group_size"), *value.factors[0]])
    return call.carried(PaddedValue((first, *value.factors[1:])), value)


# --- cuts and joins


def cut(
    call: OpCall, value: PaddedValue, dim: int, start: Any, size: Size, step: Any = 1, what: str = "a slice"
) -> PaddedValue:
    """A part of dimension ``dim`` from ``start`` with ``step``; it has ``size`` entries in the padded run."""
    of_dim = value.factors[dim]
    whole = product(of_dim)
    if start == 0 and step == 1 and size == whole:
        return value
    padded = call.sizes.any_padded(of_dim)
    if call.padded(start) or call.padded(step):
        raise call.refuse(f"{what} of dimension {dim} starts or steps by a padded size", start)
    # guard: proof_slice_from_the_end
    if padded and not (isinstance(start, int) and start >= 0 and isinstance(step, int) and step >= 1):
        raise call.refuse(f"{what} of the padded dimension {dim} is counted from its end", of_dim[0])
    call.at_the_start(value, dim, f"{what} of")  # guard: proof_slice_inside
    factors: list[Factors] = list(value.factors)
    factors[dim] = call.sizes.merged([size])
    index = value.index
    if index is not None and index.dim == dim:
        # Entry i of the slice is entry start + i, so it equals its index plus a larger offset.
        shifts = isinstance(start, int) and step == 1 and len(of_dim) == 1 and len(factors[dim]) == 1
        index = index._replace(factor=0, offset=index.offset + start) if shifts else None
    rows = frozenset(place for place in value.rows if place[0] != dim)  # guard: made_rows_of_nothing
    return replace(value, factors=tuple(factors), index=index, rows=rows).with_pads(_of_a_part(value, dim))


def _of_a_part(value: PaddedValue, dim: int) -> dict[Place, Pad | None]:
    """The padding of a part of a dimension, where it may begin at real entries."""
    return {place: pad if place[0] != dim else blurred(pad) for place, pad in value.padding}


def selected(call: OpCall, value: PaddedValue, dim: int, index: Any) -> PaddedValue:
    """``value`` at one entry of dimension ``dim``, which is removed."""
    entry = cut(call, value, dim, index, 1, what=f"entry {index}")
    kept = [at for at in range(value.rank) if at != dim]
    return entry.moved(tuple(value.factors[at] for at in kept), {at: position for position, at in enumerate(kept)})


def slice_of(call: OpCall) -> PaddedValue:
    """``slice`` and ``narrow``."""
    value = call.tensor("self")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    start = call.argument("start")
    size = call.shape.sizes[dim]
    return cut(call, value, dim, 0 if start is None else start, size, call.argument("step", default=1))


def framed(call: OpCall) -> PaddedValue:
    """``unfold``: real frames lie within real entries."""
    value = call.tensor("self")
    dim = call.dim(call.argument("dimension"), value.rank)
    call.at_the_start(value, dim, "takes frames of")  # guard: proof_frames_inside
    length, frame = call.shape.sizes[dim], call.shape.sizes[-1]
    factors = (*value.factors[:dim], call.sizes.merged([length]), *value.factors[dim + 1 :], call.sizes.merged([frame]))
    return PaddedValue(factors).with_pads(_of_a_part(value, dim))


def select(call: OpCall) -> PaddedValue:
    """One entry of a dimension."""
    value = call.tensor("self")
    return selected(call, value, call.dim(call.argument("dim"), value.rank), call.argument("index"))


def split(call: OpCall) -> Returned:
    """Each piece is a slice; only pieces that start after a padded piece are refused."""
    value = call.tensor("self")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    if call.name == "unbind":
        return tuple(selected(call, value, dim, at) for at in range(len(call.shapes)))
    pieces, start = [], as_size(0)
    for shape in call.shapes:
        size = call.sizes.renamed(shape.sizes[dim])
        try:
            pieces.append(cut(call, value, dim, start, size))
        except Unknown as unknown:
            pieces.append(call.reached(call.fresh(shape), unknown.reason))
        start = as_size(start + size)
    return tuple(pieces)


def cat(call: OpCall) -> PaddedValue:
    """``cat`` and ``stack``: no padding before the last part, along the joined dimension."""
    parts = [part for part in call.argument("tensors") if isinstance(part, PaddedValue)]
    rank = len(call.shape.sizes)
    dim = call.dim(call.argument("dim", default=0), rank)
    if call.name == "stack":
        parts = [_with_dim(part, dim) for part in parts]
    else:
        parts = [part for part in parts if part.factors != ((0,),)] or parts[:1]
    call.no_padded_numbers("tensors")
    for part in parts[:-1]:
        for place in call.places(part, [dim]):
            raise call.refuse_place(part, place, "puts entries behind")  # guard: proof_joined_behind
    last = parts[-1]
    if len(parts) > 1:
        call.at_the_start(last, dim, "moves entries along")
    factors = list(last.factors)
    for part in parts[:-1]:
        factors = call.unify_into(factors, part, dim)
    factors[dim] = last.factors[dim] if len(parts) == 1 else call.sizes.merged([call.shape.sizes[dim]])
    return call.carried(PaddedValue(tuple(factors)), *parts)


def _with_dim(value: PaddedValue, dim: int) -> PaddedValue:
    to = {at: at + (at >= dim) for at in range(value.rank)}
    return replace(value.moved((*value.factors[:dim], (), *value.factors[dim:]), to), index=None)


def constant_pad(call: OpCall) -> PaddedValue:
    """A fill behind padding must equal the padding; a fill in front moves it on."""
    value, amounts, fill = call.tensor("self"), call.argument("pad"), call.argument("value", default=0)
    call.no_padded_numbers("pad")
    extended = [
        value.rank - 1 - at for at, right in enumerate(amounts[1::2]) if not isinstance(right, int) or right > 0
    ]
    if is_number(fill):
        call.wants(["self"], call.places(value, extended), fill)  # guard: made_behind
    factors: list[Factors] = list(value.factors)
    for turn in range(len(amounts) // 2):
        dim, left, right = value.rank - 1 - turn, amounts[2 * turn], amounts[2 * turn + 1]
        if left == 0 and right == 0:
            continue
        of_dim = value.factors[dim]
        if call.padded(left):
            raise call.refuse(f"pads dimension {dim} by a padded size in front", left)
        if call.sizes.any_padded(of_dim):
            _check_behind(call, value, dim, right, fill)
            if not isinstance(left, int):
                raise call.refuse(f"pads the padded dimension {dim} by {left} in front", of_dim[0])
        factors[dim] = call.sizes.merged([call.shape.sizes[dim]])
    return call.carried(PaddedValue(tuple(factors)), value)


def _check_behind(call: OpCall, value: PaddedValue, dim: int, right: Any, fill: object) -> None:
    """Require that padding equals the fill, because entries added after it have other positions in the real run."""
    call.at_the_start(value, dim, "moves entries along")
    pad = value.pad_at((dim, 0))
    # guard: proof_filled_behind
    if not (isinstance(right, int) and right <= 0) and (not is_number(pad) or pad != fill):
        raise call.refuse(f"puts {fill} behind the padding of dimension {dim}", value.factors[dim][0])


def replaced_part(call: OpCall) -> PaddedValue:
    """``slice_scatter`` and ``select_scatter``: a part of a dimension that ends where it does at the real sizes."""
    value, source = call.tensor("self"), call.tensor("src")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    source = _with_dim(source, dim) if "index" in call.arguments else source
    start, end, step = call.argument("index", "start") or 0, call.argument("end"), call.argument("step", default=1)
    length = product(source.factors[dim])
    part = cut(call, value, dim, start, length, step, "a replaced part")
    to_the_end = step == 1 and sympy.expand(product(value.factors[dim]) - start - length) == 0
    if not to_the_end and (call.padded(length) or call.padded(end)):  # guard: proof_replaced_slice
        raise call.refuse(f"writes padding to dimension {dim}, or ends at a padded size", length)
    call.unify(part.factors[dim], source.factors[dim])
    return call.carried(PaddedValue(tuple(call.unify_into(value.factors, source, dim))), value, source)
