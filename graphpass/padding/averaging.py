"""Rewrites of operators that average entries along a padded dimension: sums over the real entries, by their number.

In float32 at least, as the operators compute. A variance is that of two passes: the mean is subtracted, and padding is
zero again before the squares are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from graphpass.padding import combining
from graphpass.padding.making import Making, Operands, need
from graphpass.padding.program import RESULTS, Ref
from graphpass.padding.sizes import product
from graphpass.padding.values import Size, TensorShape


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


class _Entries:
    """The real entries of a value along some dimensions."""

    def __init__(self, making: Making, ref: Ref, dims: Sequence[int], wide: torch.dtype) -> None:
        self.making, self.ref, self.dims, self._wide = making, ref, tuple(dims), wide
        factors = making.value(ref).factors
        self.shape = replace(making.shape_of(ref), dtype=wide)
        sizes = (1 if dim in self.dims else size for dim, size in enumerate(self.shape.sizes))
        self.rows = TensorShape(tuple(sizes), wide)
        self.number = product(tuple(size for dim in self.dims for size in factors[dim]))

    def averaged(self, ref: Ref, rows: TensorShape, less: int = 0, *, keepdim: bool = True) -> Ref:
        """The sum over the dimensions by the number of entries, which may be less than those that are summed."""
        making = self.making
        filled = making.filled(ref, making.places(ref, self.dims), 0)
        # guard: made_fewer_than_summed
        number: Size = self.number if not less else sympy.Max(self.number - less, 0)
        count = making.real(number, TensorShape((), self._wide))
        arguments: dict[str, Any] = {"self": filled, "dim": self.dims, "keepdim": keepdim, "dtype": self._wide}
        total = making.emit("aten::sum.dim_IntList", rows, **arguments)
        making.inserted("the real number of entries", self.number, replace(rows, sizes=()))
        return making.emit("aten::div.Tensor", rows, self=total, other=count)

    def moments(self, less: int = 0) -> tuple[Ref, Ref]:
        """The variance and the mean."""
        making, mean = self.making, self.averaged(self.ref, self.rows)
        centred = making.emit("aten::sub.Tensor", self.shape, self=self.ref, other=mean, alpha=1)
        zeroed = making.filled(centred, making.places(centred, self.dims), 0)
        squares = making.emit("aten::mul.Tensor", self.shape, self=zeroed, other=zeroed)
        return self.averaged(squares, self.rows, less), mean


def mean(operands: Operands) -> Ref:
    """The sum, divided by the real number of entries."""
    call, ref, shape = operands.call, operands.ref("self"), operands.shape
    need(shape.dtype.is_floating_point)
    entries = _Entries(operands.making, ref, combining.named_dims(call, call.tensor("self")), _wide(shape.dtype))
    rows = replace(shape, dtype=_wide(shape.dtype))
    made = entries.averaged(ref, rows, keepdim=bool(call.argument("keepdim", default=False)))
    return operands.making.cast(made, shape.dtype)


def variance(operands: Operands) -> Ref:
    """``var``, alone or with the mean."""
    call, making, ref = operands.call, operands.making, operands.ref("self")
    shapes, correction = call.shapes, call.argument("correction", default=1)
    correction = 1 if correction is None else correction
    dtype = making.shape_of(ref).dtype
    need(dtype.is_floating_point and correction == int(correction) and "unbiased" not in call.arguments)
    dims = combining.named_dims(call, call.tensor("self"))
    moments = _Entries(making, ref, dims, _wide(dtype)).moments(int(correction))
    results = []
    for of_rows, shape in zip(moments, shapes, strict=False):
        part = of_rows
        if not call.argument("keepdim", default=False):
            part = making.emit(
                "aten::squeeze.dims", replace(shape, dtype=_wide(shape.dtype)), self=part, dim=tuple(dims)
            )
        results.append(making.cast(part, shape.dtype))
    return results[0] if len(shapes) == 1 else _several(operands, dict(enumerate(results)))


def _several(operands: Operands, parts: dict[int, Ref]) -> Ref:
    """Results of an operator that has several; others are not read."""
    shapes = operands.node.result
    assert isinstance(shapes, tuple), "the operator has several results"
    refs = tuple(parts.get(at) for at in range(len(shapes)))
    return operands.making.emit(RESULTS, shapes, results=refs)


def bags(operands: Operands) -> Ref:
    """A bag for each row of ids: the rows of the table that they name, summed or averaged or the greatest of them."""
    call, making, table, ids = (operands.call, operands.making, *map(operands.ref, ("weight", "indices")))
    named, skipped = call.tensor("indices"), call.argument("padding_idx", default=-1)
    is_plain = call.argument("offsets") is None and call.argument("per_sample_weights") is None and skipped == -1
    need(is_plain and named.rank == 2)  # guard: made_bags
    shape, mode = call.shapes[0], call.argument("mode")
    sizes = (*making.shape_of(ids).sizes, shape.sizes[1])
    rows = making.emit("aten::embedding", replace(shape, sizes=sizes), weight=table, indices=ids, padding_idx=-1)
    if mode == 1:
        of_bags = _Entries(making, rows, [1], _wide(shape.dtype))
        made = of_bags.averaged(rows, replace(shape, dtype=of_bags.shape.dtype), keepdim=False)
    else:
        fill = -math.inf if mode == 2 else 0
        made = making.filled(rows, making.places(rows, [1]), fill)
        op = "aten::amax" if mode == 2 else "aten::sum.dim_IntList"
        made = making.emit(op, shape, self=made, dim=(1,), keepdim=False)
    return _several(operands, {0: making.cast(made, shape.dtype)})


def averaged_windows(operands: Operands) -> Ref:
    """The sum in each window by the number of its real entries, where the padding of a window does not count."""
    call, making, ref = operands.call, operands.making, operands.ref("self")
    value, shape, given = call.tensor("self"), operands.shape, dict(operands.node.arguments)
    need("divisor_override" in given and not (given.get("count_include_pad", True) and any(given["padding"] or (0,))))
    dims = list(combining.positions(call, value))
    sizes = tuple(size if dim in dims else 1 for dim, size in enumerate(making.shape_of(ref).sizes))
    ones = making.emit("aten::full", TensorShape(sizes, shape.dtype), size=sizes, fill_value=1.0, dtype=shape.dtype)
    windows = []
    for one in (ref, ones):
        filled = making.filled(one, making.places(one, dims), 0)
        of_one = (size if dim in dims or one is ref else 1 for dim, size in enumerate(shape.sizes))
        arguments = {**given, "self": filled, "divisor_override": 1}
        windows.append(making.emit(operands.node.op, replace(shape, sizes=tuple(of_one)), **arguments))
    making.inserted(
        "the real number of entries in each window", value.factors[dims[-1]][0], replace(shape, sizes=sizes)
    )
    return making.emit("aten::div.Tensor", shape, self=windows[0], other=windows[1])
