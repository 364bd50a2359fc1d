"""A CUDA stream that runs only the recordings of one pool, see Note [Workspaces] in docs/design."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

from graphpass.capture.driver import checked, driver
from graphpass.compat import memory

__all__ = ["RecordingStream"]

_NON_BLOCKING = ctypes.c_uint(1)
"""Not ordered with the legacy default stream, whose users could otherwise not launch during a recording."""


class RecordingStream:
    """A stream of its own on one device.

    Raises:
        DeviceError: the driver made none.
    """

    _made: ClassVar[set[int]] = set()
    """Handles of all that there are, those among them that were left to torch."""

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes the device's context this thread's, where the driver looks for it
            checked(driver().cuStreamCreate(ctypes.byref(self._handle), _NON_BLOCKING), "make a stream")
        self._made.add(self._address)
        self._first: torch.cuda.CUDAGraph | None = None
        """Kept, so that the pool has an owner from the start."""
        self.stream = torch.cuda.ExternalStream(self._address, device=device)

    @property
    def _address(self) -> int:
        return self._handle.value or 0

    def take_workspaces(self, pool: Any) -> None:
        """Have torch allocate this stream's workspaces now, in ``pool``: no recording is the one that takes them."""
        a = torch.ones(64, 64, device=self.stream.device)
        bias = a[0]

        def products() -> None:
            torch.addmm(bias, a, a)  # by cuBLASLt, which has a workspace of its own
            torch.mm(a, a)

        products()  # the libraries' handles are made outside of a recording
        self._first = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            self._first.capture_begin(pool=pool, capture_error_mode="thread_local")
            products()
            self._first.capture_end()

    def close(self, *, own_pools: frozenset[tuple[int, int]]) -> None:
        """Give the stream and its workspaces back, when no graph recorded on it will be replayed.

        torch can be asked to drop the workspaces of all streams, not of one. Somebody else's graph may read one of
        those. So with a pool of somebody else's there, this one's is left to torch, and the stream with it: another
        stream at its address would be given the workspace.

        Args:
            own_pools: every pool that was made for graphs recorded on such streams. In a pool that a user gave, what
                was taken on such a stream is one's own, too.
        """
        if self._first is not None:
            self._first.reset()
        pools = {
            tuple(segment["segment_pool_id"])
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] not in self._made
        }
        if pools <= {(0, 0), *own_pools}:
            memory.drop_blas_workspaces()
            checked(driver().cuStreamDestroy_v2(self._handle), "give a stream back")
            self._made.discard(self._address)
