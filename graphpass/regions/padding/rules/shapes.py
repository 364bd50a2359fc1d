"""Operators that rearrange entries: views, permutations, expansions, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpass.regions.padding.calls import OpCall, PaddingRule
from graphpass.regions.padding.rules.pointwise import broadcast
from graphpass.regions.padding.rules.tables import aten, prims
from graphpass.regions.padding.sizes import Regrouping, product
from graphpass.regions.padding.values import Factors, IndexAlong, Pad, PaddedValue, Place, Size, blurred, either

__all__ = ["RULES", "permuted", "regrouped", "without_dims"]


def regrouped(call: OpCall, value: PaddedValue, shape: Sequence[Size]) -> PaddedValue:
    """``value`` viewed with the sizes ``shape``.

    Raises:
        Unknown: the view cuts through a padded factor.
    """
    if value.constant is not None or any(size == 0 for size in shape):
        return PaddedValue(call.sizes.one_each(shape), constant=value.constant)
    walk = Regrouping(call.sizes, value.factors)
    factors: list[Factors] = []
    places: dict[Place, Place] = {}
    for dim, size in enumerate(shape):
        of_dim = walk.take(call.sizes.renamed(size))
        if of_dim is None:
            raise call.refuse(f"a view of factors {_text(value)} as {list(shape)} cuts through a padded one")
        merged: list[Size] = []
        for factor, was in of_dim:
            if was is not None:
                places[was] = (dim, len(merged))
                merged.append(factor)
            elif merged and not call.padded(merged[-1]):
                merged[-1] = product((merged[-1], factor))
            else:
                merged.append(factor)
        factors.append(tuple(merged))
    if not walk.finished():
        raise call.refuse(f"a view of factors {_text(value)} as {list(shape)} cuts through a padded one")
    result = PaddedValue(tuple(factors))
    index = value.index
    if index is not None:
        at = places.get(index[:2])
        whole = at is not None and result.factors[at[0]][at[1]] == value.factors[index.dim][index.factor]
        index = IndexAlong(*at, index.offset) if at is not None and whole else None
    pads = {places[was]: pad for was, pad in value.padding if was in places}
    return replace(result.with_pads(pads), index=index)


def _text(value: PaddedValue) -> str:
    return str([list(of_dim) for of_dim in value.factors])


def _view(call: OpCall) -> PaddedValue:
    return regrouped(call, call.tensor("self", "a", "input"), call.shape.sizes)


def _view_as_type(call: OpCall) -> PaddedValue:
    """``view`` with other sizes, or with another dtype of the same width."""
    if "dtype" not in call.arguments:
        return _view(call)
    value = call.tensor("self")
    call.unpadded(value, [value.rank - 1] if value.rank else [], "reinterprets the bytes of")
    return PaddedValue((*value.factors[:-1], *call.fresh().factors[-1:])) if value.rank else call.fresh()


def permuted(value: PaddedValue, order: Sequence[int]) -> PaddedValue:
    """``value`` with its dimensions in ``order``."""
    to = {dim: position for position, dim in enumerate(order)}
    index = value.index._replace(dim=to[value.index.dim]) if value.index is not None else None
    pads = {(to[dim], at): pad for (dim, at), pad in value.padding}
    return replace(value, factors=tuple(value.factors[dim] for dim in order), index=index).with_pads(pads)


def _permute(call: OpCall) -> PaddedValue:
    value = call.tensor("self", "a")
    return permuted(value, [call.dim(dim, value.rank) for dim in call.argument("dims", "permutation")])


def _transpose(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    order = list(range(value.rank))
    first, second = (call.dim(call.argument(name, default=at), value.rank) for at, name in ((0, "dim0"), (1, "dim1")))
    if value.rank > 1:
        order[first], order[second] = order[second], order[first]
    return permuted(value, order)


def _movedim(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    sources, targets = (
        [call.dim(dim, value.rank) for dim in (dims if isinstance(dims, tuple) else (dims,))]
        for dims in (call.argument("source"), call.argument("destination"))
    )
    order: list[int | None] = [None] * value.rank
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    left = iter(dim for dim in range(value.rank) if dim not in sources)
    return permuted(value, [next(left) if dim is None else dim for dim in order])


def _expand(call: OpCall) -> PaddedValue:
    value = call.tensor("self", "a")
    if call.name == "broadcast_in_dim":
        at = call.argument("broadcast_dimensions")
        spread: list[Factors] = [()] * len(call.shape.sizes)
        for dim, target in enumerate(at):
            spread[target] = value.factors[dim]
        moved = {(at[dim], place): pad for (dim, place), pad in value.padding}
        index = value.index._replace(dim=at[value.index.dim]) if value.index is not None else None
        value = replace(value, factors=tuple(spread), index=index).with_pads(moved)
    offset = len(call.shape.sizes) - value.rank
    wanted = call.fresh().factors
    factors = tuple(
        value.factors[dim - offset] if dim >= offset and value.factors[dim - offset] else of_dim
        for dim, of_dim in enumerate(wanted)
    )
    return broadcast(call, value, factors)


def without_dims(value: PaddedValue, dims: Sequence[int], *, keepdim: bool) -> PaddedValue:
    """``value`` without ``dims``, or with size 1 in them if ``keepdim``."""
    remaining = [dim for dim in range(value.rank) if keepdim or dim not in dims]
    to = {dim: position for position, dim in enumerate(remaining)}
    factors = tuple(() if dim in dims else value.factors[dim] for dim in remaining)
    pads = {(to[dim], at): pad for (dim, at), pad in value.padding if dim in to and dim not in dims}
    index = value.index
    if index is not None:
        index = None if index.dim in dims else index._replace(dim=to[index.dim])
    return replace(value, factors=factors, index=index).with_pads(pads)


def _repeat(call: OpCall) -> PaddedValue:
    """``repeat``: each dimension gets the number of repetitions as its outermost factor."""
    value, repeats = call.tensor("self"), call.argument("repeats", "dims")
    factors = ((),) * (len(call.shape.sizes) - value.rank) + value.factors
    offset = len(factors) - value.rank
    repeats = (1,) * (len(factors) - len(repeats)) + tuple(repeats)
    result: list[Factors] = []
    to: dict[Place, Place] = {}
    for dim, (of_dim, times) in enumerate(zip(factors, repeats, strict=True)):
        whole: list[Size] = list(call.sizes.merged([times]))
        for at, size in enumerate(of_dim):
            if call.padded(size) or not whole or call.padded(whole[-1]):
                whole.append(size)
            else:
                whole[-1] = product((whole[-1], size))
            to[dim - offset, at] = (dim, len(whole) - 1)
        result.append(tuple(whole))  # guard: proof_repeated_order
    pads = {to[place]: pad for place, pad in value.padding}
    return replace(PaddedValue(tuple(result)).with_pads(pads), constant=value.constant)


def _triangle(call: OpCall) -> PaddedValue:
    """``tril`` and ``triu``: entries above or below a diagonal become zero."""
    value, diagonal = call.tensor("self"), call.argument("diagonal", default=0)
    row, col = value.rank - 2, value.rank - 1
    if not isinstance(diagonal, int):
        raise call.refuse(f"the padded size {diagonal} is a diagonal", diagonal)
    for dim in (row, col):
        if not call.sizes.is_prefix(value.factors[dim]):
            raise call.refuse(f"a triangle over the factors {list(value.factors[dim])}", value.factors[dim][-1])
    square = len(value.factors[row]) == 1 and value.factors[row] == value.factors[col]
    pads: dict[Place, Pad | None] = {}
    for place in call.places(value):
        pad = value.pad_at(place)
        beyond = {row: -1, col: 1}.get(place[0]) if square else None  # guard: proof_triangle_side
        if beyond is not None and _drops(call.name, diagonal, beyond):
            pads[place] = 0
        elif beyond is not None and _keeps(call.name, diagonal, beyond):
            pads[place] = pad
        else:
            pads[place] = either(pad, 0.0)
    return PaddedValue(value.factors).with_pads(pads)


def _drops(name: str, diagonal: int, beyond: int) -> bool:
    """Whether a triangle drops every entry whose column minus row is at least 1, or at most -1."""
    return (
        # guard: proof_triangle_diagonal
        diagonal <= 0 if (name, beyond) == ("tril", 1) else diagonal >= 0 if (name, beyond) == ("triu", -1) else False
    )


def _keeps(name: str, diagonal: int, beyond: int) -> bool:
    """Whether a triangle keeps every entry whose column minus row is at least 1, or at most -1."""
    return (
        diagonal >= -1 if (name, beyond) == ("tril", -1) else diagonal <= 1 if (name, beyond) == ("triu", 1) else False
    )


def _as_complex(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    call.unpadded(value, [value.rank - 1], "makes complex numbers of")
    pads = {place: blurred(pad) for place, pad in value.padding}
    return without_dims(PaddedValue(value.factors).with_pads(pads), [value.rank - 1], keepdim=False)


def _as_real(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    return PaddedValue((*value.factors, (2,))).with_pads({place: blurred(pad) for place, pad in value.padding})


def _diagonal(call: OpCall) -> PaddedValue:
    value = call.tensor("self")
    dims = [call.dim(call.argument(name), value.rank) for name in ("dim1", "dim2")]
    call.no_padded_numbers()
    call.unpadded(value, dims, "takes a diagonal of")
    rest = without_dims(value, dims, keepdim=False)
    return replace(rest, factors=(*rest.factors, call.fresh().factors[-1]), index=None)


RULES: dict[str, PaddingRule] = {
    **aten(_view_as_type, "view"),
    **aten(_view, "reshape _unsafe_view _reshape_alias view_copy flatten unflatten squeeze unsqueeze"),
    **prims(_view, "reshape squeeze split_dim collapse_view"),
    **aten(_permute, "permute"),
    **prims(_permute, "transpose"),
    **aten(_transpose, "transpose t"),
    **aten(_movedim, "movedim"),
    **aten(_expand, "expand"),
    **prims(_expand, "broadcast_in_dim"),
    **aten(_repeat, "repeat"),
    **aten(_triangle, "tril triu"),
    **aten(_as_complex, "view_as_complex"),
    **aten(_as_real, "view_as_real"),
    **aten(_diagonal, "diagonal"),
}
