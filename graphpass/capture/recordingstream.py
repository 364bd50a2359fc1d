"""A CUDA stream that runs only the recordings of one pool, see Note [Workspaces] in docs/design."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from graphpass.capture.driver import checked, driver
from graphpass.capture.processmemory import PROCESS_MEMORY
from graphpass.compat import memory

__all__ = ["RecordingStream"]

_NON_BLOCKING = ctypes.c_uint(1)
"""CU_STREAM_NON_BLOCKING: does not synchronise with the legacy default stream, which stays usable while recording."""


class RecordingStream:
    """A new CUDA stream on ``device``; close it with :meth:`close`.

    Raises:
        DeviceError: the driver could not create the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes the device's context current in this thread, for the driver call
            checked(driver().cuStreamCreate(ctypes.byref(self._handle), _NON_BLOCKING), "make a stream")
        PROCESS_MEMORY.add_stream(self._address)
        self._first: torch.cuda.CUDAGraph | None = None
        """The graph that allocated the workspaces; while it lives, the pool is in use and torch does not free it."""
        self.stream = torch.cuda.ExternalStream(self._address, device=device)  # guard: cuda_blas_workspace

    @property
    def _address(self) -> int:
        return self._handle.value or 0

    def take_workspaces(self, pool: Any) -> None:
        """Make torch allocate this stream's cuBLAS workspaces in ``pool`` now, rather than in the first recording."""
        a = torch.ones(64, 64, device=self.stream.device)
        bias = a[0]

        def products() -> None:
            torch.addmm(bias, a, a)  # runs in cuBLASLt, which has a separate workspace
            torch.mm(a, a)

        products()  # the libraries create their handles here, outside of the recording
        self._first = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            self._first.capture_begin(pool=pool, capture_error_mode="thread_local")
            products()
            self._first.capture_end()

    def close(self) -> None:
        """Destroy the stream and free its workspaces; no graph recorded on it may be replayed afterwards.

        torch can only free the workspaces of all streams at once, and a graph in a pool outside graphpass may read
        one of them. While such a pool exists, close() therefore frees nothing. It does not destroy the stream either:
        torch finds workspaces by stream handle, and a new stream with the same handle would use this workspace.
        """
        if self._first is not None:
            self._first.reset()
        if PROCESS_MEMORY.owns_every_pool():  # guard: cuda_others_workspaces
            memory.drop_blas_workspaces()
            checked(driver().cuStreamDestroy_v2(self._handle), "give a stream back")
            PROCESS_MEMORY.remove_stream(self._address)
