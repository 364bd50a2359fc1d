"""Under ``debug``, reports output views that callers still hold after a later replay overwrote their memory.

A view is valid until the next replay; read later, it silently shows another step's result. In a loop ``y = step(x)``,
``y`` always lives until the next result is assigned, so a view is reported only when the second replay after it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from graphpass.capture.outputs import rehoused

__all__ = ["HandedViews"]


class HandedViews:
    """Tracks the storages of the views returned by the last two forwards."""

    def __init__(self) -> None:
        self._latest: list[tuple[str, StorageWeakRef]] = []
        self._earlier: list[tuple[str, StorageWeakRef]] = []

    def hand_out(self, outputs: Sequence[Any], pool_storages: Collection[int], region: str) -> list[Any]:
        """``outputs`` with those in pool memory over new storage objects, whose lifetime shows whether a view lives."""
        handed = rehoused(outputs, pool_storages)
        for index, (view, output) in enumerate(zip(handed, outputs, strict=True)):
            if view is not output:
                name = f"output {index} of {region}"
                self._latest.append((name, StorageWeakRef(view.untyped_storage())))
        return handed

    def next_forward(self) -> Iterator[str]:
        """Start another forward; yields the names of live views returned before the previous forward."""
        yield from (name for name, storage in self._earlier if not storage.expired())
        self._earlier, self._latest = self._latest, []
