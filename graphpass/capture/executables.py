"""More executables of recorded graphs, to see what one of them takes of a device's memory.

The driver keeps what executables of the past have left it, so that a few new ones often take nothing that shows. As
many as a ladder will have take what the ladder will take; to make one costs a fraction of a capture.
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
    """Executables that nobody launches, until :meth:`close`."""

    def __init__(self) -> None:
        self._made: list[ctypes.c_void_p] = []

    def add(self, recordings: Sequence[Any]) -> bool:
        """One more of each.

        Args:
            recordings: CUDA graphs of torch's that were captured with ``keep_graph=True``.

        Returns:
            Whether the driver made them all. It makes no second one of a graph that allocates memory.
        """
        for recording in recordings:
            made, source = ctypes.c_void_p(), ctypes.c_void_p(recording.raw_cuda_graph())
            if driver().cuGraphInstantiateWithFlags(ctypes.byref(made), source, _AS_TORCH_MAKES_THEM):
                return False
            self._made.append(made)
        return True

    def close(self) -> None:
        """Give them back."""
        if self._made:
            torch.cuda.synchronize()
        while self._made:
            driver().cuGraphExecDestroy(self._made.pop())
