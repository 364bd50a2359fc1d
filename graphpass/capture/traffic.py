"""What became of the calls that the auto dispatcher decided: how many, by key and reason, and how much was padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Table

__all__ = ["CallCounts", "CallTraffic"]


@dataclass(slots=True)
class CallCounts:
    """Calls of one kind.

    Attributes:
        calls: how many.
        real_elements: product of the real sizes, summed over the calls.
        padded_elements: the same of the key's sizes.
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
    """The calls of all callables of a runtime that dispatch by themselves."""

    _counts: dict[tuple[str, CUDAGraphMode, BatchDescriptor | None, str], CallCounts] = field(default_factory=dict)

    def of(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor | None, reason: str) -> CallCounts:
        """The counter of one kind of call, to be kept and counted up.

        Args:
            name: the callable.
            mode: what was replayed, NONE for a call without a graph.
            key: the padded shape, None where no key fits.
            reason: why the call replays this key, or why it has no graph.
        """
        return self._counts.setdefault((name, mode, key, reason), CallCounts())

    def num_calls(self, *, with_graph: bool) -> int:
        """Calls that had a graph, or that had none."""
        return sum(c.calls for (_, mode, _, _), c in self._counts.items() if bool(mode) == with_graph)

    def table(self) -> Table:
        """One row for each kind of call."""
        return Table("Calls", ("graph", "mode", "key", "reason", "calls", "padding"), tuple(self._rows()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for (name, mode, key, reason), counts in self._counts.items():
            waste = 1 - counts.real_elements / counts.padded_elements if counts.padded_elements else 0.0
            if counts.calls:
                yield name, str(mode), str(key or ""), reason, str(counts.calls), f"{waste:.1%}"
