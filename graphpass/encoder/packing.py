"""Packing: decides which items share a replay, and which budget they replay.

Without costs, packing is greedy. Items are sorted by size, smallest first. Each batch has as many consecutive items as
the largest budget and the item limit allow, and replays the smallest budget that is large enough.

With costs, the sorted items are cut into consecutive batches at the least cost, where each batch is a replay or an
eager call (:mod:`graphpass.encoder.cuts`). The plan never costs more than one replay or eager call for each item, the
greedy plan, or, if it is allowed, one eager call for all items.

:func:`pack_items` has two limits: tokens and items. The manager's batches are also limited by the patches and frames of
a key. There, sizes and limits are vectors: see :func:`plan_greedily` and :func:`plan_cheaply`.
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

from graphpass.encoder.cuts import (
    NO_RUNG,
    CallCosts,
    Floats,
    Rung,
    RungTable,
    Sizes,
    cheapest_cuts,
    greedy_ends,
    totals,
)
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


TokenCosts = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""Costs of eager calls with these token counts."""

_KEPT_COSTS = 1 << 14
"""Costs of eager calls with fewer tokens than this are cached."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Items that are encoded together.

    Attributes:
        items: indices of the items, the smallest item first.
        tokens: sum of their output tokens.
        budget: the budget to replay; None: the batch runs eagerly.
    """

    items: tuple[int, ...]
    tokens: int
    budget: int | None


@dataclass(frozen=True, slots=True)
class PackingCosts:
    """Costs of replays and eager calls, in the same unit.

    Attributes:
        replay: {budget: cost of one replay}.
        eager: the cost of one eager call as a function of its output tokens.
        max_eager_tokens: maximum output tokens of an eager call over several items; None: the largest budget. A single
            item may have more.
    """

    replay: Mapping[int, float]
    eager: Callable[[int], float]
    max_eager_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Items that are encoded together, in a plan over vectors of sizes.

    Attributes:
        items: indices of the items.
        rung: index of the rung (the graph) to replay; None: the batch runs eagerly.
    """

    items: tuple[int, ...]
    rung: int | None


def pack_items(
    tokens: Sequence[int], budgets: Sequence[int], max_items: int, *, cost: PackingCosts | None = None
) -> list[PackedBatch]:
    """Distribute items over batches. Each item is in exactly one batch; no batch exceeds its budget or ``max_items``.

    An item of no tokens is in no batch: nothing has to run for it, and the manager returns an empty result.

    The result depends only on the arguments, so all ranks compute the same. An item above the largest budget runs
    eagerly.

    Args:
        tokens: the output tokens of each item.
        budgets: the captured budgets, in any order.
        max_items: maximum number of items in a replay.
        cost: measured costs; None: pack greedily.

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
    working = [item for item, count in enumerate(counts) if count]
    sizes = np.array([[counts[item] for item in working], [1] * len(working)], dtype=np.int64)
    table = RungTable(rungs)
    if cost is None:
        planned = plan_greedily(sizes, table)
    else:
        most = max(ladder, default=0) if cost.max_eager_tokens is None else cost.max_eager_tokens
        planned = plan_cheaply(sizes, table, one_by_one(cost.eager), most)
    return [
        PackedBatch(
            tuple(working[item] for item in batch.items), total, None if batch.rung is None else ladder[batch.rung]
        )
        for batch, total in zip(planned, _tokens_of(planned, sizes[0]), strict=True)
    ]


def plan_greedily(sizes: Sizes, table: RungTable, peaks: Sizes | None = None) -> list[PlannedBatch]:
    """Pack greedily: smallest items first, as many in a batch as a rung allows, each batch in the smallest rung.

    Args:
        sizes: [dimension, item]: sizes that add up in a batch, tokens first, in the order of the rungs' limits.
        table: the rungs.
        peaks: [dimension, item]: sizes of which a batch has the maximum, in the order of the rungs' bounds; None: no
            such dimensions.

    Returns:
        The batches in the order of item sizes, then an eager batch for each item that is too large for every rung.
    """
    peaks = _or_none(peaks, sizes)
    ordered = _Ordered.of(sizes, peaks, table)
    ends = greedy_ends(table.farthest(ordered.sizes, ordered.peaks))
    smallest = table.smallest(*totals(ordered.sizes, ordered.peaks, ends)).tolist()
    batches = [PlannedBatch(items, rung) for items, rung in zip(_groups(ordered.items, ends), smallest, strict=True)]
    return batches + [PlannedBatch((item,), None) for item in ordered.unfit.tolist()]


def plan_cheaply(
    sizes: Sizes,
    table: RungTable,
    eager: TokenCosts,
    max_eager_tokens: int,
    peaks: Sizes | None = None,
    surcharges: Floats | None = None,
) -> list[PlannedBatch]:
    """The cheapest of three plans: the cuts of :func:`cheapest_cuts`, the greedy plan, and eager calls only.

    A batch runs eagerly if that is cheaper than its replay, and eager batches are merged if that is cheaper.

    Args:
        sizes: as for :func:`plan_greedily`.
        table: the rungs, with costs.
        eager: the costs of eager calls.
        max_eager_tokens: maximum output tokens of an eager call over several items.
        peaks: as for :func:`plan_greedily`.
        surcharges: [item]: what the item adds to the cost of an eager call, beyond what it adds to that of a replay;
            None: nothing.
    """
    peaks = _or_none(peaks, sizes)
    surcharges = np.zeros(sizes.shape[1]) if surcharges is None else surcharges
    if sizes.shape[1] == 1:  # fast path
        costs, chosen = table.cheapest(sizes, peaks)
        replays = chosen[0] != NO_RUNG and costs[0] <= eager(sizes[0])[0] + surcharges[0]
        return [PlannedBatch((0,), int(chosen[0]) if replays else None)]
    ordered = _Ordered.of(sizes, peaks, table)
    calls = _EagerCalls(sizes[0], surcharges, eager, max_eager_tokens)
    cuts = (
        cheapest_cuts(ordered.sizes, ordered.peaks, table, calls.over(ordered.items), max_eager_tokens),
        greedy_ends(table.farthest(ordered.sizes, ordered.peaks)),
    )
    plans = [_priced(ordered, ends, table, calls) for ends in cuts]
    plans.append(calls.plan(np.concatenate((ordered.items, ordered.unfit))))
    return min(plans, key=lambda plan: plan.cost).batches()


def plan_eagerly(tokens: npt.NDArray[np.int64], max_eager_tokens: int) -> list[PlannedBatch]:
    """Eager calls over consecutive items, as many in one call as ``max_eager_tokens`` allows."""
    groups = _groups(np.arange(len(tokens)), _joined(tokens, max_eager_tokens))
    return [PlannedBatch(items, None) for items in groups]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan as arrays, which are cheaper than records for plans that are not selected.

    Attributes:
        cost: total cost.
        items: indices of the items, batch after batch.
        ends: end of each batch in ``items``.
        rungs: rung of each batch; NO_RUNG: it runs eagerly.
    """

    cost: float
    items: npt.NDArray[np.intp]
    ends: npt.NDArray[np.int64]
    rungs: npt.NDArray[np.intp]

    def batches(self) -> list[PlannedBatch]:
        rungs = [None if rung == NO_RUNG else rung for rung in self.rungs.tolist()]
        return list(map(PlannedBatch, _groups(self.items, self.ends), rungs))


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Items sorted by size.

    Attributes:
        items: indices of the items that fit a rung.
        unfit: indices of the items that are too large for every rung; they run eagerly.
        sizes: [dimension, item] of ``items``, in their order.
        peaks: the same.
    """

    items: npt.NDArray[np.intp]
    unfit: npt.NDArray[np.intp]
    sizes: Sizes
    peaks: Sizes

    @classmethod
    def of(cls, sizes: Sizes, peaks: Sizes, table: RungTable) -> _Ordered:
        order = np.argsort(sizes[0], kind="stable")
        fits = (table.smallest(sizes, peaks) != NO_RUNG)[order]
        items = order[fits]
        return cls(items, order[~fits], sizes[:, items], peaks[:, items])


def _priced(ordered: _Ordered, ends: npt.NDArray[np.int64], table: RungTable, calls: _EagerCalls) -> _Plan:
    """The plan of the batches of items that end at ``ends``, each as the cheaper of replay and eager call."""
    items, unfit = ordered.items, ordered.unfit
    sums, highest = totals(ordered.sizes, ordered.peaks, ends)
    costs, rungs = table.cheapest(sums, highest)
    lengths = np.diff(ends, prepend=0)
    replays = costs <= calls.over(items)(ends - lengths, ends)
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
    """Plans eager calls. A call over several groups of items has at most ``most`` tokens."""

    def __init__(self, tokens: npt.NDArray[np.int64], surcharges: Floats, eager: TokenCosts, most: int) -> None:
        self._tokens, self._surcharges, self._eager, self._most = tokens, surcharges, eager, most

    def over(self, items: npt.NDArray[np.intp]) -> CallCosts:
        """Costs of calls over consecutive ``items``; infinite above the maximum of tokens for several items."""
        tokens = np.concatenate(([0], np.cumsum(self._tokens[items])))
        surcharges = np.concatenate(([0.0], np.cumsum(self._surcharges[items])))

        def costs(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Floats:
            sums = tokens[ends] - tokens[starts]
            allowed = (sums <= self._most) | (ends - starts == 1)
            found = np.full(len(sums), np.inf)
            found[allowed] = self._eager(sums[allowed])
            found += surcharges[ends] - surcharges[starts]
            return found

        return costs

    def plan(self, items: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64] | None = None) -> _Plan:
        """The cheaper of two plans of eager calls: one call for each group of items, or groups merged.

        Args:
            items: indices of the items, group after group.
            lengths: number of items in each group; None: each item is a group.
        """
        apart = np.arange(1, len(items) + 1) if lengths is None else np.cumsum(lengths)
        if not len(items):
            return _Plan(0.0, items, apart, apart)
        tokens = _sums(self._tokens[items], apart)
        joined = _joined(tokens, self._most)
        apart_cost, joined_cost = (float(self._eager(sums).sum()) for sums in (tokens, _sums(tokens, joined)))
        ends = apart[joined - 1] if joined_cost <= apart_cost else apart
        cost = min(joined_cost, apart_cost) + float(self._surcharges[items].sum())
        return _Plan(cost, items, ends, np.full(len(ends), NO_RUNG))


def _joined(tokens: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """The ends of calls that merge consecutive groups up to ``most`` tokens. A larger group is a call by itself."""
    sums = np.concatenate(([0], np.cumsum(tokens)))
    reached = np.searchsorted(sums, sums[:-1] + most, side="right") - 1
    return greedy_ends(np.maximum(reached, np.arange(1, len(sums))))


def _sums(values: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sums of consecutive runs of values, which end at ``ends`` and are not empty."""
    return np.add.reduceat(values, np.concatenate(([0], ends[:-1]))) if len(ends) else values[:0]


def _tokens_of(batches: Sequence[PlannedBatch], tokens: npt.NDArray[np.int64]) -> list[int]:
    """The tokens of each batch."""
    items = list(itertools.chain.from_iterable([batch.items for batch in batches]))
    ends = np.cumsum([len(batch.items) for batch in batches], dtype=np.int64)
    return cast("list[int]", _sums(tokens[items], ends).tolist())


def _groups(order: npt.NDArray[np.intp], ends: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The items of each batch; the batches end at ``ends`` in ``order``."""
    items = order.tolist()
    bounds = [0, *ends.tolist()]
    return [tuple(items[start:end]) for start, end in itertools.pairwise(bounds)]


def one_by_one(eager: Callable[[int], float]) -> TokenCosts:
    """A vectorised ``eager``, which is called once for each distinct token count."""
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
    """The cost of a replay of ``budget``; 0 without costs.

    Raises:
        EncoderConfigError: the cost is missing, negative or not finite.
    """
    if cost is None:
        return 0.0
    if budget not in cost.replay or not 0 <= cost.replay[budget] < math.inf:
        raise EncoderConfigError(
            f"budget {budget} has no cost",
            expected=f"a finite cost of at least 0 of one replay for every budget, including {budget}",
            found=f"costs {dict(cost.replay)}",
            remedy="measure every budget, or pack without costs",
        )
    return float(cost.replay[budget])


def _or_none(peaks: Sizes | None, sizes: Sizes) -> Sizes:
    return np.zeros((0, sizes.shape[1]), dtype=np.int64) if peaks is None else peaks
