"""What a device must do so that a region can be captured on it and replayed.

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
        """Run the recorded work, ordered after what the caller has enqueued so far."""

    def reset(self) -> None:
        """Give up the recording; it must not be replayed again."""


class GraphDevice(Protocol):
    """Records bodies into graphs on one device and owns the pool their memory comes from."""

    device: torch.device
    recordings: Sequence[Graph]
    """What was recorded, where the device was asked to keep it: more executables can be made of it."""

    def open(self) -> None:
        """Take what the pool takes once, whatever is recorded into it; :meth:`record` does so where nobody has."""

    def warm_up(self, body: Callable[[], Any]) -> None:
        """Run ``body`` once, where it will be recorded, and drop what it returns."""

    def record(
        self, body: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, Sequence[Any]]:
        """Record ``body``; returns the graph and what ``body`` returned, its tensors at the graph's addresses.

        Whether the body's effects happen while it is recorded is the device's affair: callers restore what it mutates.
        When the body raises, nothing of the recording is left.
        """

    def call(self, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a region's runnable inside :meth:`warm_up` or :meth:`record`: regions announce themselves here."""

    def without_ownership(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as ``tensor``, without keeping it reserved in the pool."""

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """``outputs`` are no longer valid: another forward replays. Devices that can show it overwrite them."""

    def begin_forward(self) -> None:
        """Order the work that follows after the last forward that used the pool, also across streams."""

    def pool_bytes(self) -> int:
        """Bytes the pool holds now."""

    def close(self) -> None:
        """Give the pool's memory back; the device can record again afterwards, into a new pool."""
