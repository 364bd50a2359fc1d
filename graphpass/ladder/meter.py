"""Measures the device memory of a capture.

There are three kinds. The *graph pool* has the tensors that graphs compute. *Cached* memory is the rest of torch's
allocator: memory of warm-ups that it caches for reuse, staging buffers, metadata. The *driver* allocates memory for
executables and kernels, which torch's allocator does not report.
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
    """Growth of the device's memory, in bytes.

    Attributes:
        pool_bytes: growth of the graph pool.
        cached_bytes: growth of torch's allocator outside the pool.
        driver_bytes: growth outside the allocator: executables and kernels, or other processes.
    """

    pool_bytes: int = 0
    cached_bytes: int = 0
    driver_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Growth of pool, cached and driver memory together."""
        return self.pool_bytes + self.cached_bytes + self.driver_bytes

    @classmethod
    def sum_of(cls, growths: Iterable[MemoryGrowth]) -> MemoryGrowth:
        """The sum, for each kind of memory."""
        parts = list(growths)
        return cls(
            sum(growth.pool_bytes for growth in parts),
            sum(growth.cached_bytes for growth in parts),
            sum(growth.driver_bytes for growth in parts),
        )


NOTHING = MemoryGrowth()


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A device's memory at one moment, in bytes.

    Attributes:
        taken: memory in use by all processes.
        reserved: memory of torch's allocator, the pool included.
        pool: memory of the graph pool.
    """

    taken: int
    reserved: int
    pool: int

    def __sub__(self, earlier: MemoryReading) -> MemoryGrowth:
        pool, reserved = self.pool - earlier.pool, self.reserved - earlier.reserved
        return MemoryGrowth(pool, reserved - pool, self.taken - earlier.taken - reserved)


class Copies(Protocol):
    """Additional executables of recordings; see :class:`graphpass.capture.executables.ExecutableCopies`."""

    def add(self, recordings: Sequence[Any]) -> bool:
        """Instantiate one more executable of each recording; False if one of them fails."""


class MemoryMeter(Protocol):
    """Reads a device's memory."""

    def reading(self) -> MemoryReading:
        """The device's memory now."""

    def kept_bytes(self) -> int:
        """Bytes of all graph pools that later captures cannot reuse."""

    def driver_bytes(self) -> int:
        """Bytes of the device in use outside torch's allocator."""

    def copies(self) -> contextlib.AbstractContextManager[Copies]:
        """Copies of executables; leaving the context destroys them."""

    def open_pool(self) -> None:
        """Allocate the memory that a pool allocates once, for any capture: the workspaces of matrix products."""

    def settle(self) -> None:
        """Release the allocator's cached memory, so that readings are comparable."""


class DeviceMemory(MemoryMeter):
    """Reads the memory of a device. There is no pool on the CPU, so the runtime's own count of bytes is used.

    Args:
        device: the device of the buffers.
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
