"""Who moves weights around a model's forwards: what a manager asks of it, whoever it is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["ForwardHooks"]


class ForwardHooks(Protocol):
    """Work around each forward of a model and inside of it, such as copying a layer's weights to the device in time.

    A manager enters :meth:`forward` around every forward. Before a capture it calls :meth:`sync_prev_onload`, and
    inside of the capture, at the end of the model, :meth:`join_after_forward`. The model has to be one graph.
    """

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """The ops by which layers announce themselves, as qualified names: they stay eager in PIECEWISE."""
        ...

    @property
    def context(self) -> Mapping[str, Any]:
        """What those ops read from the forward context, as its ``extra``."""
        ...

    def check_model(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        """Refuse a model, or the device of its inputs, that the hooks were not made for.

        Args:
            modules: all modules of the model, itself first.
            device: of the inputs.

        Raises:
            GraphpassError: what does not fit.
        """
        ...

    def forward(self, *, replays: bool) -> contextlib.AbstractContextManager[None]:
        """One forward in the body.

        Args:
            replays: it may be the replay of one graph, which calls no op.
        """
        ...

    def sync_prev_onload(self) -> None:
        """Order the current stream behind all work that the last forward left in flight."""
        ...

    def join_after_forward(self) -> None:
        """End a forward that is being captured: all work that it launched on other streams is joined."""
        ...
