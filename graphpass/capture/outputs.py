"""Builds the outputs of a replay: clones or views of pool memory, and views of the caller's tensors.

Capture classifies each output once: in the memory of an input, in the pool, or a constant (numbers, None).

A later replay overwrites pool memory. To show it, the tape fills stale outputs with values that cannot pass for
results, and ``compare`` reports views that are still alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from graphpass.capture.staging import WIDEST_ELEMENT_BYTES, extent, same_view, storage_id, storage_ids
from graphpass.compat.memory import is_lazy, with_bits_of


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How to build the outputs of one entry after a replay."""

    pool_outputs: tuple[torch.Tensor, ...]  #: the outputs in pool memory, as tensors that do not keep it reserved
    pool_storages: frozenset[int]  #: addresses of the storages they lie in
    viewed_positions: frozenset[int]  #: the inputs that some output is a view of
    _parts: tuple[Any, ...]  # the outputs that are the same in each replay
    #: (index, position of the input, bytes after its start, layout) of the outputs in the memory of an input; without a
    #: layout the output is the input itself
    _views: tuple[tuple[int, int, int, torch.Tensor | None], ...]
    _clone_groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        outputs: Sequence[Any],
        graph_inputs: Sequence[Any],
        without_ownership: Callable[[torch.Tensor], torch.Tensor],
        elsewhere: Collection[int] = (),
    ) -> OutputPlan:
        """Classify each of ``outputs`` by the memory that it is in."""
        owners: dict[int, list[int]] = {}
        for position, leaf in enumerate(graph_inputs):
            if isinstance(leaf, torch.Tensor) and storage_id(leaf):
                owners.setdefault(storage_id(leaf), []).append(position)
        parts: list[Any] = []
        views: list[tuple[int, int, int, torch.Tensor | None]] = []
        in_pool: dict[int, torch.Tensor] = {}
        for index, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                parts.append(output)
            elif storage_id(output) in owners:
                views.append((index, *_view_of_input(output, graph_inputs, owners[storage_id(output)])))
                parts.append(None)
            elif storage_id(output) in elsewhere:
                parts.append(output)
            else:
                parts.append(in_pool.setdefault(id(output), without_ownership(output)))
        storages = storage_ids(in_pool.values())
        return cls(
            pool_outputs=tuple(in_pool.values()),
            pool_storages=storages,
            viewed_positions=frozenset(position for _, position, *_ in views),
            _parts=tuple(parts),
            _views=tuple(views),
            _clone_groups=_groups_by_storage(parts, storages),
        )

    def build(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat outputs of this replay, for the arguments ``leaves``; those in pool memory are always the same."""
        built = list(self._parts)
        for index, position, byte_offset, like in self._views:
            built[index] = leaves[position] if like is None else view_of(leaves[position], like, byte_offset)
        return built

    def for_caller(self, built: Sequence[Any], *, clone: bool) -> list[Any]:
        """``built`` with pool outputs cloned, or as new tensor objects, which the caller may reshape in place."""
        # guard: cloned_outputs
        return _clone_groups(list(built), self._clone_groups) if clone else own_objects(built, self.pool_storages)

    def owning(self, built: list[Any], recorded: Sequence[Any]) -> list[Any]:
        """``built`` with pool outputs replaced by the recording's tensors, which keep their pool memory reserved.

        The capturing call returns these: a region captured later in the same forward reads them.
        """
        return [
            owner if isinstance(owner, torch.Tensor) and storage_id(owner) in self.pool_storages else value
            for value, owner in zip(built, recorded, strict=True)
        ]


def _view_of_input(
    output: torch.Tensor, graph_inputs: Sequence[Any], candidates: Sequence[int]
) -> tuple[int, int, torch.Tensor | None]:
    for candidate in candidates:
        if graph_inputs[candidate] is output:
            return candidate, 0, None
    # Layout only: holding the output itself would keep a parameter's memory alive.
    layout = with_bits_of(torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta"), output)
    # Inputs that share the storage keep their relative offsets (the alias pattern), so any of them can be the base.
    position = candidates[0]
    return position, _first_byte(output) - _first_byte(graph_inputs[position]), layout


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def view_of(tensor: torch.Tensor, like: torch.Tensor, byte_offset: int) -> torch.Tensor:
    """``like``'s shape, strides, dtype and lazy bits over the memory of ``tensor``, ``byte_offset`` after its start.

    A view of the same dtype shares the tensor's base and version counter.
    """
    if tensor.dtype != like.dtype:
        return same_view(tensor, like, byte_offset=_first_byte(tensor) + byte_offset)
    offset = tensor.storage_offset() + byte_offset // tensor.element_size()
    return with_bits_of(tensor.as_strided(like.shape, like.stride(), offset), like)  # guard: lazy_views_of_inputs


def own_objects(outputs: Sequence[Any], pool_storages: Collection[int]) -> list[Any]:
    """``outputs`` with a new tensor object for each in pool memory, which the caller may reshape in place."""
    fresh = {
        id(output): output.detach()  # guard: own_objects
        for output in outputs
        if isinstance(output, torch.Tensor) and storage_id(output) in pool_storages
    }
    return [fresh.get(id(output), output) for output in outputs]


def clone_pool_tensors(outputs: Sequence[Any], pool_storages: Collection[int]) -> list[Any]:
    """``outputs`` with tensors in pool memory cloned: each storage once, with its views rebuilt on the clone."""
    return _clone_groups(list(outputs), _groups_by_storage(outputs, pool_storages))


def _groups_by_storage(outputs: Sequence[Any], storages: Collection[int]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and storage_id(output) in storages:
            groups.setdefault(storage_id(output), []).append(index)  # guard: outputs_that_share
    return tuple(map(tuple, groups.values()))


def _clone_groups(
    outputs: list[Any], groups: Sequence[Sequence[int]], copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> list[Any]:
    for indices in groups:
        copies = _clone_together({id(outputs[index]): outputs[index] for index in indices}, copy)
        for index in indices:
            outputs[index] = copies[id(outputs[index])]
    return outputs


def _clone_together(
    views: Mapping[int, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Rebuild ``views`` of one storage, by key and in the same layout, on ``copy`` of the bytes that they span."""
    if len(views) == 1 and copy is torch.clone:
        (key, view), *_ = views.items()
        if view.is_contiguous() and not is_lazy(view):  # the clone would not be
            return {key: view.clone()}
    spans = [extent(view) for view in views.values()]
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    first -= first % WIDEST_ELEMENT_BYTES
    any_view = next(iter(views.values()))
    memory = torch.empty(0, dtype=torch.uint8, device=any_view.device)
    memory.set_(any_view.untyped_storage(), first, (last - first,), (1,))
    copied = copy(memory)
    return {key: same_view(copied, view, byte_offset=_first_byte(view) - first) for key, view in views.items()}


def fill_with_sentinel(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite ``tensors`` with NaN; integers with their dtype's least value, or greatest if that is 0; bools True."""
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype is not torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)
            else:
                tensor.fill_(True)


def over_new_storages(outputs: Sequence[Any], pool_storages: Collection[int]) -> list[Any]:
    """``outputs`` with those in pool memory over new storage objects, whose lifetime shows whether a view lives."""
    groups = _groups_by_storage(outputs, pool_storages)
    return _clone_groups(list(outputs), groups, copy=from_dlpack)  # on the same memory: nothing is copied
