"""Views of outputs that callers got, under ``debug``: which are still held after a later replay wrote to their memory.

A view is valid until the next replay. Whoever reads it later reads another step's result, without a word. Holding it
until the next result has come is usual (``y = step(x)`` in a loop), so one is reported when a second replay begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from graphpass.capture.outputs import rehoused

__all__ = ["HandedViews"]


class HandedViews:
    """Knows the views of the last two forwards that have handed some out."""

    def __init__(self) -> None:
        self._latest: list[tuple[str, StorageWeakRef]] = []
        self._earlier: list[tuple[str, StorageWeakRef]] = []

    def hand_out(self, outputs: Sequence[Any], pool_storages: Collection[int], region: str) -> list[Any]:
        """``outputs`` with those in pool memory over storages of their own, so that their holders can be told apart."""
        handed = rehoused(outputs, pool_storages)
        for index, (view, output) in enumerate(zip(handed, outputs, strict=True)):
            if view is not output:
                name = f"output {index} of {region}"
                self._latest.append((name, StorageWeakRef(view.untyped_storage())))
        return handed

    def next_forward(self) -> Iterator[str]:
        """Another forward is about to replay; names of the views held since before the last one."""
        yield from (name for name, storage in self._earlier if not storage.expired())
        self._earlier, self._latest = self._latest, []
