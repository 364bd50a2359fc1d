"""Counts the calls of the auto dispatcher by key and reason, and the share of padding in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Table

__all__ = ["CallCounts", "CallTraffic"]


@dataclass(slots=True)
class CallCounts:
    """Counts for one (callable, mode, key, reason).

    Attributes:
        calls: number of calls.
        real_elements: product of the real sizes, summed over the calls.
        padded_elements: product of the key's sizes, summed over the calls.
    """

    calls: int = 0
    real_elements: int = 0
    padded_elements: int = 0

    def saw(self, real: int, padded: int) -> None:
        """Count one call."""
        self.calls += 1
        self.real_elements += real
        self.padded_elements += padded


@dataclass(slots=True)
class CallTraffic:
    """Call counts of all callables of a runtime that the auto dispatcher serves."""

    _counts: dict[tuple[str, CUDAGraphMode, BatchDescriptor | None, str], CallCounts] = field(default_factory=dict)

    def of(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor | None, reason: str) -> CallCounts:
        """The counter for these calls; the caller may keep it and update it on each call.

        Args:
            name: the callable.
            mode: the runtime mode of the call, NONE for a call without a graph.
            key: the padded shape, None if no key fits.
            reason: why the call replays this key, or why it has no graph.
        """
        return self._counts.setdefault((name, mode, key, reason), CallCounts())

    def num_calls(self, *, with_graph: bool) -> int:
        """Number of calls with a graph, or of those without."""
        return sum(c.calls for (_, mode, _, _), c in self._counts.items() if bool(mode) == with_graph)

    def table(self) -> Table:
        """One row for each (callable, mode, key, reason) that has calls."""
        return Table("Calls", ("graph", "mode", "key", "reason", "calls", "padding"), tuple(self._rows()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for (name, mode, key, reason), counts in self._counts.items():
            waste = 1 - counts.real_elements / counts.padded_elements if counts.padded_elements else 0.0
            if counts.calls:
                yield name, str(mode), str(key or ""), reason, str(counts.calls), f"{waste:.1%}"
