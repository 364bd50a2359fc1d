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
from typing import cast

import numpy as np
import numpy.typing as npt

from graphpass.encoder.cuts import NO_RUNG, EagerCosts, Rung, RungTable, Sizes, cheapest_cuts, greedy_ends, totals
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


_KEPT_COSTS = 1 << 14
"""Token counts below it are asked for but once."""


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
    counts = list(map(operator.index, tokens))
    if max_items < 1 or min(counts, default=0) < 0:
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
        PackedBatch(batch.items, total, None if batch.rung is None else ladder[batch.rung])
        for batch, total in zip(planned, _tokens_of(planned, sizes[0]), strict=True)
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
    ends = greedy_ends(table.farthest(ordered, ordered_peaks))
    smallest = table.smallest(*totals(ordered, ordered_peaks, ends)).tolist()
    batches = [PlannedBatch(items, rung) for items, rung in zip(_groups(fitting, ends), smallest, strict=True)]
    return batches + [PlannedBatch((item,), None) for item in unfit.tolist()]


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
    ordered, ordered_peaks = sizes[:, fitting], peaks[:, fitting]
    calls = _EagerCalls(sizes[0], eager, max_eager_tokens)
    cuts = (
        cheapest_cuts(ordered, ordered_peaks, table, calls.costs, max_eager_tokens),
        greedy_ends(table.farthest(ordered, ordered_peaks)),
    )
    plans = [_priced(fitting, unfit, ordered, ordered_peaks, ends, table, calls) for ends in cuts]
    plans.append(calls.plan(np.concatenate((fitting, unfit))))
    return min(plans, key=lambda plan: plan.cost).batches()


def plan_eagerly(tokens: npt.NDArray[np.int64], max_eager_tokens: int) -> list[PlannedBatch]:
    """Items in their order, as many in one eager call as its limit allows."""
    groups = _groups(np.arange(len(tokens)), _joined(tokens, max_eager_tokens))
    return [PlannedBatch(items, None) for items in groups]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan in arrays; most plans are only compared.

    Attributes:
        cost: of everything.
        items: batch after batch.
        ends: of the batches, in ``items``.
        rungs: what each of them replays; NO_RUNG: it runs eagerly.
    """

    cost: float
    items: npt.NDArray[np.intp]
    ends: npt.NDArray[np.int64]
    rungs: npt.NDArray[np.intp]

    def batches(self) -> list[PlannedBatch]:
        rungs = [None if rung == NO_RUNG else rung for rung in self.rungs.tolist()]
        return list(map(PlannedBatch, _groups(self.items, self.ends), rungs))


def _priced(
    items: npt.NDArray[np.intp],
    unfit: npt.NDArray[np.intp],
    sizes: Sizes,
    peaks: Sizes,
    ends: npt.NDArray[np.int64],
    table: RungTable,
    calls: _EagerCalls,
) -> _Plan:
    """Consecutive batches of ``items``, each a replay or eager, whichever costs less, and ``unfit`` eagerly."""
    sums, highest = totals(sizes, peaks, ends)
    costs, rungs = table.cheapest(sums, highest)
    replays = costs <= calls.costs(sums[0])
    lengths = np.diff(ends, prepend=0)
    is_replayed = np.repeat(replays, lengths)
    eager = calls.plan(
        np.concatenate((items[~is_replayed], unfit)),
        np.concatenate((lengths[~replays], np.ones(len(unfit), dtype=np.int64))),
    )
    replayed_ends = np.cumsum(lengths[replays])
    return _Plan(
        costs[replays].sum() + eager.cost,
        np.concatenate((items[is_replayed], eager.items)),
        np.concatenate((replayed_ends, is_replayed.sum() + eager.ends)),
        np.concatenate((rungs[replays], eager.rungs)),
    )


class _EagerCalls:
    """Eager calls over some of the items, of which the joined ones may not have too many tokens."""

    def __init__(self, tokens: npt.NDArray[np.int64], eager: EagerCosts, most: int) -> None:
        self._tokens, self._eager, self._most = tokens, eager, most

    def costs(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Costs of calls over several items; infinite where one would be too large."""
        allowed = tokens <= self._most
        if allowed.all():
            return self._eager(tokens)
        costs = np.full(len(tokens), np.inf)
        costs[allowed] = self._eager(tokens[allowed])
        return costs

    def plan(self, items: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64] | None = None) -> _Plan:
        """Eager calls over ``items``, each group of them by itself or joined as far as allowed, whichever is cheaper.

        Args:
            items: group after group.
            lengths: of the groups; None: each item is one.
        """
        apart = np.arange(1, len(items) + 1) if lengths is None else np.cumsum(lengths)
        if not len(items):
            return _Plan(0.0, items, apart, apart)
        tokens = _sums(self._tokens[items], apart)
        joined = _joined(tokens, self._most)
        apart_cost, joined_cost = (float(self._eager(sums).sum()) for sums in (tokens, _sums(tokens, joined)))
        ends = apart[joined - 1] if joined_cost <= apart_cost else apart
        return _Plan(min(joined_cost, apart_cost), items, ends, np.full(len(ends), NO_RUNG))


def _joined(tokens: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """The ends of calls over consecutive groups of at most ``most`` tokens together; a larger one stays alone."""
    sums = np.concatenate(([0], np.cumsum(tokens)))
    reached = np.searchsorted(sums, sums[:-1] + most, side="right") - 1
    return greedy_ends(np.maximum(reached, np.arange(1, len(sums))))


def _sums(values: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sums of consecutive values that end at ``ends``; none is empty."""
    return np.add.reduceat(values, np.concatenate(([0], ends[:-1]))) if len(ends) else values[:0]


def _tokens_of(batches: Sequence[PlannedBatch], tokens: npt.NDArray[np.int64]) -> list[int]:
    """The tokens of each batch."""
    items = list(itertools.chain.from_iterable([batch.items for batch in batches]))
    ends = np.cumsum([len(batch.items) for batch in batches], dtype=np.int64)
    return cast("list[int]", _sums(tokens[items], ends).tolist())


def _in_order(sizes: Sizes, peaks: Sizes, table: RungTable) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The items that fit some rung, smallest first, and those that do not."""
    order = np.argsort(sizes[0], kind="stable")
    fits = (table.smallest(sizes, peaks) != NO_RUNG)[order]
    return order[fits], order[~fits]


def _groups(order: npt.NDArray[np.intp], ends: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The items of each batch."""
    items = order.tolist()
    bounds = [0, *ends.tolist()]
    return [tuple(items[start:end]) for start, end in itertools.pairwise(bounds)]


def one_by_one(eager: Callable[[int], float]) -> EagerCosts:
    """``eager`` for many counts, asked once for each that differs."""
    known = np.full(_KEPT_COSTS, np.nan)

    def costs(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        if tokens.max(initial=0) >= len(known):
            counts = np.unique(tokens)
            return _asked(eager, counts)[np.searchsorted(counts, tokens)]
        new = np.flatnonzero(np.bincount(tokens[np.isnan(known[tokens])]))
        known[new] = _asked(eager, new)
        return known[tokens]

    return costs


def _asked(eager: Callable[[int], float], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.fromiter(map(eager, counts.tolist()), np.float64, len(counts))


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
