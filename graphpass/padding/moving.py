"""Rewrites of operators that move entries: each entry of the result is picked at its real place.

The place is an expression over the real sizes and the index in the result. So whatever an operator does with places,
such as a view that cuts through a padded size, becomes one index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from graphpass.compat import symbolic
from graphpass.padding.making import Making, Operands, is_computed, need
from graphpass.padding.neutral import INDEX, REAL_ORDER, REAL_SIZE
from graphpass.padding.program import GETITEM, RESULTS, Ref
from graphpass.padding.sizes import is_zero_size, product
from graphpass.padding.values import PaddedValue, Size, TensorShape

_AT = INDEX[0]  # the index in a dimension that replaces one


def selected(operands: Operands) -> Ref:
    """An entry counted from the end of a padded dimension, or by a padded size."""
    call, making, index = operands.call, operands.making, operands.call.argument("index")
    need(not isinstance(index, PaddedValue))
    value = call.tensor("self")
    dim = call.dim(call.argument("dim"), value.rank)
    from_end = isinstance(index, int) and index < 0  # guard: made_last_entry
    place = product(value.factors[dim]) + index if from_end else index
    entry = making.picked(operands.ref("self"), dim, [place], [1])
    return making.emit("aten::squeeze.dim", operands.shape, self=entry, dim=dim)


def sliced(operands: Operands) -> Ref:
    """Entries counted from the end of a padded dimension, or by a padded size; not where the ends of it cut them."""
    call = operands.call
    value, step = call.tensor("self"), call.argument("step", default=1)
    dim = call.dim(call.argument("dim", default=0), value.rank)
    whole = product(value.factors[dim])
    start, end = call.argument("start"), call.argument("end")
    first, last = (whole + at if isinstance(at, int) and at < 0 else at for at in (start or 0, end))
    last = whole if last in (None, sys.maxsize) else last
    need(isinstance(step, int))
    length = operands.shape.sizes[dim]
    steps = last - first if step == 1 else symbolic.floor_div(last - first + step - 1, step)
    need(is_zero_size(steps - length))  # guard: made_slice
    return operands.making.picked(operands.ref("self"), dim, [first + step * _AT], [length])


def flipped(operands: Operands) -> Ref:
    """Entries in the other order, from the last real one on."""
    return _along_dims(operands, operands.call.argument("dims"), lambda at, size: size - 1 - _AT)


def rolled(operands: Operands) -> Ref:
    """Entries that leave at the real end come in at the front."""
    shifts, dims = operands.call.argument("shifts"), operands.call.argument("dims", default=())
    need(len(dims) == len(shifts))
    return _along_dims(operands, dims, lambda at, size: sympy.Mod(_AT - shifts[at], size))


def _along_dims(operands: Operands, dims: Sequence[int], place: Callable[[int, Any], Any]) -> Ref:
    """The operand with entries at other places along some dimensions, each as long as before."""
    making, value = operands.making, operands.call.tensor("self", "a")
    ref = operands.ref("self" if "self" in operands.call.arguments else "a")
    need(dims)
    for at, dim in enumerate(operands.call.dim(dim, value.rank) for dim in dims):
        size = product(value.factors[dim])
        ref = making.picked(ref, dim, [place(at, size)], [size])
    return ref


def repeated(place: Any, size: Any) -> Any:
    """The same, where the first and last are repeated."""
    return sympy.Min(sympy.Max(place, 0), size - 1)


def counted(operands: Operands) -> Ref:
    """Numbers that start or step by a padded size."""
    call, shape = operands.call, operands.shape
    start, step = call.argument("start", default=0), call.argument("step", default=1)
    step = int(step) if isinstance(step, float) and step.is_integer() else step
    is_whole = all(isinstance(number, (int, sympy.Basic)) and is_computed(number) for number in (start, step))
    is_exact = not shape.dtype.is_floating_point or shape.dtype.itemsize >= 4  # guard: made_numbers_are_exact
    need(is_whole and is_exact and type(start).__name__ != "ToFloat")
    operands.making.inserted("the real numbers", shape.sizes[0], shape)
    return operands.making.emit(REAL_SIZE, shape, size=start + step * _AT, counted=None)  # guard: made_ranges_apart


def _places(flat: Any, sizes: Sequence[Size]) -> list[Any]:
    """The index along each of some dimensions, from the one in the order of all their entries."""
    places = []
    for at, size in enumerate(sizes):
        place = symbolic.floor_div(flat, product(tuple(sizes[at + 1 :])))
        places.append(sympy.Mod(place, size, evaluate=False) if at else place)
    return places


def viewed(operands: Operands) -> Ref:
    """A view that cuts through padded sizes: each entry at its place in the order of the real ones."""
    call, shape = operands.call, operands.shape
    need("dtype" not in call.arguments)
    before = [product(of_dim) for of_dim in call.tensor("self").factors]
    after = list(shape.sizes)
    first = next((at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), 0)
    while before[first:] and after[first:] and is_zero_size(before[-1] - after[-1]):
        before.pop(), after.pop()
    old, new = before[first:], after[first:]
    need(old and len(new) <= len(INDEX) and is_zero_size(product(tuple(old)) - product(tuple(new))))
    flat: Any = sum(index * product(tuple(new[at + 1 :])) for at, index in zip(range(len(new)), INDEX, strict=False))
    return operands.making.picked(operands.ref("self"), first, _places(flat, old), new)


def _from_place_on(making: Making, place: Any, dim: int, shape: TensorShape, inside: Ref, outside: Ref) -> Ref:
    """``inside`` where the place is at least 0, else ``outside``."""
    behind = [1] * (len(shape.sizes) - 1 - dim)
    at = making.real(place, TensorShape((shape.sizes[dim], *behind), torch.int64))
    is_inside = making.emit("aten::ge.Scalar", replace(making.shape_of(at), dtype=torch.bool), self=at, other=0)
    return making.emit("aten::where.self", shape, condition=is_inside, self=inside, other=outside)


def joined(operands: Operands) -> Ref:
    """Each part begins where the real entries of the one before it end."""
    call, making, shape = operands.call, operands.making, operands.shape
    dim = call.dim(call.argument("dim", default=0), len(shape.sizes))
    start = sympy.Integer(0)
    result: Ref | None = None
    for number in range(len(call.argument("tensors"))):
        ref = operands.ref("tensors", number)
        value = making.value(ref)
        # guard: made_parts_of_one_type
        need(value.rank == len(shape.sizes) and value.dtype is shape.dtype and value.factors[dim] != (0,))
        of_dim, size, length = value.factors[dim], product(value.factors[dim]), shape.sizes[dim]
        if len(of_dim) > 1:
            sizes = making.shape_of(ref).sizes
            apart = (*sizes[:dim], *of_dim, *sizes[dim + 1 :])
            ref = making.emit("aten::view", replace(making.shape_of(ref), sizes=apart), self=ref, size=apart)
        part = making.picked(ref, dim, _places(repeated(_AT - start, size), of_dim or (1,)), [length])
        result = part if result is None else _from_place_on(making, _AT - start, dim, shape, part, result)
        start = start + size
    assert result is not None, "at least one tensor is joined"
    return result


def replaced_part(operands: Operands) -> Ref:
    """Entries between two real places come from another tensor."""
    call, making, shape = operands.call, operands.making, operands.shape
    ref, source = operands.ref("self"), operands.ref("src")
    need(call.argument("step", default=1) == 1)
    dim = call.dim(call.argument("dim", default=0), len(shape.sizes))
    whole = shape.sizes[dim]
    first = call.argument("index", "start") or 0
    first = whole + first if isinstance(first, int) and first < 0 else first
    if "index" in call.arguments:
        sizes = making.shape_of(source).sizes
        one = replace(making.shape_of(source), sizes=(*sizes[:dim], 1, *sizes[dim:]))
        source = making.emit("aten::unsqueeze", one, self=source, dim=dim)
    length = making.shape_of(source).sizes[dim]
    part = making.picked(source, dim, [repeated(_AT - first, length)], [whole])
    is_inside = sympy.Min(_AT - first, first + length - 1 - _AT)
    return _from_place_on(making, is_inside, dim, shape, part, ref)


def ordered(operands: Operands) -> Ref:
    """``sort``, and ``topk`` as the first entries of one: padding comes last."""
    call, making, ref = operands.call, operands.making, operands.ref("self")
    value, shapes = call.tensor("self"), call.shapes
    dim = call.dim(call.argument("dim", default=-1), value.rank)
    of_dim, count = value.factors[dim], call.argument("k")
    need(len(of_dim) == 1 and not isinstance(count, sympy.Basic))
    descending = bool(call.argument("descending", "largest", default=False))
    whole = making.shape_of(ref)
    both = (whole, replace(whole, dtype=torch.int64))
    made = making.emit(REAL_ORDER, both, self=ref, dim=dim, size=of_dim[0], descending=descending)
    making.inserted("padding behind all real entries", of_dim[0], whole)
    if count is None:
        return made
    parts = []
    for at, (shape, of_all) in enumerate(zip(shapes, both, strict=True)):
        part = making.emit(GETITEM, of_all, of=made, at=at)
        part = making.emit("aten::slice.Tensor", shape, self=part, dim=dim, start=0, end=count, step=1)
        # The graph's views are those of a result without gaps.
        parts.append(making.emit("aten::clone", shape, self=part, memory_format=torch.contiguous_format))
    return making.emit(RESULTS, shapes, results=tuple(parts))
