"""Static input buffers: memory of graphpass, outside the pool; inputs are copied into it before a replay.

A graph reads fixed addresses, so every input without a static address needs a buffer. Inputs that share a storage
share one buffer, see Note [Alias patterns] in docs/design. If the region writes to a buffer, the buffer is copied back
to the caller's tensor after the replay. Many tensors are copied in few kernel launches (:func:`copy_each`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.layout import WIDEST_ELEMENT_BYTES, distinct_elements, extent, same_view, storage_id
from graphpass.compat import memory
from graphpass.errors import ShapeError

__all__ = ["AliasPattern", "BufferArena", "Staging", "alias_pattern", "copied_together", "copy_each"]

AliasPattern = tuple[tuple[int, int, tuple[int, ...]], ...]
"""Which staged inputs share memory: (group, byte offset in the group, strides) for each input; () if none do.

Strides are () for an input that shares no memory: they only matter for whether inputs overlap.
"""

_ALIGNMENT_BYTES = 256


@dataclass(slots=True)
class BufferArena:
    """The buffers of one wrapper: one per slot and device, as large as the largest captured key needs."""

    _buffers: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def reserve(self, slot: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A uint8 buffer of at least ``num_bytes`` for ``slot``.

        A request larger than the current buffer allocates a new one; existing graphs continue to use the old one.
        """
        held = self._buffers.get((slot, device))
        if held is None or held.numel() < num_bytes:
            with torch.inference_mode(False):
                held = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[(slot, device)] = held
        return held

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def held(self) -> Mapping[tuple[int, torch.device], torch.Tensor]:
        """The current buffers, for :meth:`restore`."""
        return dict(self._buffers)

    def restore(self, held: Mapping[tuple[int, torch.device], torch.Tensor]) -> None:
        """Restore the buffers that :meth:`held` returned: a failed capture must not leave buffers behind."""
        self._buffers = dict(held)

    def clear(self) -> None:
        """Drop the buffers; an entry keeps alive those that it uses."""
        self._buffers.clear()


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


@dataclass(frozen=True, slots=True)
class Staging:
    """The staged inputs of a graph: copied into buffers before a replay, and copied back if mutated.

    Attributes:
        positions: flat positions of the staged arguments.
        buffers: the tensor that the graph reads for each position, with the shape and strides of the capture.
        pattern: the alias pattern of the staged inputs; inputs with another pattern need another entry.
    """

    positions: tuple[int, ...] = ()
    buffers: tuple[torch.Tensor, ...] = ()
    pattern: AliasPattern = ()
    _targets: list[torch.Tensor] = field(default_factory=list)
    _expanded: tuple[int, ...] = ()
    _mutated: tuple[int, ...] = ()
    _names: tuple[str, ...] = ()
    _together: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        # Grouped once, because every replay copies. The grouping assumes that inputs have the layout of the buffers.
        object.__setattr__(self, "_together", copied_together(self._targets, self._targets))

    @classmethod
    def for_inputs(
        cls,
        leaves: Sequence[Any],
        positions: Sequence[int],
        *,
        mutated: Collection[int],
        names: Sequence[str],
        arena: BufferArena,
    ) -> Staging:
        """Buffers for the inputs at ``positions``; ``mutated`` are the positions that the region writes to."""
        pattern = alias_pattern(leaves, positions)
        buffers = _buffers_in_layout(leaves, positions, pattern, arena)
        targets = [distinct_elements(b, name=names[p]) for p, b in zip(positions, buffers, strict=True)]
        return cls(
            positions=tuple(positions),
            buffers=tuple(buffers),
            pattern=pattern,
            _targets=targets,
            _expanded=tuple(i for i, (t, b) in enumerate(zip(targets, buffers, strict=True)) if t.shape != b.shape),
            _mutated=tuple(i for i, position in enumerate(positions) if position in mutated),
            _names=tuple(names[position] for position in positions),
        )

    def at(self, places: Mapping[int, int]) -> Staging:
        """The staging of the arguments in ``places`` only; ``places`` maps old positions to new ones."""
        remaining = [index for index, position in enumerate(self.positions) if position in places]
        return Staging(
            positions=tuple(places[self.positions[index]] for index in remaining),
            buffers=tuple(self.buffers[index] for index in remaining),
            pattern=alias_pattern(self.buffers, remaining),
            _targets=[self._targets[index] for index in remaining],
            _expanded=tuple(new for new, index in enumerate(remaining) if index in self._expanded),
            _mutated=tuple(new for new, index in enumerate(remaining) if index in self._mutated),
            _names=tuple(self._names[index] for index in remaining),
        )

    def joined(self, other: Staging) -> Staging:
        """One staging for the inputs of both; no two inputs may share memory."""
        first = len(self.positions)
        return Staging(
            positions=self.positions + other.positions,
            buffers=self.buffers + other.buffers,
            pattern=(),
            _targets=self._targets + other._targets,
            _expanded=self._expanded + tuple(first + index for index in other._expanded),
            _mutated=self._mutated + tuple(first + index for index in other._mutated),
            _names=self._names + other._names,
        )

    def __bool__(self) -> bool:
        return bool(self.positions)

    @property
    def mutates(self) -> bool:
        """Whether the region writes to one of the staged inputs."""
        return bool(self._mutated)

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse inputs that ``copy_`` would broadcast, convert or fail on.

        Raises:
            ShapeError: shape, dtype or device differ from the capture, or the strides of an expanded input do.
        """
        for position, buffer, name in zip(self.positions, self.buffers, self._names, strict=True):
            leaf = leaves[position]
            # guard: staged_dtype, staged_shape
            if leaf.shape != buffer.shape or leaf.dtype != buffer.dtype or leaf.device != buffer.device:
                raise ShapeError(
                    f"input {name} does not fit the buffer of this key",
                    expected=f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device}",
                    found=f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}",
                    remedy="pad the input to the descriptor's size, or dispatch to the key of its size; a key "
                    "that was captured with inputs of another size is captured again after runtime.close()",
                )
        for index in self._expanded:
            if leaves[self.positions[index]].stride() != self.buffers[index].stride():  # guard: expanded_strides
                raise ShapeError(
                    f"input {self._names[index]} is not expanded as it was at capture",
                    expected=f"strides {self.buffers[index].stride()}",
                    found=f"strides {leaves[self.positions[index]].stride()}",
                    remedy="expand it the same way, or pass tensor.contiguous() from the first call on",
                )

    def copy_in(self, leaves: Sequence[Any]) -> None:
        """Copy the inputs into their buffers, with one foreach copy per group of matching tensors."""
        if not self.positions:
            return
        sources = [leaves[position] for position in self.positions]
        for index in self._expanded:
            sources[index] = distinct_elements(sources[index], name=self._names[index])
        for group in self._together:
            memory.foreach_copy_([self._targets[index] for index in group], [sources[index] for index in group])

    def copy_back(self, leaves: Sequence[Any]) -> None:
        """Copy the buffers that the region writes to back into the caller's tensors."""
        for index in self._mutated:
            distinct_elements(leaves[self.positions[index]], name=self._names[index]).copy_(self._targets[index])


def _buffers_in_layout(
    leaves: Sequence[Any], positions: Sequence[int], pattern: AliasPattern, arena: BufferArena
) -> list[torch.Tensor]:
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
        memory = arena.reserve(positions[group], rounded, leaves[position].device)
        with torch.inference_mode(False):
            buffers.append(same_view(memory, leaves[position], byte_offset=offset))
    return buffers


def copied_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Groups of pairs, by index, that one launch can copy; every pair is in exactly one group.

    torch's fused copy falls back to one launch for each tensor if a list mixes dtypes, or contains a pair of different
    layouts.

    Args:
        targets: the tensors to write.
        sources: the tensors to read, each of its target's shape and dtype.
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, kind in enumerate(map(_kind, targets, sources)):
        groups.setdefault(kind, []).append(index)
    return tuple(map(tuple, groups.values()))


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source, of its target's shape and dtype, in about as many launches as there are dtypes."""
    if len(set(map(_kind, targets, sources))) == 1:
        memory.foreach_copy_(targets, sources)
        return
    for group in copied_together(targets, sources):
        memory.foreach_copy_([targets[index] for index in group], [sources[index] for index in group])


def _kind(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.dtype, bool]:
    return target.dtype, target.is_contiguous() and source.is_contiguous()
