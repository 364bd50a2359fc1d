"""Passes over the aten graphs of regions that only read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpass.compile.compilers import TraceFunction, TraceOf


@dataclass(frozen=True, slots=True)
class Reading:
    """A pass that only reads."""

    trace: TraceFunction
    key: Any = None
    changed: fx.GraphModule | None = None
    decisions: Any = None

    def __call__(self, aten: fx.GraphModule) -> Any:
        """What the trace function returns."""
        return self.trace(aten)


def reading(trace: TraceFunction) -> TraceOf:
    """The passes that call ``trace``, for all regions."""
    return lambda region: Reading(trace)
