"""Cuts a sequence of items into consecutive batches at the least cost.

A batch either replays the cheapest graph whose limits it does not exceed, or runs eagerly. The best cuts are a shortest
path, computed by dynamic programming over the items. To be fast for thousands of items, it evaluates a bounded number
of cells (a first item and a number of items), and only cells that fit a graph or an eager call. Long sequences are cut
within blocks, all blocks at once; in a second round the resulting batches are cut as if they were items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["NO_RUNG", "CallCosts", "Floats", "Rung", "RungTable", "Sizes", "cheapest_cuts", "greedy_ends", "totals"]

Sizes = npt.NDArray[np.int64]
"""[dimension, item]: sizes that add up in a batch, tokens first, then the other sizes that graphs limit."""

Floats = npt.NDArray[np.float64]
CallCosts = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Floats]
"""Costs of eager calls over consecutive items, from their first items and their ends; infinite where not allowed."""

NO_RUNG = -1
WHOLE = 128
"""Up to this number of items the cuts are optimal."""
BLOCK = 64
"""Longer sequences are cut in blocks of this many items."""
MAX_CELLS = 1 << 14
LEAST_WIDTH = 8
ROUNDS = 2
"""A third round improves the cost by almost nothing."""


@dataclass(frozen=True, slots=True)
class Rung:
    """The limits and the cost of one graph.

    Attributes:
        limits: maximum of the sum over a batch, for each dimension of sizes, tokens first.
        cost: cost of one replay.
        bounds: maximum of the largest value in a batch, for each dimension of peaks.
    """

    limits: tuple[int, ...]
    cost: float = 0.0
    bounds: tuple[int, ...] = ()


class _Column:
    """The rungs with the same bounds, ascending: each limit of a rung is at least that of the rung before."""

    def __init__(self, bounds: tuple[int, ...], rungs: Sequence[tuple[int, Rung]]) -> None:
        ascending = sorted(rungs, key=lambda pair: pair[1].limits)
        self.bounds = np.array(bounds, dtype=np.int64)[:, None]
        self.limits = np.array([rung.limits for _, rung in ascending], dtype=np.int64).T
        # The last entry, NO_RUNG with infinite cost, is for batches that fit no rung.
        self.indices = np.array([*(index for index, _ in ascending), NO_RUNG])
        costs = [*(rung.cost for _, rung in ascending), np.inf]
        cheapest = list(range(len(costs)))
        for place in reversed(range(len(ascending))):
            if costs[cheapest[place + 1]] < costs[place]:
                cheapest[place] = cheapest[place + 1]
        self.cheapest = self.indices[cheapest]
        self.least = np.array(costs)[cheapest]

    def places(self, sums: Sizes, peaks: Sizes) -> npt.NDArray[np.intp]:
        """The position of the smallest rung that each batch fits; the number of rungs if it fits none."""
        places: npt.NDArray[np.intp] = np.searchsorted(self.limits[0], sums[0])
        for limits, totals in zip(self.limits[1:], sums[1:], strict=True):
            np.maximum(places, np.searchsorted(limits, totals), out=places)
        if len(peaks):
            places[(peaks > self.bounds).any(axis=0)] = self.limits.shape[1]
        return places

    def costs(self, sums: Sizes, peaks: Sizes) -> Floats:
        """The least cost of a replay for each batch."""
        costs: Floats = self.least[self.places(sums, peaks)]
        return costs


class RungTable:
    """Looks up the rungs that batches fit.

    Its methods take batches as [dimension, batch]: ``sums`` of sizes, and ``peaks``, the largest values.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._columns = [
            _Column(bounds, [(i, rung) for i, rung in enumerate(rungs) if rung.bounds == bounds])
            for bounds in sorted({rung.bounds for rung in rungs})
        ]
        self._tokens = np.array([*(rung.limits[0] for rung in rungs), np.iinfo(np.int64).max])

    def costs(self, sums: Sizes, peaks: Sizes) -> Floats:
        """The least cost of a replay for each batch; infinite if it fits no rung."""
        costs = self._columns[0].costs(sums, peaks) if self._columns else np.full(sums.shape[1], np.inf)
        for column in self._columns[1:]:
            np.minimum(costs, column.costs(sums, peaks), out=costs)
        return costs

    def cheapest(self, sums: Sizes, peaks: Sizes) -> tuple[Floats, npt.NDArray[np.intp]]:
        """The least cost of a replay for each batch, and its rung; infinite and NO_RUNG if it fits no rung."""
        costs = np.full(sums.shape[1], np.inf)
        rungs = np.full(sums.shape[1], NO_RUNG)
        for column in self._columns:
            places = column.places(sums, peaks)
            found = column.least[places]
            better = found < costs
            costs[better], rungs[better] = found[better], column.cheapest[places[better]]
        return costs, rungs

    def smallest(self, sums: Sizes, peaks: Sizes) -> npt.NDArray[np.intp]:
        """The smallest rung that each batch fits, by tokens and then by bounds; NO_RUNG if it fits none."""
        rungs = np.full(sums.shape[1], NO_RUNG)
        for column in self._columns:
            found = column.indices[column.places(sums, peaks)]
            np.copyto(rungs, found, where=self._tokens[found] < self._tokens[rungs])
        return rungs

    def farthest(self, sizes: Sizes, peaks: Sizes) -> npt.NDArray[np.intp]:
        """For each item, the end of the longest batch that starts with it and fits a rung; at least one item long."""
        count = sizes.shape[1]
        sums = _running(sizes)
        ends = np.arange(1, count + 1)
        for column in self._columns:
            reached = np.full(count, count)
            for row, most in zip(sums, column.limits[:, -1], strict=True):
                np.minimum(reached, np.searchsorted(row, row[:-1] + most, side="right") - 1, out=reached)
            if len(peaks):
                too_high = np.append(np.flatnonzero((peaks > column.bounds).any(axis=0)), count)
                np.minimum(reached, too_high[np.searchsorted(too_high, np.arange(count))], out=reached)
            np.maximum(ends, reached, out=ends)
        return ends


def greedy_ends(farthest: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The ends of consecutive batches, each as long as ``farthest`` (see :meth:`RungTable.farthest`) allows."""
    reached, ends, at = farthest.tolist(), [], 0
    while at < len(reached):
        at = reached[at]
        ends.append(at)
    return np.array(ends, dtype=np.int64)


def totals(sizes: Sizes, peaks: Sizes, ends: npt.NDArray[np.int64]) -> tuple[Sizes, Sizes]:
    """The sums and the peaks of the batches that end at ``ends``."""
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    highest = np.maximum.reduceat(peaks, starts, axis=1) if len(peaks) and len(ends) else peaks[:, starts]
    return (np.add.reduceat(sizes, starts, axis=1) if len(ends) else sizes[:, :0]), highest


def cheapest_cuts(
    sizes: Sizes, peaks: Sizes, table: RungTable, eager: CallCosts, max_eager_tokens: int
) -> npt.NDArray[np.int64]:
    """Cut the items, in their order, into batches with the least total cost.

    Args:
        sizes: [dimension, item]: sizes that add up in a batch. Each item must fit a rung.
        peaks: [dimension, item]: sizes of which a batch has the maximum.
        table: the rungs, with costs of replays.
        eager: costs of eager calls.
        max_eager_tokens: maximum tokens of an eager call over several items; ``eager`` is infinite above it.

    Returns:
        The end of each batch, ascending; the last is the number of items.
    """
    ends = np.arange(1, sizes.shape[1] + 1)
    for _ in range(ROUNDS if len(ends) else 0):
        num_units = len(ends)
        units, highest = totals(sizes, peaks, ends)
        ends = ends[_cut_once(units, highest, ends, table, eager, max_eager_tokens) - 1]
        if num_units <= WHOLE:  # one block: the cuts are optimal
            break
    return ends


def _cut_once(
    sizes: Sizes,
    peaks: Sizes,
    ends: npt.NDArray[np.int64],
    table: RungTable,
    eager: CallCosts,
    max_eager_tokens: int,
) -> npt.NDArray[np.int64]:
    """The best ends of batches of units, which end at these items and do not cross the boundaries of blocks.

    All blocks are cut at once, from their last items backwards, so the place of an item in its block is counted from
    the end of the block. Blank items without cost are prepended to make all blocks equally long.
    """
    count = sizes.shape[1]
    num_blocks = 1 if count <= WHOLE else -(-count // BLOCK)
    length = -(-count // num_blocks)
    block, place = np.divmod(np.arange(count - 1, -1, -1), length)
    sums = _running(sizes)[0]
    longest = np.maximum(
        table.farthest(sizes, peaks), np.searchsorted(sums, sums[:-1] + max_eager_tokens, side="right") - 1
    )
    widths = np.clip(longest - np.arange(count), 1, place + 1)
    width = int(widths.max())
    if widths.sum() > MAX_CELLS:
        width = min(width, max(LEAST_WIDTH, MAX_CELLS // count))
    starts, wide = _cells(np.minimum(widths, width))
    costs = np.full((length, num_blocks, width), np.inf)
    costs[count - (num_blocks - 1) * length :, -1, -1] = 0  # blank items
    # Wide batches come first, so that among equal costs the plan with fewer replays is selected.
    bounds = np.concatenate(([0], ends))
    priced = cell_costs(sizes, peaks, starts, wide, table, eager(bounds[starts], bounds[starts + wide]))
    costs[place[starts], block[starts], width - wide] = priced
    return _walked(_widths_by_place(costs), count)


def _cells(widths: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The first item and the number of items of each batch with at most ``widths[first item]`` items."""
    starts = np.repeat(np.arange(len(widths)), widths)
    first_cell = np.cumsum(widths) - widths
    return starts, np.arange(len(starts)) - first_cell[starts] + 1


def _widths_by_place(costs: Floats) -> npt.NDArray[np.intp]:
    """[place, block]: number of items of the batch that starts there, on the cheapest path to the end of the block."""
    length, num_blocks, width = costs.shape
    total = np.full((num_blocks, width + length), np.inf)
    total[:, width - 1] = 0
    came_by = np.empty((length, num_blocks), dtype=np.intp)
    rows = np.arange(num_blocks)
    choices = np.empty((num_blocks, width))
    for place in range(length):
        np.add(costs[place], total[:, place : place + width], out=choices)
        best = choices.argmin(axis=1, out=came_by[place])
        total[:, place + width] = choices[rows, best]
    came_by -= width
    return np.negative(came_by, out=came_by)


def _walked(widths: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.int64]:
    """The ends of the batches of all blocks, ascending."""
    length, num_blocks = widths.shape
    by_block = widths.T.tolist()
    blank = num_blocks * length - count
    ends = []
    for block in reversed(range(num_blocks)):
        left, end_of_block = length, count - block * length
        while left:
            left -= by_block[block][left - 1]
            ends.append(end_of_block - left)
    return np.array(ends[blank:], dtype=np.int64)


def cell_costs(
    sizes: Sizes,
    peaks: Sizes,
    starts: npt.NDArray[np.intp],
    wide: npt.NDArray[np.intp],
    table: RungTable,
    eager: Floats,
) -> Floats:
    """The cost of each batch: ``wide[i]`` units from unit ``starts[i]``, as a replay or, for ``eager[i]``, eagerly."""
    sums = _running(sizes)
    batches = sums.take(starts + wide, axis=1)
    batches -= sums.take(starts, axis=1)
    highest = np.empty((len(peaks), len(starts)), dtype=np.int64)
    for row, running in zip(highest, peaks, strict=True):
        row[:] = _highest(running, int(wide.max()))[wide - 1, starts]
    return np.minimum(table.costs(batches, highest), eager)


def _highest(peaks: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """[number of items - 1, first item]: the maximum over consecutive peaks; undefined beyond the last item."""
    highest = np.empty((width, len(peaks)), dtype=np.int64)
    highest[0] = peaks
    for wide in range(1, width):
        np.maximum(highest[wide - 1, :-wide], peaks[wide:], out=highest[wide, :-wide])
    return highest


def _running(sizes: Sizes) -> Sizes:
    """Prefix sums: [dimension, n] is the sum of the first n items."""
    sums = np.zeros((len(sizes), sizes.shape[1] + 1), dtype=np.int64)
    np.cumsum(sizes, axis=1, out=sums[:, 1:])
    return sums
