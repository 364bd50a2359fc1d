"""Rules of the operators that a graph gets where its padding is made. See Note [Padding made].

They exist in records only; :mod:`graphpass.padding.lowering` writes them as operators of torch.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from graphpass.padding.opcall import OpCall
from graphpass.padding.sizes import product
from graphpass.padding.values import Approximate, Pad, PaddedValue, cast_pad

NEUTRAL = "graphpass::neutral"
"""``self`` with ``fill`` in the padding of one factor of ``dim``: that of ``size``, with ``inner`` entries inside."""

REAL_SIZE = "graphpass::real_size"
"""The real value of an expression over sizes, for each entry of a tensor: its index is among the symbols, too."""

REAL_ORDER = "graphpass::real_order"
"""``self`` sorted along ``dim`` of ``size``, equal entries in their order and padding last; and where entries were."""

KEYS = "graphpass::attention_to_keys"
"""Attention without a mask to the first entries of ``key`` and ``value`` along a dimension of ``size``: the real ones.

The kernel is given their number, so it reads nothing behind them.
"""

INDEX = tuple(sympy.Symbol(f"index_{dim}", integer=True, nonnegative=True) for dim in range(6))
"""The index of an entry of the result along each dimension, in such an expression."""

REAL_INDEX = "graphpass::real_index"
"""Indices into a dimension of ``size`` as they count in the run at the real sizes, where it is shorter.

With ``is_longer`` they index a dimension that has one entry more, which no index but one in padding names.
"""


def neutral(call: OpCall) -> PaddedValue:
    """Real entries stay as they are only if the real size that decides is that of exactly this factor."""
    value, dim = call.tensor("self"), call.argument("dim")
    size, inner, is_outermost = (call.argument(name) for name in ("size", "inner", "is_outermost"))
    if not call.padded(size):
        return value
    if call.asks_independence:
        raise call.refuse(f"real entries of dimension {dim} are taken to be the first", size)
    of_dim = value.factors[dim]
    matching = [
        at
        for at, factor in enumerate(of_dim)
        # guard: made_at_its_place
        if factor == size and product(of_dim[at + 1 :]) == inner and is_outermost == (at == 0)
    ]
    if not matching:
        raise call.refuse(f"the padding of a factor {size} is filled in a dimension of factors {list(of_dim)}", size)
    place, held = (dim, matching[0]), held_after(call.argument("fill"), value.dtype or call.shape.dtype)
    pads = {other: value.pad_at(other) for other in call.places(value)}
    whole = {other for other in value.whole if pads[other] is not None and pads[other] == held}
    made = replace(value, index=None, constant=None).with_pads({**pads, place: held})
    return replace(made, whole=frozenset({*whole, place}))


def held_after(fill: float | int | bool | sympy.Basic, dtype: torch.dtype) -> Pad | None:
    """What padding holds that is filled with a number, or with the size of the dimension that it indexes."""
    return Approximate.BEHIND if isinstance(fill, sympy.Basic) else cast_pad(fill, dtype)


def real_size(call: OpCall) -> PaddedValue:
    """A number of the run at the real sizes; it depends on how many entries there are."""
    size = call.argument("size")
    if call.asks_independence and call.padded(size):
        raise call.refuse(f"it counts the entries of {size}", size)
    counted = call.argument("counted")
    return replace(call.fresh(), counted=counted)


def real_order(call: OpCall) -> tuple[PaddedValue, PaddedValue]:
    """Real entries come first, so the places are those of real ones."""
    value, dim, size = call.tensor("self"), call.argument("dim"), call.argument("size")
    if call.asks_independence or value.factors[dim] != (size,):
        raise call.refuse(f"sorts the dimension {dim} of {list(value.factors[dim])}", size)
    return PaddedValue(value.factors), PaddedValue(value.factors, counted=size)


def real_index(call: OpCall) -> PaddedValue:
    """Real indices select the entries that they select in the run at the real sizes, or none exists in either."""
    value, size = call.tensor("self"), call.argument("size")
    if not call.padded(size) and not call.argument("is_longer"):
        return value
    if call.asks_independence and call.padded(size):
        raise call.refuse(f"real entries of {size} are taken to be the first", size)
    return replace(value.with_pads({}), index=None, constant=None, counted=size)
