"""Cutting a sequence of items into consecutive batches at the least cost.

A batch either replays the cheapest graph whose every limit holds it, or runs eagerly. Which cuts are best is a shortest
path, found by dynamic programming over the items' order. To stay fast for thousands of items it looks at a bounded
number of cells (a last item, a number of items): long sequences are cut within blocks, all blocks at once, and the
batches found are then cut again as if they were items, until nothing merges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["NO_RUNG", "EagerCosts", "Rung", "RungTable", "Sizes", "cheapest_cuts", "totals"]

Sizes = npt.NDArray[np.int64]
"""[dimension, item]: what adds up in a batch: tokens first, then whatever else a graph limits."""

Floats = npt.NDArray[np.float64]
EagerCosts = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""The costs of eager calls over these token counts; infinite where a call may not be that large."""

NO_RUNG = -1
WHOLE = 128
"""So many items are cut as well as consecutive batches can be."""
BLOCK = 64
"""Longer sequences are cut in blocks of so many."""
MAX_CELLS = 1 << 15
LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Rung:
    """What one graph holds.

    Attributes:
        limits: the most of each dimension that adds up, tokens first.
        cost: of one replay.
        bounds: the most of each dimension of which the largest item counts.
    """

    limits: tuple[int, ...]
    cost: float = 0.0
    bounds: tuple[int, ...] = ()


class _Column:
    """The rungs of the same bounds, ascending: a larger one holds whatever a smaller one does."""

    def __init__(self, bounds: tuple[int, ...], rungs: Sequence[tuple[int, Rung]]) -> None:
        ascending = sorted(rungs, key=lambda pair: pair[1].limits)
        self.bounds = np.array(bounds, dtype=np.int64)[:, None]
        self.limits = np.array([rung.limits for _, rung in ascending], dtype=np.int64).T
        # Behind the last rung stands what holds nothing.
        self.indices = np.array([*(index for index, _ in ascending), NO_RUNG])
        costs = [*(rung.cost for _, rung in ascending), np.inf]
        cheapest = list(range(len(costs)))
        for place in reversed(range(len(ascending))):
            if costs[cheapest[place + 1]] < costs[place]:
                cheapest[place] = cheapest[place + 1]
        self.cheapest = self.indices[cheapest]
        self.least = np.array(costs)[cheapest]

    def places(self, sums: Sizes, peaks: Sizes) -> npt.NDArray[np.intp]:
        """The smallest rung that holds each batch; their number where none does."""
        places: npt.NDArray[np.intp] = np.searchsorted(self.limits[0], sums[0])
        for limits, totals in zip(self.limits[1:], sums[1:], strict=True):
            np.maximum(places, np.searchsorted(limits, totals), out=places)
        if len(peaks):
            places[(peaks > self.bounds).any(axis=0)] = self.limits.shape[1]
        return places


class RungTable:
    """All rungs, for looking up what holds batches.

    Its methods take batches as [dimension, batch]: the sums of what adds up, and the peaks of what is bounded.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._columns = [
            _Column(bounds, [(i, rung) for i, rung in enumerate(rungs) if rung.bounds == bounds])
            for bounds in sorted({rung.bounds for rung in rungs})
        ]
        self._tokens = np.array([*(rung.limits[0] for rung in rungs), np.iinfo(np.int64).max])

    def costs(self, sums: Sizes, peaks: Sizes) -> Floats:
        """The least cost of a replay for each batch; infinite where nothing holds it."""
        costs, _ = self.cheapest(sums, peaks)
        return costs

    def cheapest(self, sums: Sizes, peaks: Sizes) -> tuple[Floats, npt.NDArray[np.intp]]:
        """The least cost of a replay for each batch, and that rung; infinite, and NO_RUNG, where nothing holds it."""
        costs = np.full(sums.shape[1], np.inf)
        rungs = np.full(sums.shape[1], NO_RUNG)
        for column in self._columns:
            places = column.places(sums, peaks)
            found = column.least[places]
            better = found < costs
            costs[better], rungs[better] = found[better], column.cheapest[places[better]]
        return costs, rungs

    def smallest(self, sums: Sizes, peaks: Sizes) -> npt.NDArray[np.intp]:
        """The smallest rung that holds each batch, by tokens and then by bounds; NO_RUNG where none does."""
        rungs = np.full(sums.shape[1], NO_RUNG)
        for column in self._columns:
            found = column.indices[column.places(sums, peaks)]
            np.copyto(rungs, found, where=self._tokens[found] < self._tokens[rungs])
        return rungs

    def greedy_ends(self, sizes: Sizes, peaks: Sizes) -> list[int]:
        """The ends of batches of as many consecutive items as some rung holds; each item fits one."""
        count = sizes.shape[1]
        sums = [[0, *row.cumsum().tolist()] for row in sizes]
        columns = []
        for column in self._columns:
            too_high = np.append(np.flatnonzero((peaks > column.bounds).any(axis=0)), count)
            next_too_high = too_high[np.searchsorted(too_high, np.arange(count))].tolist()
            columns.append((column.limits[:, -1].tolist(), next_too_high))
        ends = [0]
        while (at := ends[-1]) < count:
            reached = (
                min(
                    next_too_high[at],
                    *(bisect_right(row, row[at] + most) - 1 for row, most in zip(sums, limits, strict=True)),
                )
                for limits, next_too_high in columns
            )
            ends.append(max(reached))
        return ends[1:]


def totals(sizes: Sizes, peaks: Sizes, ends: npt.NDArray[np.int64]) -> tuple[Sizes, Sizes]:
    """The sums and the peaks of the batches that end at ``ends``."""
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    highest = np.maximum.reduceat(peaks, starts, axis=1) if len(peaks) and len(ends) else peaks[:, starts]
    return (np.add.reduceat(sizes, starts, axis=1) if len(ends) else sizes[:, :0]), highest


def cheapest_cuts(sizes: Sizes, peaks: Sizes, table: RungTable, eager: EagerCosts) -> npt.NDArray[np.int64]:
    """Where to cut items, in their order, so that the batches cost least in all.

    Args:
        sizes: what adds up in a batch, of items of which each fits some rung.
        peaks: [dimension, item]: of what the largest item counts.
        table: what replays cost.
        eager: what eager calls cost.

    Returns:
        The end of each batch, ascending; the last is the number of items.
    """
    ends = np.arange(1, sizes.shape[1] + 1)
    while len(ends):
        num_units = len(ends)
        ends = ends[_cut_once(*totals(sizes, peaks, ends), table, eager) - 1]
        # One block was cut as well as it can be; what merges no more across blocks stays.
        if num_units <= WHOLE or len(ends) == num_units:
            break
    return ends


def _cut_once(sizes: Sizes, peaks: Sizes, table: RungTable, eager: EagerCosts) -> npt.NDArray[np.int64]:
    """The best ends of batches that do not reach across blocks of items."""
    count = sizes.shape[1]
    num_blocks = 1 if count <= WHOLE else -(-count // BLOCK)
    bounds = np.linspace(0, count, num_blocks + 1).astype(np.int64)
    longest = int(np.diff(bounds).max())
    width = min(longest, max(LEAST_WIDTH, MAX_CELLS // count))
    costs = cell_costs(sizes, peaks, width, table, eager)
    total = np.full((num_blocks, longest + 1), np.inf)
    total[:, 0] = 0
    came_by = np.zeros((num_blocks, longest + 1), dtype=np.int64)
    rows = np.arange(num_blocks)
    for step in range(1, longest + 1):
        wide = min(width, step)
        last = np.minimum(bounds[:-1] + step - 1, count - 1)
        # Wide batches first: of equal costs the one of fewer replays is taken.
        choices = total[:, step - wide : step] + costs[last, width - wide :]
        best = choices.argmin(axis=1)
        total[:, step], came_by[:, step] = choices[rows, best], wide - best
    return np.array(_walk_back(bounds.tolist(), came_by.tolist()), dtype=np.int64)


def _walk_back(bounds: Sequence[int], came_by: Sequence[Sequence[int]]) -> list[int]:
    """The ends of the batches on the cheapest way through each block."""
    found: list[int] = []
    for start, end, widths in zip(bounds[:-1], bounds[1:], came_by, strict=True):
        backwards, at = [], end - start
        while at:
            backwards.append(start + at)
            at -= widths[at]
        found += reversed(backwards)
    return found


def cell_costs(sizes: Sizes, peaks: Sizes, width: int, table: RungTable, eager: EagerCosts) -> Floats:
    """[item, column]: the cost of a batch that ends with the item; columns are ``width``, ``width - 1``, ..., 1 items.

    Batches that would begin before the first item cost infinitely much.
    """
    count = sizes.shape[1]
    sums = np.concatenate((np.zeros((len(sizes), 1), dtype=np.int64), sizes.cumsum(axis=1)), axis=1)
    # By width, then by item: items come in the order of their size, so that look-ups are of ascending values.
    starts = np.arange(1, count + 1) - np.arange(width, 0, -1)[:, None]
    exists = starts >= 0
    batches = (sums[:, None, 1:] - sums[:, np.maximum(starts, 0)])[:, exists]
    highest = np.empty((len(peaks), *starts.shape), dtype=np.int64)
    for row, running in zip(highest, peaks, strict=True):
        row[-1] = running
        for wide in range(1, width):
            row[-1 - wide, wide:] = np.maximum(row[-wide, wide:], running[: count - wide])
    costs = np.full(starts.shape, np.inf)
    costs[exists] = np.minimum(table.costs(batches, highest[:, exists]), eager(batches[0]))
    return costs.T
