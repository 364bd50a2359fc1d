"""Cuts the outputs of a padded replay to the real sizes.

The real prefix of each tensor in the pool is copied, with the strides that the graph returns at the real sizes. Outputs
that share a storage share one in the copies too. Views of inputs become views of the caller's tensors. Numbers are
computed from the real sizes. An output whose size depends on data is returned whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from cgpass.graphsizes import Expression, GraphSizes, OutputNumber, OutputTensor, Sizes, symbols_in, value_at
from graphpass.capture.outputs import clone_pool_tensors, view_of

__all__ = ["OutputCuts", "cuts_of", "prefix"]


def prefix(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of the first ``shape`` entries of each dimension."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


@dataclass(frozen=True, slots=True)
class _TensorCut:
    """One tensor at the real sizes.

    Attributes:
        index: of the output.
        shape: real size of each dimension.
        strides: in elements.
        offset: in elements, from the lowest offset of the group.
        is_plain: whether shape and strides are contiguous.
    """

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_plain: bool

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The real part of the replay's output."""
        return prefix(output, self.shape)

    def copied(self, output: torch.Tensor) -> torch.Tensor:
        """A copy of the real part, for the caller to own."""
        real = self.of(output)
        if self.is_plain:
            return real.clone(memory_format=torch.contiguous_format)
        return _filled(torch.empty_strided(self.shape, self.strides, dtype=real.dtype, device=real.device), real)


@dataclass(frozen=True, slots=True)
class _View:
    """An output that is the input at ``position``, or a view of it that starts ``offset`` elements after its start."""

    index: int
    position: int
    is_input: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, args: Sequence[Any]) -> torch.Tensor:
        """The same view of the caller's tensor."""
        owner: torch.Tensor = args[self.position]
        return owner if self.is_input else view_of(owner, self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class OutputCuts:
    """How to cut the flat outputs of one key for calls of one real size.

    Attributes:
        tensors: groups of outputs that share a storage.
        views: outputs that are inputs or views of inputs.
        numbers: {index: value}.
        whole: indices of the outputs that data decide; no padded size occurs in them.
    """

    tensors: tuple[tuple[_TensorCut, ...], ...]
    views: tuple[_View, ...]
    numbers: Mapping[int, int | float | bool]
    whole: Collection[int]

    def real_parts(self, outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        """{index: view of the real part} of every output tensor in the graph's memory."""
        cut = {cut.index: cut.of(outputs[cut.index]) for group in self.tensors for cut in group}
        return cut | {index: outputs[index] for index in self.whole if isinstance(outputs[index], torch.Tensor)}

    def apply(self, outputs: Sequence[Any], args: Sequence[Any], pool_storages: Collection[int]) -> list[Any]:
        """The flat outputs at the real sizes.

        Args:
            outputs: flat outputs of the replay.
            args: the caller's arguments.
            pool_storages: addresses of the pool storages that the replay has written.
        """
        cut_outputs = list(outputs)
        whole = clone_pool_tensors([outputs[index] for index in self.whole], pool_storages)
        for index, output in zip(self.whole, whole, strict=True):
            cut_outputs[index] = output
        for group in self.tensors:
            if len(group) == 1:
                cut_outputs[group[0].index] = group[0].copied(outputs[group[0].index])
            else:
                for cut, tensor in zip(group, _copied_together(group, outputs), strict=True):
                    cut_outputs[cut.index] = tensor
        for view in self.views:
            cut_outputs[view.index] = view.of(args)  # guard: views_of_the_callers_tensor
        for index, number in self.numbers.items():
            cut_outputs[index] = number  # guard: numbers_of_real_sizes
        return cut_outputs


def _copied_together(group: Sequence[_TensorCut], outputs: Sequence[Any]) -> list[torch.Tensor]:
    first: torch.Tensor = outputs[group[0].index]
    num_elements = max(
        cut.offset + 1 + sum((size - 1) * stride for size, stride in zip(cut.shape, cut.strides, strict=True))
        for cut in group
    )
    memory = torch.empty(num_elements, dtype=first.dtype, device=first.device)
    copies = []
    for cut in group:
        copy = memory.as_strided(cut.shape, cut.strides, cut.offset)
        copies.append(_filled(copy, cut.of(outputs[cut.index])))
    return copies


def _filled(copy: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Write ``real`` to ``copy``, each element once: along an expanded dimension all have one address. Returns it."""
    target = copy
    for dim, (size, stride) in enumerate(zip(copy.shape, copy.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, real = target.narrow(dim, 0, 1), real.narrow(dim, 0, 1)
    target.copy_(real)
    return copy


def cuts_of(graph: GraphSizes, real: Sizes, numbers: Mapping[sympy.Symbol, int]) -> OutputCuts:
    """The cuts at these real sizes.

    Args:
        graph: the graph's outputs.
        real: the real sizes.
        numbers: {symbol: value} of the call's layout numbers, which occur in strides of its inputs.
    """
    known = {**numbers, **real}
    groups: dict[int, list[tuple[int, OutputTensor]]] = {}
    views, values = [], {}
    for index, output in enumerate(graph.outputs):
        if index in graph.by_data:
            continue
        if isinstance(output, OutputNumber):
            values[index] = _number(output, known)
        elif output is not None and output.viewed is None:
            groups.setdefault(output.group, []).append((index, output))
        elif output is not None:
            assert output.viewed is not None
            at = _evaluator(known)
            base = graph.layouts[output.viewed].offset
            shape, strides = tuple(map(at, output.shape)), tuple(map(at, output.strides))
            views.append(_View(index, output.viewed, output.is_input, shape, strides, at(output.offset) - at(base)))
    tensors = tuple(_group(members, known) for members in groups.values())
    return OutputCuts(tensors, tuple(views), values, tuple(graph.by_data))


def _group(members: Sequence[tuple[int, OutputTensor]], known: Sizes) -> tuple[_TensorCut, ...]:
    at = _evaluator(known)
    offsets = [at(output.offset) for _, output in members]
    cuts = []
    for (index, output), offset in zip(members, offsets, strict=True):
        shape, strides = tuple(map(at, output.shape)), tuple(map(at, output.strides))
        cuts.append(_TensorCut(index, shape, strides, offset - min(offsets), _is_contiguous(shape, strides)))
    return tuple(cuts)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


def _evaluator(known: Sizes) -> Callable[[Expression], int]:
    return lambda expression: value_at(expression, known)


def _number(output: OutputNumber, known: Sizes) -> int | float | bool:
    if not symbols_in([output.expression]):
        return output.kind(output.expression)  # type: ignore[no-any-return]
    assert isinstance(output.expression, sympy.Basic)
    value = output.expression.xreplace({symbol: sympy.Integer(size) for symbol, size in known.items()})
    return bool(value) if output.kind is bool else output.kind(value)
