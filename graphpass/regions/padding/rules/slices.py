"""Operators that cut a dimension or concatenate tensors along it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from graphpass.regions.padding.calls import OpCall, PaddingRule, Unknown
from graphpass.regions.padding.rules.pointwise import broadcast
from graphpass.regions.padding.rules.shapes import without_dims
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.sizes import as_size, product
from graphpass.regions.padding.values import Factors, Pad, PaddedValue, Place, Size, either, is_number

__all__ = ["RULES", "cut", "selected"]


def cut(call: OpCall, value: PaddedValue, dim: int, start: Any, size: Size, step: Any = 1) -> PaddedValue:
    """A slice of dimension ``dim`` from ``start`` with ``step``; it has ``size`` entries in the padded run.

    Raises:
        Unknown: the slice is counted from a padded end, or the clean entries of the dimension are not its first ones.
    """
    of_dim = value.factors[dim]
    whole = product(of_dim)
    if start == 0 and step == 1 and size == whole:
        return value
    padded = call.sizes.any_padded(of_dim)
    if call.padded(start) or call.padded(step):
        raise call.refuse(f"a slice of dimension {dim} starts or steps by a padded size", start)
    # guard: proof_slice_from_the_end
    if padded and not (isinstance(start, int) and start >= 0 and isinstance(step, int) and step >= 1):
        raise call.refuse(f"a slice counts the padded dimension {dim} from its end", of_dim[0])
    if not call.sizes.starts_clean(of_dim):  # guard: proof_slice_inside
        raise call.refuse(f"a slice moves entries along the padded dimension {dim} of {list(of_dim)}", product(of_dim))
    factors: list[Factors] = list(value.factors)
    factors[dim] = call.sizes.merged([size])
    pads = {place: pad for place, pad in value.padding if place[0] != dim}
    index = value.index
    if index is not None and index.dim == dim:
        # Entry i of the slice is entry start + i, so it equals its index plus a larger offset.
        shifts = isinstance(start, int) and step == 1 and len(of_dim) == 1 and len(factors[dim]) == 1
        index = index._replace(factor=0, offset=index.offset + start) if shifts else None
    # guard: proof_shortened_padding
    if value.constant is None and isinstance(start, int) and step == 1 and padded and size == as_size(whole - start):
        pads[dim, 0] = value.pad_at((dim, 0))  # type: ignore[assignment]
    known = {place: pad for place, pad in pads.items() if pad is not None}
    return replace(value, factors=tuple(factors), index=index).with_pads(known)


def selected(call: OpCall, value: PaddedValue, dim: int, index: Any) -> PaddedValue:
    """``value`` at one entry of dimension ``dim``, which is removed.

    Raises:
        Unknown: the entry is counted from a padded end, or its index is a padded size.
    """
    of_dim = value.factors[dim]
    if call.padded(index):
        raise call.refuse(f"the padded size {index} is an index", index)
    if call.sizes.any_padded(of_dim):
        if not isinstance(index, int) or index < 0:  # guard: proof_entry_from_the_end
            raise call.refuse(f"entry {index} of the padded dimension {dim} is counted from its end", of_dim[0])
        if not call.sizes.starts_clean(of_dim):  # guard: proof_entry_inside
            raise call.refuse(f"one entry of the padded dimension {dim} of {list(of_dim)}", product(of_dim))
    return without_dims(value, [dim], keepdim=False)


def _slice(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    start = call.argument("start")
    size = call.shape.sizes[dim]
    return cut(call, value, dim, 0 if start is None else start, size, call.argument("step", default=1))


def _narrow(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    dim = call.dim(call.argument("dim"), value.rank)
    return cut(call, value, dim, call.argument("start"), call.shape.sizes[dim])


def _select(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    return selected(call, value, call.dim(call.argument("dim"), value.rank), call.argument("index"))


def _split(call: OpCall) -> tuple[PaddedValue, ...]:
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


def _cat(call: OpCall) -> PaddedValue:
    parts = [part for part in call.argument("tensors") if isinstance(part, PaddedValue)]
    rank = len(call.shape.sizes)
    if call.name == "stack":
        dim = call.dim(call.argument("dim", default=0), rank)
        parts = [_with_dim(part, dim) for part in parts]
    else:
        parts = [part for part in parts if part.factors != ((0,),)] or parts[:1]
        dim = call.dim(call.argument("dim", default=0), rank)
    call.no_padded_numbers("tensors")
    for part in parts[:-1]:
        for place in call.places(part, [dim]):
            raise call.refuse_place(part, place, "puts entries behind")  # guard: proof_joined_behind
    last = parts[-1]
    if len(parts) > 1 and not call.sizes.starts_clean(last.factors[dim]):
        moved = last.factors[dim]
        raise call.refuse(f"moves entries along the padded dimension {dim} of {list(moved)}", product(moved))
    factors: list[Factors] = []
    for at in range(rank):
        met = last.factors[at]
        for part in parts[:-1]:
            met = met if at == dim else call.unify(met, part.factors[at])
        factors.append(met)
    factors[dim] = last.factors[dim] if len(parts) == 1 else call.sizes.merged([call.shape.sizes[dim]])
    return PaddedValue(tuple(factors)).with_pads(_pads_of_joined(call, parts, tuple(factors), dim))


def _pads_of_joined(
    call: OpCall, parts: Sequence[PaddedValue], factors: tuple[Factors, ...], dim: int
) -> dict[Place, Pad | None]:
    """The padding of the last part along the joined dimension; along others, padding that is equal in all parts."""
    pads: dict[Place, Pad | None] = {}
    for place in call.places(PaddedValue(factors)):
        if place[0] == dim:
            pads[place] = parts[-1].pad_at((dim, 0))
            continue
        aligned = [broadcast(call, part, (*factors[:dim], part.factors[dim], *factors[dim + 1 :])) for part in parts]
        pads[place] = functools.reduce(either, (part.pad_at(place) for part in aligned))
    return pads


def _with_dim(value: PaddedValue, dim: int) -> PaddedValue:
    factors = (*value.factors[:dim], (), *value.factors[dim:])
    pads = {(at + (at >= dim), factor): pad for (at, factor), pad in value.padding}
    return replace(value, factors=factors, index=None).with_pads(pads)


def _constant_pad(call: OpCall) -> PaddedValue:
    value, amounts, fill = call.tensor("self"), call.argument("pad"), call.argument("value", default=0)
    call.no_padded_numbers("pad")
    factors: list[Factors] = list(value.factors)
    pads: dict[Place, Pad | None] = dict(value.padding)
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
        crops = not isinstance(right, int) or right < 0
        filled: Pad | None = fill if isinstance(fill, (bool, int, float)) else None
        pads = {
            place: either(pad, filled) if place[0] != dim else None if crops else pad for place, pad in pads.items()
        }
    return PaddedValue(tuple(factors)).with_pads(pads)


def _check_behind(call: OpCall, value: PaddedValue, dim: int, right: Any, fill: object) -> None:
    """Require that padding equals the fill, because entries added after it have other positions in the real run."""
    of_dim = value.factors[dim]
    if not call.sizes.starts_clean(of_dim):
        raise call.refuse(f"moves entries along the padded dimension {dim} of {list(of_dim)}", product(of_dim))
    pad = value.pad_at((dim, 0))
    # guard: proof_filled_behind
    if not (isinstance(right, int) and right <= 0) and (not is_number(pad) or pad != fill):
        raise call.refuse(f"puts {fill} behind the padding of dimension {dim}", of_dim[0])


def _scattered(call: OpCall) -> PaddedValue:
    """``slice_scatter`` and ``select_scatter``, which replace a part of a dimension."""
    value, source = call.tensor("self"), call.tensor("src")
    dim = call.dim(call.argument("dim", default=0), value.rank)
    if call.name == "select_scatter":
        selected(call, value, dim, call.argument("index"))
        source = _with_dim(source, dim)
    else:
        _check_replaced(call, value, source, dim)
    factors: list[Factors] = list(value.factors)
    for at in range(value.rank):
        if at != dim:
            factors[at] = call.unify(value.factors[at], source.factors[at])
    places = call.places(PaddedValue(tuple(factors)), [at for at in range(value.rank) if at != dim])
    common = {place: either(value.pad_at(place), source.pad_at(place)) for place in places}
    return PaddedValue(tuple(factors)).with_pads(common)


def _check_replaced(call: OpCall, value: PaddedValue, source: PaddedValue, dim: int) -> None:
    """Refuse a replaced slice that ends at another entry than in the run at the real sizes."""
    start, end, step = (
        call.argument(name, default=other) for name, other in (("start", 0), ("end", None), ("step", 1))
    )
    start = 0 if start is None else start
    of_dim, length = value.factors[dim], product(source.factors[dim])
    for number in (start, step):
        if call.padded(number):
            raise call.refuse(f"replaces a slice of dimension {dim} named by a padded size", number)
    padded, moving = call.sizes.any_padded(of_dim), call.padded(length)
    if not padded and not moving and not call.padded(end):
        return
    if not (isinstance(start, int) and start >= 0 and isinstance(step, int) and step >= 1):
        raise call.refuse(
            f"replaces a slice counted from the end of the padded dimension {dim}", (of_dim or (length,))[0]
        )
    if not (call.sizes.starts_clean(of_dim) and call.sizes.starts_clean(source.factors[dim])):
        raise call.refuse(f"moves entries along the padded dimension {dim} of {list(of_dim)}", product(of_dim))
    to_the_end = step == 1 and padded and sympy.expand(product(of_dim) - start - length) == 0
    if not to_the_end and (moving or call.padded(end)):  # guard: proof_replaced_slice
        raise call.refuse(f"writes padding to dimension {dim}, or ends at a padded size", length)


RULES: dict[str, PaddingRule] = {
    **aten(_slice, "slice"),
    **aten(_narrow, "narrow"),
    **aten(_select, "select"),
    **aten(
        _split, "split split_with_sizes unsafe_split unsafe_split_with_sizes unbind chunk unsafe_chunk tensor_split"
    ),
    **aten(_cat, "cat stack"),
    **prims(_cat, "cat"),
    **aten(_constant_pad, "constant_pad_nd"),
    **aten(_scattered, "slice_scatter select_scatter"),
}
