"""Padded inputs of one graph: buffers that graphs read in place, and how a call fills them.

Each padded input has one flat tensor, as large as its largest key so far, and the buffer of a key is a view of the
tensor's start. The views are static inputs of the graphs, so no staging copy follows: filling a buffer writes real
entries and padding directly to where the graph reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass.graphsizes import Expression, InputLayout, Sizes, symbols_in, value_at
from graphpass.compat import memory
from graphpass.padrules import PaddingParts, PadRule, fill_by_function, fill_parts, padding_parts

__all__ = ["PaddedInput", "PaddedMemory", "dense_strides", "layout_numbers"]


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """One input at one key, for calls of one real size.

    Attributes:
        position: of the input.
        buffer: the tensor that the graph reads, at the key's sizes.
        real: the view of the buffer at the call's sizes.
        rule: how the rest of the buffer is filled.
        is_written: whether the graph writes to the input.
    """

    position: int
    buffer: torch.Tensor
    real: torch.Tensor
    rule: PadRule
    is_written: bool
    _rows: tuple[int, torch.Tensor] | None
    _parts: PaddingParts

    @classmethod
    def of(
        cls, position: int, buffer: torch.Tensor, real_shape: Sequence[int], rule: PadRule, *, is_written: bool
    ) -> PaddedInput:
        """A padded input in ``buffer``, whose entries beyond ``real_shape`` are padding."""
        real, rows = buffer, None
        real_sizes = {dim: size for dim, size in enumerate(real_shape) if size != buffer.shape[dim]}
        for dim, size in real_sizes.items():
            real = real.narrow(dim, 0, size)
            if rule == "repeat" and len(real_sizes) == 1:
                rows = (dim, torch.arange(buffer.shape[dim], device=buffer.device).clamp_(max=size - 1))
        parts = () if callable(rule) else padding_parts(buffer, real_sizes, rule)
        return cls(position, buffer, real, rule, is_written, rows, parts)

    def fill(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the real part, and fill the padding.

        Raises:
            ShapeError: a padding function returned another shape.
        """
        if self._rows is not None:  # real part and padding in one launch
            torch.index_select(value, *self._rows, out=self.buffer)
        elif callable(self.rule):
            fill_by_function(self.buffer, value, self.rule, name=f"input {self.position}")
        else:
            self.real.copy_(value)
            fill_parts(self._parts)  # guard: padding_filled_in_every_call


@dataclass(slots=True)
class PaddedMemory:
    """Owns the buffers of all padded inputs of one graph."""

    _flat: dict[int, torch.Tensor] = field(default_factory=dict)
    _views: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)

    def view(self, position: int, layout: InputLayout, sizes: Sizes, like: torch.Tensor) -> torch.Tensor:
        """The buffer of an input at a key's sizes: the same tensor in every call.

        Args:
            position: of the input.
            layout: of the input.
            sizes: the key's sizes.
            like: a tensor with the dtype and device of the input.
        """
        shape = tuple(value_at(size, sizes) for size in layout.shape)
        view = self._views.get((position, shape))
        if view is None:
            view = self._views[position, shape] = self._new_view(position, layout, shape, like)
        return view

    def _new_view(self, position: int, layout: InputLayout, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            flat = self._flat.get(position)
            if flat is None or flat.numel() < math.prod(shape):
                flat = torch.zeros(math.prod(shape), dtype=like.dtype, device=like.device)
                self._flat[position] = flat
            view = flat.as_strided(shape, dense_strides(shape, layout.order))
        memory.mark_static_address(view)
        return view

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.nbytes for flat in self._flat.values())

    def clear(self) -> None:
        """Drop the buffers; graphs that still use one keep it alive."""
        self._flat.clear()
        self._views.clear()


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps; ``order`` lists the dimensions by ascending stride."""
    strides, reach = [0] * len(shape), 1
    for dim in order:
        strides[dim] = reach
        reach *= shape[dim]
    return tuple(strides)


def layout_numbers(
    layouts: Mapping[int, InputLayout], positions: Sequence[int], sizes: Sizes, numbers: Mapping[int, Expression]
) -> dict[int, int] | InputLayout:
    """Values of the layout numbers for dense buffers.

    Args:
        layouts: {position: layout} of the tensor inputs.
        positions: of the padded inputs.
        sizes: the key's sizes.
        numbers: {position: expression} of the ints among the inputs.

    Returns:
        {position: value} of the layout numbers; or the layout of an input whose traced strides no dense buffer has.
    """
    values: dict[Any, int] = {}
    for position in positions:
        layout = layouts[position]
        shape = [value_at(size, sizes) for size in layout.shape]
        expected = [*zip(layout.strides, dense_strides(shape, layout.order), shape, strict=True), (layout.offset, 0, 2)]
        for traced, actual, size in expected:
            unknown = symbols_in([traced]) - sizes.keys() - values.keys()
            if size <= 1:
                continue
            if unknown and traced not in unknown:
                return layout
            if unknown:
                values[traced] = actual
            elif value_at(traced, {**sizes, **values}) != actual:
                return layout
    return {position: values[expression] for position, expression in numbers.items() if expression in values}
