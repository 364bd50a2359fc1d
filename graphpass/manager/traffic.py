"""What was asked of a graphed model, and what it got: the dispatch table of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from graphpass.dispatch import Dispatch, DispatchReason
from graphpass.tables import Table

__all__ = ["Traffic"]


class Traffic:
    """Counts dispatches by mode, key and reason, with real and padded sizes."""

    def __init__(self) -> None:
        self._hits: Counter[tuple[str, str, str]] = Counter()
        self._real: Counter[tuple[str, str, str]] = Counter()
        self._padded: Counter[tuple[str, str, str]] = Counter()
        self._reasons: set[DispatchReason] = set()

    def saw(self, step: Dispatch, sizes: Mapping[str, int], padded: Mapping[str, int] | None) -> None:
        """Count one dispatch; ``padded`` is None where nothing replays."""
        row = (str(step.mode), str(step.descriptor), str(step.reason))
        self._hits[row] += 1
        self._real[row] += _product(sizes)
        self._padded[row] += _product(padded if padded is not None else sizes)

    def is_first(self, reason: DispatchReason) -> bool:
        """Whether this reason for a fallback comes up for the first time."""
        first = reason not in self._reasons
        self._reasons.add(reason)
        return first

    def tables(self) -> tuple[Table, ...]:
        """The dispatch table: elements are the product of the key fields, summed over the hits."""
        rows = tuple(
            (
                mode,
                key,
                reason,
                str(hits),
                str(self._real[mode, key, reason]),
                str(self._padded[mode, key, reason]),
                f"{100 * (1 - self._real[mode, key, reason] / self._padded[mode, key, reason]):.1f} %"
                if self._padded[mode, key, reason]
                else "",
            )
            for (mode, key, reason), hits in sorted(self._hits.items())
        )
        columns = ("mode", "key", "reason", "hits", "real elements", "padded elements", "padding")
        return (Table("Dispatches", columns, rows),)


def _product(sizes: Mapping[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product
