"""Static input buffers outside the pool, into which inputs are copied before a replay, and their layouts.

Inputs that share a storage share one buffer, see Note [Alias patterns] in docs/design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.compat import memory
from graphpass.errors import ShapeError

WIDEST_ELEMENT_BYTES = 16
"""complex128. Memory that several views share is moved by multiples of this, so views of every dtype stay aligned."""

_ALIGNMENT_BYTES = 256

AliasPattern = tuple[tuple[int, int, tuple[int, ...]], ...]
"""Which staged inputs share memory: (group, byte offset in the group, strides) for each input; () if none do.

Strides are () for an input that shares no memory: they only matter for whether inputs overlap.
"""

# -- layouts ----------------------------------------------------------------------------------------------------------


def storage_id(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for an empty one, and for a tensor that consists of others (nested, sparse)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def storage_ids(values: Iterable[Any]) -> frozenset[int]:
    """Addresses of the storages that the tensors among ``values`` lie in, without empty ones."""
    return frozenset(storage_id(value) for value in values if isinstance(value, torch.Tensor)) - {0}


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range [first, last) of a tensor in its storage; (0, 0) without elements."""
    if not tensor.numel():
        return (0, 0)
    first = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.element_size()
    return (first * width, (first + reach + 1) * width)


def distinct_elements(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """The view in which every element of ``tensor`` appears once: expanded dimensions are cut to size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    reach = 0
    for stride, size in sorted((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride <= reach:  # guard: self_overlap
            raise ShapeError(
                f"{name} overlaps itself in memory",
                expected="a layout in which each element has a distinct address, or expanded dimensions",
                found=f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                remedy="pass tensor.contiguous()",
            )
        reach += (size - 1) * stride
    return tensor


def same_view(of: torch.Tensor, like: torch.Tensor, *, byte_offset: int) -> torch.Tensor:
    """``like``'s shape, strides, dtype and lazy bits over another tensor's storage, ``byte_offset`` into it."""
    view = torch.empty(0, dtype=like.dtype, device=of.device)
    view.set_(of.untyped_storage(), byte_offset // like.element_size(), like.shape, like.stride())
    return memory.with_bits_of(view, like)  # guard: lazy_views


def alias_pattern(leaves: Sequence[Any], positions: Sequence[int]) -> AliasPattern:
    """How the inputs at ``positions`` share memory; () if no two share a storage, the usual case."""
    if len(positions) < 2:
        return ()
    storages = [storage_id(leaves[position]) for position in positions]
    occupied = [storage for storage in storages if storage]
    if len(set(occupied)) == len(occupied):
        return ()
    first_byte: dict[int, int] = {}
    for storage, position in zip(storages, positions, strict=True):
        first_byte[storage] = min(first_byte.get(storage, extent(leaves[position])[0]), extent(leaves[position])[0])
    groups: dict[int, int] = {}
    pattern: list[tuple[int, int, tuple[int, ...]]] = []
    for index, (storage, position) in enumerate(zip(storages, positions, strict=True)):
        group = groups.setdefault(storage, index) if storage else index
        offset = extent(leaves[position])[0] - first_byte[storage] if storage else 0
        # guard: alias_pattern_strides
        pattern.append((group, offset, leaves[position].stride() if storages.count(storage) > 1 else ()))
    return tuple(pattern)


class Layouts:
    """The layouts of tensors at capture, compared natively once tensors that have them were seen.

    The memory of a tensor on ``meta`` may be on any device.
    """

    __slots__ = ("_expected", "match")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._expected = [_layout_of(tensor) for tensor in tensors]
        #: the native comparison; after a change of autocast or ``requires_grad`` it fails, too
        self.match: Callable[..., bool] = lambda *_: False

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[int, str, str] | None:
        """(index, layout at capture, layout now) of the first tensor with another layout; None if there is none."""
        if self.match(*tensors):
            return None
        for index, (tensor, expected) in enumerate(zip(tensors, self._expected, strict=True)):
            found = _layout_of(tensor)
            if found[:3] != expected[:3] or expected[3] not in (None, found[3]):  # guard: layouts_kept
                return index, _layout_text(*expected), _layout_text(*found)
        self.match = memory.layouts_of(tensors)
        return None


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, None if tensor.is_meta else tensor.device


def _layout_text(shape: Any, strides: Any, dtype: Any, device: Any) -> str:
    return f"{shape} {dtype}{f' on {device}' if device else ''} with strides {strides}"


# -- buffers ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BufferArena:
    """The buffers of one wrapper: one per slot and device, as large as the largest captured key needs."""

    _buffers: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def reserve(self, slot: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 buffer of at least ``num_bytes`` for ``slot``; graphs continue to use one that was too small."""
        buffer = self._buffers.get((slot, device))
        if buffer is None or buffer.numel() < num_bytes:
            with torch.inference_mode(False):
                buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[(slot, device)] = buffer
        return buffer

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def saved(self) -> Mapping[tuple[int, torch.device], torch.Tensor]:
        """The current buffers, for :meth:`restore`."""
        return dict(self._buffers)

    def restore(self, saved: Mapping[tuple[int, torch.device], torch.Tensor]) -> None:
        """Restore the buffers that :meth:`saved` returned: a failed capture must not leave buffers behind."""
        self._buffers = dict(saved)

    def clear(self) -> None:
        """Drop the buffers; an entry keeps alive those that it uses."""
        self._buffers.clear()

    def like(self, leaves: Sequence[Any], positions: Sequence[int], pattern: AliasPattern) -> list[torch.Tensor]:
        """A buffer in the layout of each input at ``positions``; inputs that share memory share a buffer."""
        spans: dict[int, int] = {}
        # A shared buffer starts as far past an aligned address as the shared memory does: views of any dtype then fit.
        offsets = [
            offset + (extent(leaves[position])[0] - offset) % WIDEST_ELEMENT_BYTES
            for position, (_, offset, _) in zip(positions, pattern, strict=False)
        ] or [0] * len(positions)
        groups = [group for group, *_ in pattern] or list(range(len(positions)))  # guard: shared_buffers
        for position, group, offset in zip(positions, groups, offsets, strict=True):
            first, last = extent(leaves[position])
            spans[group] = max(spans.get(group, 0), offset + last - first)
        buffers = []
        for position, group, offset in zip(positions, groups, offsets, strict=True):
            rounded = -(-max(spans[group], 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            shared = self.reserve(positions[group], rounded, leaves[position].device)
            with torch.inference_mode(False):
                buffers.append(same_view(shared, leaves[position], byte_offset=offset))
        return buffers


# -- copies -----------------------------------------------------------------------------------------------------------


Copies = Callable[[Sequence[torch.Tensor]], None]
"""Copies each source into its target."""


def grouped_copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Copies:
    """Copies to the same targets in every call, in about as many launches as there are dtypes.

    torch's fused copy falls back to one launch for each tensor if a list mixes dtypes or has a pair of different
    layouts, and refuses lazy targets. So pairs are grouped once; sources of other layouts than these are copied one by
    one.
    """
    indices: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(map(_kind, targets, sources)):
        indices.setdefault(kind, []).append(index)
    groups = [
        (_one_by_one if is_lazy else memory.foreach_copy_, [targets[index] for index in group], group)
        for (*_, is_lazy), group in indices.items()
    ]

    def run(sources: Sequence[torch.Tensor]) -> None:
        for copy, targets, group in groups:
            copy(targets, [sources[index] for index in group])

    return run


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source, of its target's shape and dtype, in about as many launches as there are dtypes."""
    kinds = set(map(_kind, targets, sources))
    if len(kinds) == 1 and not any(is_lazy for *_, is_lazy in kinds):
        memory.foreach_copy_(targets, sources)
        return
    grouped_copies(targets, sources)(sources)


_Kind = tuple[torch.dtype, bool, bool]


def _kind(target: torch.Tensor, source: torch.Tensor) -> _Kind:
    """(dtype, whether both are contiguous, whether the target is lazy)."""
    return target.dtype, target.is_contiguous() and source.is_contiguous(), memory.is_lazy(target)


def _one_by_one(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
