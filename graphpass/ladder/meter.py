"""What a capture takes of a device's memory.

Three kinds are told apart. The *graph pool* is what graphs compute in. What torch's allocator takes besides (*cached*)
are the workings of warm-ups, which it keeps for later, staging buffers and metadata. The *driver* takes memory of its
own, for executables and kernels, which the allocator does not see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override

from graphpass.capture.executables import ExecutableCopies
from graphpass.capture.runtime import GraphRuntime

__all__ = ["NOTHING", "Copies", "DeviceMemory", "MemoryGrowth", "MemoryMeter", "MemoryReading"]


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """By how many bytes something grew the device's memory.

    Attributes:
        pool_bytes: of the graph pool.
        cached_bytes: of torch's allocator outside of the pool.
        driver_bytes: outside of the allocator: executables and kernels, or another process.
    """

    pool_bytes: int = 0
    cached_bytes: int = 0
    driver_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.pool_bytes + self.cached_bytes + self.driver_bytes

    @classmethod
    def sum_of(cls, growths: Iterable[MemoryGrowth]) -> MemoryGrowth:
        """What several took together."""
        found = list(growths)
        return cls(
            sum(growth.pool_bytes for growth in found),
            sum(growth.cached_bytes for growth in found),
            sum(growth.driver_bytes for growth in found),
        )


NOTHING = MemoryGrowth()


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A device's memory at one moment, in bytes.

    Attributes:
        taken: by everyone.
        reserved: by torch's allocator, the pool included.
        pool: by the graph pool.
    """

    taken: int
    reserved: int
    pool: int

    def __sub__(self, earlier: MemoryReading) -> MemoryGrowth:
        pool, reserved = self.pool - earlier.pool, self.reserved - earlier.reserved
        return MemoryGrowth(pool, reserved - pool, self.taken - earlier.taken - reserved)


class Copies(Protocol):
    """Further executables of what was recorded; see :class:`graphpass.capture.executables.ExecutableCopies`."""

    def add(self, recordings: Sequence[Any]) -> bool:
        """One more of each; whether all of them could be made."""


class MemoryMeter(Protocol):
    """Reads a device's memory."""

    def reading(self) -> MemoryReading:
        """What is taken now."""

    def kept_bytes(self) -> int:
        """Bytes of all graph pools that no later capture may use."""

    def driver_bytes(self) -> int:
        """Bytes of the device that are taken outside of torch's allocator."""

    def copies(self) -> contextlib.AbstractContextManager[Copies]:
        """Executables of recordings, for the body."""

    def open_pool(self) -> None:
        """Take what a pool takes once, whatever is captured into it: the workspaces of matrix products."""

    def settle(self) -> None:
        """Give back what the allocator holds for later, so that readings can be compared."""


class DeviceMemory(MemoryMeter):
    """Reads the memory of a manager's device. On the CPU, where tapes have no pool, all of it is the runtime's word.

    Args:
        device: of the buffers.
        runtime: owner of the pool.
    """

    def __init__(self, device: torch.device, runtime: GraphRuntime) -> None:
        self._device, self._runtime = device, runtime

    @override
    def reading(self) -> MemoryReading:
        pool = self._runtime.pool_bytes()
        if self._device.type != "cuda":
            return MemoryReading(pool, pool, pool)
        reserved = torch.cuda.memory_reserved(self._device)
        return MemoryReading(reserved + self.driver_bytes(), reserved, pool)

    @override
    def kept_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(segment["active_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))

    @override
    def driver_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free) - torch.cuda.memory_reserved(self._device)

    @override
    def copies(self) -> contextlib.AbstractContextManager[Copies]:
        return contextlib.closing(ExecutableCopies())

    @override
    def open_pool(self) -> None:
        self._runtime.lease.device_for([torch.empty(0, device=self._device)]).open()

    @override
    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
