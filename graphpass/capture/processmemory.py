"""The device memory that graphpass owns in this process: the one object that all runtimes share.

torch frees the workspaces of all streams at once, see Note [Workspaces] in docs/design. Before it does, a runtime must
know that every graph pool in the process belongs to graphpass.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

__all__ = ["PROCESS_MEMORY", "PoolId", "ProcessMemory"]

PoolId = tuple[int, int]
_DEFAULT_POOL: PoolId = (0, 0)


class ProcessMemory:
    """The pools and recording streams of all devices of this process.

    A device adds its pool when it creates it, and removes it on close. If a caller still holds outputs in it then, the
    pool counts as graphpass's own until that memory is freed. A stream is removed when the driver has destroyed it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pools: set[PoolId] = set()
        self._closed: set[PoolId] = set()
        self._streams: set[int] = set()

    def add_pool(self, pool: PoolId) -> None:
        """Count ``pool`` as graphpass's own."""
        with self._lock:
            self._pools.add(pool)

    def remove_pools(self, pools: Collection[PoolId]) -> None:
        """Forget pools that no device captures into again, as soon as none of their memory is in use.

        Args:
            pools: ids of pools. Those that were not added are ignored.
        """
        with self._lock:
            closed = self._pools.intersection(pools)
            self._pools -= closed
            self._closed |= closed
            if closed:
                self._segments()

    def add_stream(self, handle: int) -> None:
        """Count the segments that the stream with this driver handle allocates as graphpass's own, in any pool."""
        with self._lock:
            self._streams.add(handle)

    def remove_stream(self, handle: int) -> None:
        """Forget a stream that the driver has destroyed; a stream of others may get its handle."""
        with self._lock:
            self._streams.discard(handle)

    def owns_every_pool(self) -> bool:
        """Whether every graph pool with memory in it belongs to graphpass."""
        with self._lock:
            others = {pool for stream, pool in self._segments() if stream not in self._streams}
            return others <= {_DEFAULT_POOL, *self.pools()}  # guard: others_pools

    def pools(self) -> frozenset[PoolId]:
        """The pools that count as graphpass's own."""
        with self._lock:
            return frozenset(self._pools | self._closed)

    def _segments(self) -> list[tuple[int, PoolId]]:
        """(stream handle, pool) of each segment of torch's allocator; forgets closed pools without a segment."""
        segments = [(segment["stream"], tuple(segment["segment_pool_id"])) for segment in torch.cuda.memory_snapshot()]
        self._closed.intersection_update(pool for _, pool in segments)
        return segments


PROCESS_MEMORY = ProcessMemory()
"""Of this process: workspaces belong to the process, and are freed only if no foreign pool exists."""
