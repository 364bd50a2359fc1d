"""What was asked of a graphed model, and what it got: the dispatch table of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphpass.dispatch import Dispatch
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.tables import Table

__all__ = ["Traffic"]


@dataclass(slots=True)
class _Row:
    """What one dispatch decision was given so far; elements are the product of the key fields."""

    step: Dispatch
    hits: int = 0
    real_elements: int = 0
    padded_elements: int = 0

    def cells(self) -> tuple[str, ...]:
        padding = 1 - self.real_elements / self.padded_elements if self.padded_elements else 0.0
        return (
            str(self.step.mode),
            str(self.step.descriptor),
            str(self.step.reason),
            str(self.hits),
            str(self.real_elements),
            str(self.padded_elements),
            f"{100 * padding:.1f} %",
        )


class Traffic:
    """Counts dispatches by mode, key and reason, with real and padded sizes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[CUDAGraphMode, BatchDescriptor, str], _Row] = {}

    def saw(self, step: Dispatch, sizes: Mapping[str, int], padded: Mapping[str, int] | None) -> None:
        """Count one dispatch; ``padded`` is None where nothing replays."""
        key = (step.mode, step.descriptor, step.reason.value)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(step)
        row.hits += 1
        row.real_elements += math.prod(sizes.values())
        row.padded_elements += math.prod((sizes if padded is None else padded).values())

    def tables(self) -> tuple[Table, ...]:
        """The dispatch table."""
        columns = ("mode", "key", "reason", "hits", "real elements", "padded elements", "padding")
        return (Table("Dispatches", columns, tuple(sorted(row.cells() for row in self._rows.values()))),)
