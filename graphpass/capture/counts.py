"""Counters: captures and replays of one region at one key, batch sizes, and notes for the report."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

__all__ = ["Counts", "Notes", "RunningCounts", "SizesSeen"]

_log = logging.getLogger("graphpass")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one region at one key so far.

    Attributes:
        warmed: warm-up runs before a capture.
        captured: graphs captured, one for each set of static inputs and alias pattern.
        replayed: replays, including the replay of the call that captures.
        copied: inputs copied into static buffers.
        static_sets: sets of static inputs that have a graph now.
    """

    warmed: int
    captured: int
    replayed: int
    copied: int
    static_sets: int


@dataclass(slots=True)
class RunningCounts:
    """The running counts behind :class:`Counts`; written by the wrapper that owns it."""

    warmed: int = 0
    captured: int = 0
    replayed: int = 0
    copied: int = 0

    def counts(self, static_sets: int) -> Counts:
        """The counts as of now."""
        return Counts(self.warmed, self.captured, self.replayed, self.copied, static_sets)


class SizesSeen(Counter[int]):
    """How often each batch size was seen."""

    def suggested(self, limit: int) -> list[int]:
        """Sizes worth a graph: the most frequent ones, at most ``limit``, the largest always among them."""
        if not self:
            return []
        frequent = [size for size, _ in self.most_common(limit)]
        largest = max(self)
        return sorted({*frequent[: limit - (largest not in frequent)], largest})


class Notes(Counter[str]):
    """Notes for the report, each with the number of times it was added."""

    def add(self, text: str, *, level: int = logging.INFO) -> None:
        """Count ``text``; log it at its first occurrence."""
        if text not in self:
            _log.log(level, "%s", text)
        self[text] += 1
