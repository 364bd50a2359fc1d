"""The protocol of a device on which regions are captured and replayed.

Two implementations share this protocol: :class:`graphpass.capture.cuda.CudaDevice` records CUDA graphs,
:class:`graphpass.capture.tape.TapeDevice` records a list of ops at fixed addresses on the CPU. A device object belongs
to one :class:`~graphpass.capture.runtime.GraphRuntime`, which closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Graph", "GraphDevice"]


class Graph(Protocol):
    """One captured region at one key: reads and writes fixed addresses."""

    def replay(self) -> None:
        """Run the recorded work, ordered after all work that the caller has enqueued."""

    def reset(self) -> None:
        """Free the recording; it must not be replayed again."""


class GraphDevice(Protocol):
    """Records functions into graphs on one device. Owns the pool of the graphs' memory."""

    device: torch.device
    recordings: Sequence[Graph]
    """The recorded graphs if the device stores them, else empty; more executables can be instantiated from them."""

    def open(self) -> None:
        """Allocate the memory that the pool needs once for all graphs; :meth:`record` calls this first."""

    def warm_up(self, body: Callable[[], Any]) -> None:
        """Run ``body`` once on the device, and drop its results."""

    def record(
        self, body: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, Sequence[Any]]:
        """Record ``body``; returns the graph and the results of ``body``, tensors at the graph's addresses.

        ``body`` may or may not take effect while it is recorded, depending on the device; callers restore the tensors
        that it mutates. If ``body`` raises, the recording is discarded.
        """

    def call(self, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a region's runnable inside :meth:`warm_up` or :meth:`record`; all regions are called through here."""

    def without_ownership(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the memory of ``tensor`` that does not keep it allocated in the pool."""

    def refuse_frozen(self, outputs: Sequence[torch.Tensor]) -> None:
        """Refuse results of the last :meth:`record` in memory that the recording neither reads nor allocated.

        Raises:
            CaptureError: no replay would write such a result.
        """

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """Mark ``outputs`` stale, because another forward replays. The CPU tape overwrites them to show stale reads."""

    def begin_forward(self) -> None:
        """Order all later work after the last forward that used the pool, also across streams."""

    def pool_bytes(self) -> int:
        """Bytes reserved by the pool now."""

    def close(self) -> None:
        """Free the pool; the device can record again afterwards, into a new pool."""
