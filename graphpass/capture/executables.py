"""Instantiates further executables of recorded graphs, to measure how much device memory executables use.

The driver reuses the memory of earlier executables, so a few new ones often show no increase. As many executables as a
ladder will have show the memory that the ladder will use. Instantiating an executable is much cheaper than a capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from graphpass.capture.driver import driver

__all__ = ["ExecutableCopies"]

_AUTO_FREE_ON_LAUNCH, _USE_NODE_PRIORITY = 1, 8
_AS_TORCH_MAKES_THEM = ctypes.c_ulonglong(_AUTO_FREE_ON_LAUNCH | _USE_NODE_PRIORITY)


class ExecutableCopies:
    """Owns executables that are never launched, until :meth:`close`."""

    def __init__(self) -> None:
        self._made: list[ctypes.c_void_p] = []

    def add(self, recordings: Sequence[Any]) -> bool:
        """Instantiate each recording once more.

        Args:
            recordings: ``torch.cuda.CUDAGraph`` objects captured with ``keep_graph=True``.

        Returns:
            Whether all succeeded. The driver allows only one executable of a graph that allocates memory.
        """
        for recording in recordings:
            made, source = ctypes.c_void_p(), ctypes.c_void_p(recording.raw_cuda_graph())
            if driver().cuGraphInstantiateWithFlags(ctypes.byref(made), source, _AS_TORCH_MAKES_THEM):
                return False
            self._made.append(made)
        return True

    def close(self) -> None:
        """Destroy all executables."""
        if self._made:
            torch.cuda.synchronize()
        while self._made:
            driver().cuGraphExecDestroy(self._made.pop())
