"""Packing: which items share a replay, and which budget they replay.

Without costs it is a greedy: items in the order of their size, smallest first, as many together as the largest budget
and the item limit allow, each batch in the smallest budget that holds it.

With measured costs the cheapest way is sought to cut the items, in the same order, into consecutive batches, each a
replay or an eager call (:mod:`graphpass.encoder.cuts`). One item a replay, and the greedy's batches, are such cuts too:
the plan never costs more than they do, nor than one eager call for all, where that is allowed.

:func:`pack_items` is the form for one limit, tokens. The manager's batches also have to keep within the patches, frames
and items of a key: sizes and limits are vectors there, see :func:`plan_greedily` and :func:`plan_cheaply`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphpass.encoder.cuts import NO_RUNG, EagerCosts, Rung, RungTable, Sizes, cheapest_cuts, totals
from graphpass.errors import EncoderConfigError

__all__ = [
    "PackedBatch",
    "PackingCosts",
    "PlannedBatch",
    "one_by_one",
    "pack_items",
    "plan_cheaply",
    "plan_eagerly",
    "plan_greedily",
    "replay_cost",
]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Items that run together.

    Attributes:
        items: their indices, smallest first.
        tokens: their output tokens in all.
        budget: what they replay; None: they run eagerly.
    """

    items: tuple[int, ...]
    tokens: int
    budget: int | None


@dataclass(frozen=True, slots=True)
class PackingCosts:
    """What running costs, in any one unit.

    Attributes:
        replay: {budget: cost of one replay}.
        eager: the cost of one eager call over a number of output tokens.
        max_eager_tokens: how many tokens the items that are run eagerly for being cheaper may have together in one
            call; None: as many as the largest budget. A single item may be larger.
    """

    replay: Mapping[int, float]
    eager: Callable[[int], float]
    max_eager_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Items that run together, as the plans for vectors of sizes have them.

    Attributes:
        items: their indices.
        rung: index of what they replay; None: they run eagerly.
    """

    items: tuple[int, ...]
    rung: int | None


def pack_items(
    tokens: Sequence[int], budgets: Sequence[int], max_items: int, *, cost: PackingCosts | None = None
) -> list[PackedBatch]:
    """Distribute items over batches: each item is in exactly one, no batch exceeds its budget or ``max_items``.

    The result depends on nothing but the arguments, so that all ranks come to the same one.

    Args:
        tokens: the output tokens of each item; 0 is allowed.
        budgets: those that have graphs, in any order.
        max_items: how many items a replay may have.
        cost: measured costs; None packs greedily. An item above the largest budget runs eagerly.

    Raises:
        EncoderConfigError: a token count is negative, ``max_items`` is below 1, or a budget has no cost.
    """
    ladder = sorted(set(budgets))
    counts = [operator.index(count) for count in tokens]
    if max_items < 1 or any(count < 0 for count in counts):
        raise EncoderConfigError(
            "items cannot be packed",
            expected="max_items of at least 1, and token counts of at least 0",
            found=f"max_items={max_items}, smallest count {min(counts, default=0)}",
            remedy="check the item specs that the model returns",
        )
    rungs = [Rung((budget, max_items), replay_cost(budget, cost)) for budget in ladder]
    sizes = np.array([counts, [1] * len(counts)], dtype=np.int64)
    table = RungTable(rungs)
    if cost is None:
        planned = plan_greedily(sizes, table)
    else:
        most = max(ladder, default=0) if cost.max_eager_tokens is None else cost.max_eager_tokens
        planned = plan_cheaply(sizes, table, one_by_one(cost.eager), most)
    return [
        PackedBatch(
            batch.items,
            sum(counts[item] for item in batch.items),
            None if batch.rung is None else ladder[batch.rung],
        )
        for batch in planned
    ]


def plan_greedily(sizes: Sizes, table: RungTable, peaks: Sizes | None = None) -> list[PlannedBatch]:
    """Smallest item first, as many together as some rung holds, each batch in the smallest rung that does.

    Args:
        sizes: [dimension, item]: what adds up in a batch, tokens first, as in the rungs' limits.
        table: what has a graph.
        peaks: [dimension, item]: of what the largest item counts, as in the rungs' bounds; None: nothing.

    Returns:
        Batches from the smallest items on; items that no rung holds come last, each by itself and eagerly.
    """
    peaks = _or_none(peaks, sizes)
    fitting, unfit = _in_order(sizes, peaks, table)
    ordered, ordered_peaks = sizes[:, fitting], peaks[:, fitting]
    ends = np.array(table.greedy_ends(ordered, ordered_peaks), dtype=np.int64)
    smallest = table.smallest(*totals(ordered, ordered_peaks, ends)).tolist()
    batches = [PlannedBatch(items, rung) for items, rung in zip(_groups(fitting, ends), smallest, strict=True)]
    return batches + [PlannedBatch(items, None) for items in unfit]


def plan_cheaply(
    sizes: Sizes, table: RungTable, eager: EagerCosts, max_eager_tokens: int, peaks: Sizes | None = None
) -> list[PlannedBatch]:
    """The cheapest of the cuts of :func:`cheapest_cuts`, the greedy's batches, and one eager call for all.

    A batch whose eager call is cheaper than its replay runs eagerly, and eager calls are joined where that is cheaper.

    Args:
        sizes: as for :func:`plan_greedily`.
        table: what has a graph, with its cost.
        eager: the costs of eager calls over these token counts.
        max_eager_tokens: how large an eager call of several items may be.
        peaks: as for :func:`plan_greedily`.
    """
    peaks = _or_none(peaks, sizes)
    if sizes.shape[1] == 1:  # there is nothing to cut
        costs, chosen = table.cheapest(sizes, peaks)
        replays = chosen[0] != NO_RUNG and costs[0] <= eager(sizes[0])[0]
        return [PlannedBatch((0,), int(chosen[0]) if replays else None)]
    fitting, unfit = _in_order(sizes, peaks, table)
    calls = _EagerCalls(sizes[0], eager, max_eager_tokens)
    ordered, ordered_peaks = sizes[:, fitting], peaks[:, fitting]
    found = []
    for ends in (
        cheapest_cuts(ordered, ordered_peaks, table, calls.costs),
        np.array(table.greedy_ends(ordered, ordered_peaks), dtype=np.int64),
    ):
        sums, highest = totals(ordered, ordered_peaks, ends)
        costs, chosen = table.cheapest(sums, highest)
        replays = costs <= calls.costs(sums[0])
        groups = _groups(fitting, ends)
        eager_cost, eager_items = calls.join(
            [items for items, is_replay in zip(groups, replays, strict=True) if not is_replay] + unfit
        )
        batches = [PlannedBatch(groups[at], int(chosen[at])) for at in np.flatnonzero(replays)]
        found.append((costs[replays].sum() + eager_cost, batches + eager_items))
    found.append(calls.join([(item,) for item in fitting.tolist()] + unfit))
    return min(found, key=lambda plan: plan[0])[1]


def plan_eagerly(tokens: npt.NDArray[np.int64], max_eager_tokens: int) -> list[PlannedBatch]:
    """Items in their order, as many in one eager call as its limit allows."""
    return [
        PlannedBatch(items, None) for items in _joined([(i,) for i in range(len(tokens))], tokens, max_eager_tokens)
    ]


class _EagerCalls:
    """Eager calls over some of the items, of which the joined ones may not have too many tokens."""

    def __init__(self, tokens: npt.NDArray[np.int64], eager: EagerCosts, most: int) -> None:
        self._tokens, self._eager, self._most = tokens, eager, most

    def costs(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Costs of calls over several items; infinite where one would be too large."""
        costs = np.full(len(tokens), np.inf)
        allowed = tokens <= self._most
        if allowed.any():
            costs[allowed] = self._eager(tokens[allowed])
        return costs

    def join(self, groups: Sequence[tuple[int, ...]]) -> tuple[float, list[PlannedBatch]]:
        """``groups`` as eager calls, each by itself or joined as far as allowed, whichever is cheaper."""
        if not groups:
            return 0.0, []
        joined = _joined(groups, self._tokens, self._most)
        apart_cost, joined_cost = self._cost(groups), self._cost(joined)
        calls = joined if joined_cost <= apart_cost else groups
        return min(joined_cost, apart_cost), [PlannedBatch(items, None) for items in calls]

    def _cost(self, groups: Sequence[tuple[int, ...]]) -> float:
        return float(self._eager(_tokens_of(groups, self._tokens)).sum())


def _joined(groups: Sequence[tuple[int, ...]], tokens: npt.NDArray[np.int64], most: int) -> list[tuple[int, ...]]:
    """Consecutive ``groups`` put together as long as they have at most ``most`` tokens; a larger one stays alone."""
    parts: list[list[int]] = []
    total = most + 1
    for items, own in zip(groups, _tokens_of(groups, tokens).tolist(), strict=True):
        if total + own <= most:
            parts[-1] += items
            total += own
        else:
            parts.append(list(items))
            total = own
    return [tuple(part) for part in parts]


def _tokens_of(groups: Sequence[tuple[int, ...]], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The tokens of each group; none is empty."""
    if not groups:
        return tokens[:0]
    starts = list(itertools.accumulate(map(len, groups[:-1]), initial=0))
    return np.add.reduceat(tokens[[item for items in groups for item in items]], starts)


def _in_order(sizes: Sizes, peaks: Sizes, table: RungTable) -> tuple[npt.NDArray[np.intp], list[tuple[int, ...]]]:
    """The items that fit some rung, smallest first, and those that do not, each in a group of its own."""
    order = np.argsort(sizes[0], kind="stable")
    fits = (table.smallest(sizes, peaks) != NO_RUNG)[order]
    return order[fits], [(item,) for item in order[~fits].tolist()]


def _groups(order: npt.NDArray[np.intp], ends: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The items of each batch."""
    items = order.tolist()
    bounds = [0, *ends.tolist()]
    return [tuple(items[start:end]) for start, end in itertools.pairwise(bounds)]


def one_by_one(eager: Callable[[int], float]) -> EagerCosts:
    """``eager`` for many counts, asked once for each that differs."""

    def costs(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        counts = np.unique(tokens)
        known = np.array([eager(int(count)) for count in counts], dtype=np.float64)
        return known[np.searchsorted(counts, tokens)]

    return costs


def replay_cost(budget: int, cost: PackingCosts | None) -> float:
    """The cost of a replay of ``budget``; 0 where costs do not matter.

    Raises:
        EncoderConfigError: the costs do not have it.
    """
    if cost is None:
        return 0.0
    if budget not in cost.replay or not 0 <= cost.replay[budget] < math.inf:
        raise EncoderConfigError(
            f"budget {budget} has no cost",
            expected=f"a cost from 0 up, and finite, of one replay for each of the budgets, {budget} among them",
            found=f"costs {dict(cost.replay)}",
            remedy="measure every budget, or pack without costs",
        )
    return float(cost.replay[budget])


def _or_none(peaks: Sizes | None, sizes: Sizes) -> Sizes:
    return np.zeros((0, sizes.shape[1]), dtype=np.int64) if peaks is None else peaks
