"""The protocol between a manager and an object that moves weights around the model's forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["ForwardHooks"]


class ForwardHooks(Protocol):
    """Work around and inside each forward of a model, such as copying a layer's weights to the device.

    A manager enters :meth:`forward` around every forward. Before a capture it calls :meth:`sync_prev_onload`. At the
    end of the model, inside the capture, it calls :meth:`join_after_forward`. The model must be one graph.
    """

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """Qualified names of the ops that layers call when they begin; they run eagerly in PIECEWISE mode."""
        ...

    @property
    def context(self) -> Mapping[str, Any]:
        """The values that those ops read from ``ForwardContext.extra``, by name."""
        ...

    def check_model(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        """Check that the hooks belong to this model and device.

        Args:
            modules: all modules of the model, the model itself first.
            device: device of the inputs.

        Raises:
            GraphpassError: the hooks were created for another model or device.
        """
        ...

    def forward(self, *, replays: bool) -> contextlib.AbstractContextManager[None]:
        """A context manager around one forward.

        Args:
            replays: the forward may be the replay of one graph, in which no op calls the hooks.
        """
        ...

    def sync_prev_onload(self) -> None:
        """Make the current stream wait for all work that the last forward has left in flight."""
        ...

    def join_after_forward(self) -> None:
        """End a forward inside a capture: the current stream waits for the streams that the forward has used."""
        ...
