"""The keys of a dispatcher, and the decisions that name them."""

from __future__ import annotations

import enum
import operator
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from graphpass.dispatch.grid import Extra, KeyLimits, SizeGrid, without
from graphpass.errors import DispatchError, positive
from graphpass.keys import BatchDescriptor, CUDAGraphMode


class DispatchReason(enum.Enum):
    """Why a batch runs in its mode. The value is a short label for counters."""

    explanation: str  #: the reason as a clause, for reports and errors
    remedy: str  #: what gives such a batch a graph; empty for reasons of batches that have one

    EXACT = "exact", "a key has exactly this size"
    PADDED = "padded", "the next larger key holds it"
    RELAXED = "relaxed", "a uniform decode batch is served by a key for mixed batches"
    EMPTY = "empty", "the batch has no tokens", "skip the step"
    TOO_LARGE = (
        "too_large",
        "the batch is above the largest key",
        "add a capture size that holds it, or split the batch",
    )
    NO_KEY = (
        "no_key",
        "no key has this extra or this number of adapters",
        "add that value to capture_sizes, or that number of adapters to LoraKeys",
    )
    DISABLED = (
        "disabled",
        "the mode, or allowed_modes, excludes this kind of batch",
        "use a mode that has graphs for such batches, or allow it in allowed_modes",
    )
    NOT_CAPTURED = (
        "not_captured",
        "its key has not been captured yet",
        "call capture(), with a max_bytes that leaves room for the key",
    )
    AGREED = (
        "agreed",
        "the other ranks need another mode or size",
        "capture the sizes that this rank has on every rank, and balance the batches",
    )

    def __new__(cls, label: str, explanation: str, remedy: str = "") -> DispatchReason:
        """A reason, whose value is its label."""
        reason = object.__new__(cls)
        reason._value_, reason.explanation, reason.remedy = label, explanation, remedy
        return reason

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one batch."""

    mode: CUDAGraphMode  #: NONE, PIECEWISE or FULL, for the forward context
    descriptor: BatchDescriptor  #: a key of the dispatcher for PIECEWISE and FULL; the unpadded shape for NONE
    reason: DispatchReason  #: why this mode and this descriptor


@dataclass(frozen=True, slots=True)
class LoraKeys:
    """The numbers of active LoRA adapters that get separate graphs."""

    #: the largest number of adapters in a batch. ``max_loras + 1`` is a valid count too, because engines count rows
    #: without an adapter as one more.
    max_loras: int
    #: if True, one key for each power of two up to ``max_loras`` and one for ``max_loras + 1``; a batch uses the next
    #: larger count. If False, one key serves any number of adapters; its count is ``max_loras + 1``, with which it is
    #: captured.
    per_count: bool = False
    #: whether batches without adapters have separate keys; if not, they use the key with the smallest count
    without: bool = True

    def __post_init__(self) -> None:
        positive(self.max_loras, "max_loras", error=DispatchError)

    def key_counts(self) -> tuple[int, ...]:
        """All counts in keys, ascending; 0 means no adapter."""
        powers = [1 << exponent for exponent in range(self.max_loras.bit_length())] if self.per_count else []
        return (*([0] if self.without else []), *powers, self.max_loras + 1)

    def count_table(self) -> tuple[int, ...]:
        """Number of adapters in a batch (index, 0 to ``max_loras + 1``) -> count of its key."""
        counts = self.key_counts()
        return tuple(counts[bisect_left(counts, count)] for count in range(self.max_loras + 2))


@dataclass(slots=True, eq=False)
class Key:
    """One key; compared by identity."""

    mode: CUDAGraphMode  #: PIECEWISE or FULL
    descriptor: BatchDescriptor  #: the padded shape
    sizes: tuple[int, ...]  #: its size in each field of the capture sizes
    identity: tuple[int, Extra]  #: the number of adapters and the other pairs of ``extra``; a batch's must be equal
    is_captured: bool = False  #: whether its graph exists

    @classmethod
    def of(cls, mode: CUDAGraphMode, descriptor: BatchDescriptor, grid: SizeGrid) -> Key:
        """The key of a descriptor, which must name each field of the sizes."""
        fields = grid.fields(descriptor)
        identity = descriptor.num_active_loras, without(fields, descriptor.extra)
        return cls(mode, descriptor, tuple(fields.values()), identity)

    @property
    def route(self) -> tuple[CUDAGraphMode, bool]:
        """The mode, and whether the key is for uniform decode."""
        return self.mode, self.descriptor.uniform

    @property
    def capacity(self) -> int:
        """The largest number of requests."""
        return sys.maxsize if self.descriptor.num_reqs is None else self.descriptor.num_reqs

    @property
    def order(self) -> tuple[int, int, int, tuple[int, ...]]:
        """Sorts the keys of one mode by size."""
        return self.descriptor.num_tokens, self.capacity, self.descriptor.num_active_loras, self.sizes

    def holds(self, sizes: tuple[int, ...], num_reqs: int) -> bool:
        """Whether a batch of these sizes and requests fits."""
        return num_reqs <= self.capacity and all(map(operator.le, sizes, self.sizes))


def keys_of(mode: CUDAGraphMode, grid: SizeGrid, limits: KeyLimits, lora: LoraKeys | None) -> Iterator[Key]:
    """The keys of a mode, with those for uniform decode batches where the mode treats these separately."""
    kinds = [(mode.mixed_mode(), False)] if mode.mixed_mode() else []
    kinds += [(CUDAGraphMode.FULL, True)] if mode.separate_routine() else []
    for adapters in (0,) if lora is None else lora.key_counts():
        for kind, uniform in kinds:
            is_full = kind is CUDAGraphMode.FULL
            for descriptor in grid.descriptors(limits, is_full=is_full, uniform=uniform, adapters=adapters):
                yield Key.of(kind, descriptor, grid)
