"""Plans the batches of a request: which items share a call, and which key each batch replays.

Without costs, packing is greedy. Items are sorted by size, smallest first. Each batch has as many consecutive items as
the largest key and the item limit allow, and replays the smallest key that is large enough.

With costs, the sorted items are cut into consecutive batches at the least cost, where each batch is a replay or an
eager call. The plan never costs more than one replay or eager call for each item, the greedy plan, or, if it is
allowed, one eager call for all items.

:func:`pack_items` has two limits: tokens and items. The manager's batches are also limited by the patches and frames of
a key. So sizes and limits are vectors.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from graphpass.encoder.protocol import EncoderCudaGraphConfig, EncoderGraphKey, EncoderItemSpec, group_of, grouped
from graphpass.errors import EncoderConfigError

if TYPE_CHECKING:
    from graphpass.encoder.costs import EncoderCosts

__all__ = [
    "BatchPlanner",
    "PackedBatch",
    "PackingCosts",
    "PlannedBatch",
    "Rung",
    "RungTable",
    "one_by_one",
    "pack_items",
    "plan_cheaply",
    "plan_eagerly",
    "plan_greedily",
    "replay_cost",
]

Sizes = npt.NDArray[np.int64]
"""[dimension, item]: sizes that add up in a batch, tokens first, then the other sizes that graphs limit."""
Floats = npt.NDArray[np.float64]
TokenCosts = Callable[[npt.NDArray[np.int64]], Floats]
"""Costs of eager calls with these token counts."""

_KEPT_COSTS = 1 << 14
"""Number of token counts whose cost of an eager call is cached."""
_KEPT_PLANS, _KEPT_ITEMS = 256, 256
NO_RUNG = -1
LONGEST, SHORTEST = 128, 8
"""Bounds on the items of a batch: up to the first number of items a plan is optimal."""
MAX_CELLS = 1 << 15
"""Batches that are priced for one plan; above it, the bound on the items of a batch is lowered."""


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
    """Items that are encoded together.

    Attributes:
        items: indices of the items.
        key: the key to replay; None: the batch runs eagerly.
    """

    items: tuple[int, ...]
    key: Any


@dataclass(frozen=True, slots=True)
class Rung:
    """The limits and the cost of one graph.

    Attributes:
        key: its key.
        limits: maximum of the sum over a batch, for each dimension of sizes, tokens first.
        cost: cost of one replay.
        bounds: maximum of the largest value in a batch, for each dimension of peaks.
    """

    key: Any
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
        if len(peaks):  # guard: encoder_limit_axis
            places[(peaks > self.bounds).any(axis=0)] = self.limits.shape[1]
        return places


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
        self.keys = (*(rung.key for rung in rungs), None)  # the last one is NO_RUNG's

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
    rungs = [Rung(budget, (budget, max_items), replay_cost(budget, cost)) for budget in ladder]
    working = [item for item, count in enumerate(counts) if count]
    sizes = np.array([[counts[item] for item in working], [1] * len(working)], dtype=np.int64)
    table = RungTable(rungs)
    if cost is None:
        planned = plan_greedily(sizes, table)
    else:
        most = max(ladder, default=0) if cost.max_eager_tokens is None else cost.max_eager_tokens
        planned = plan_cheaply(sizes, table, one_by_one(cost.eager), most)
    groups = [(tuple(working[item] for item in batch.items), batch.key) for batch in planned]
    return [PackedBatch(items, sum(map(counts.__getitem__, items)), key) for items, key in groups]


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
    ends = _greedy_ends(table.farthest(ordered.sizes, ordered.peaks))
    smallest = table.smallest(*_totals(ordered.sizes, ordered.peaks, ends))
    groups = _groups(ordered.items.tolist(), ends)
    batches = [PlannedBatch(items, table.keys[rung]) for items, rung in zip(groups, smallest, strict=True)]
    return batches + [PlannedBatch((item,), None) for item in ordered.unfit.tolist()]


def plan_cheaply(
    sizes: Sizes,
    table: RungTable,
    eager: TokenCosts,
    max_eager_tokens: int,
    peaks: Sizes | None = None,
    surcharges: Floats | None = None,
) -> list[PlannedBatch]:
    """The cheapest of three plans: the cheapest cuts, the greedy plan, and eager calls only.

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
    ordered = _Ordered.of(sizes, peaks, table)
    calls = _EagerCalls(
        sizes[0], np.zeros(sizes.shape[1]) if surcharges is None else surcharges, eager, max_eager_tokens
    )
    # guard: encoder_greedy_plan
    cuts = (_cheapest_ends(ordered, table, calls), _greedy_ends(table.farthest(ordered.sizes, ordered.peaks)))
    plans = [_priced(ordered, ends, table, calls) for ends in cuts]
    # guard: encoder_eager_plan
    plans.append(calls.plan([(item,) for item in (*ordered.items.tolist(), *ordered.unfit.tolist())]))
    return min(plans, key=lambda plan: plan[0])[1]


def plan_eagerly(tokens: npt.NDArray[np.int64], max_eager_tokens: int) -> list[PlannedBatch]:
    """Eager calls over consecutive items, as many in one call as ``max_eager_tokens`` allows."""
    groups = _groups(range(len(tokens)), _joined(tokens, max_eager_tokens))
    return [PlannedBatch(items, None) for items in groups]


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


_Plan = tuple[float, list[PlannedBatch]]
"""The total cost, and the batches."""


def _priced(ordered: _Ordered, ends: npt.NDArray[np.int64], table: RungTable, calls: _EagerCalls) -> _Plan:
    """The plan of the batches of items that end at ``ends``, each as the cheaper of replay and eager call."""
    costs, rungs = table.cheapest(*_totals(ordered.sizes, ordered.peaks, ends))
    # guard: encoder_cheaper_eagerly
    replays = costs <= calls.costs(ordered.items, np.concatenate(([0], ends[:-1]))[: len(ends)], ends)
    groups = _groups(ordered.items.tolist(), ends)
    alone = [group for group, is_replayed in zip(groups, replays, strict=True) if not is_replayed]
    cost, batches = calls.plan([*alone, *((item,) for item in ordered.unfit.tolist())])
    replayed = [PlannedBatch(groups[at], table.keys[rungs[at]]) for at in np.flatnonzero(replays)]
    return float(costs[replays].sum()) + cost, replayed + batches


def _cheapest_ends(ordered: _Ordered, table: RungTable, calls: _EagerCalls) -> npt.NDArray[np.int64]:
    """The ends of consecutive batches with the least total cost, by dynamic programming from the last item on."""
    sizes, peaks = ordered.sizes, ordered.peaks
    count = sizes.shape[1]
    widths = np.maximum(table.farthest(sizes, peaks), calls.farthest(sizes[0])) - np.arange(count)
    longest = LONGEST
    while longest > SHORTEST and np.minimum(widths, longest).sum() > MAX_CELLS:
        longest //= 2
    widths = np.minimum(widths, longest)
    firsts = np.concatenate(([0], np.cumsum(widths)))
    starts = np.repeat(np.arange(count), widths)
    ends = starts + np.arange(len(starts)) - firsts[starts] + 1
    sums = _running(sizes)
    costs, _ = table.cheapest(sums[:, ends] - sums[:, starts], _highest(peaks, starts, ends))
    np.minimum(costs, calls.costs(ordered.items, starts, ends), out=costs)
    least, following = [0.0] * (count + 1), [0] * count
    priced, first_cells = costs.tolist(), firsts.tolist()
    for start in reversed(range(count)):
        best = math.inf
        for end, cost in enumerate(priced[first_cells[start] : first_cells[start + 1]], start + 1):
            if cost + least[end] <= best:  # the longest of the cheapest: fewer replays
                best, following[start] = cost + least[end], end
        least[start] = best
    return _walk(following, count)


def _greedy_ends(farthest: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The ends of consecutive batches, each as long as ``farthest`` (see :meth:`RungTable.farthest`) allows."""
    return _walk(farthest.tolist(), len(farthest))


def _walk(following: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    """The ends of batches, from the end of the batch that starts at each item."""
    ends, at = [], 0
    while at < count:
        at = following[at]
        ends.append(at)
    return np.array(ends, dtype=np.int64)


def _highest(peaks: Sizes, starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]) -> Sizes:
    """The peaks of batches."""
    grown = [peaks]
    for width in range(1, int((ends - starts).max(initial=1)) if len(peaks) else 1):
        grown.append(grown[-1].copy())
        np.maximum(grown[-1][:, :-width], peaks[:, width:], out=grown[-1][:, :-width])
    highest: Sizes = np.stack(grown)[ends - starts - 1, :, starts].T if len(peaks) else peaks[:, starts]
    return highest


class _EagerCalls:
    """Plans eager calls. A call over several items has at most ``most`` tokens."""

    def __init__(self, tokens: npt.NDArray[np.int64], surcharges: Floats, eager: TokenCosts, most: int) -> None:
        self._tokens, self._surcharges, self._eager, self._most = tokens, surcharges, eager, most

    def costs(self, items: npt.NDArray[np.intp], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Floats:
        """Costs of calls over ``items[start:end]``; infinite above the maximum of tokens for several items."""
        tokens, surcharges = _running(self._tokens[None, items])[0], _running(self._surcharges[None, items])[0]
        sums = tokens[ends] - tokens[starts]
        allowed = (sums <= self._most) | (ends - starts == 1)
        found = np.full(len(sums), np.inf)
        found[allowed] = self._eager(sums[allowed])
        found += surcharges[ends] - surcharges[starts]
        return found

    def farthest(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """For each item, the end of the longest call that starts with it; at least one item long."""
        sums = _running(tokens[None])[0]
        reached: npt.NDArray[np.intp] = np.searchsorted(sums, sums[:-1] + self._most, side="right") - 1
        return np.maximum(reached, np.arange(1, len(sums)))

    def plan(self, groups: Sequence[tuple[int, ...]]) -> _Plan:
        """The cheaper of two plans: one call for each group of items, or consecutive groups merged."""
        if not groups:
            return 0.0, []
        of_item = self._tokens.tolist()
        tokens = np.array([sum([of_item[item] for item in group]) for group in groups])
        ends = _joined(tokens, self._most)
        merged = [tuple(itertools.chain.from_iterable(run)) for run in _groups(groups, ends)]
        apart_cost, merged_cost = (float(self._eager(sums).sum()) for sums in (tokens, _sums(tokens, ends)))
        chosen = merged if merged_cost <= apart_cost else groups
        surcharges = float(self._surcharges[list(itertools.chain.from_iterable(groups))].sum())
        return min(merged_cost, apart_cost) + surcharges, [PlannedBatch(group, None) for group in chosen]


def _joined(tokens: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """The ends of calls that merge consecutive groups up to ``most`` tokens. A larger group is a call by itself."""
    sums = _running(tokens[None])[0]
    reached = np.searchsorted(sums, sums[:-1] + most, side="right") - 1
    return _greedy_ends(np.maximum(reached, np.arange(1, len(sums))))


def _running(sizes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Prefix sums: [dimension, n] is the sum of the first n items."""
    sums = np.zeros((len(sizes), sizes.shape[1] + 1), dtype=sizes.dtype)
    np.cumsum(sizes, axis=1, out=sums[:, 1:])
    return sums


def _totals(sizes: Sizes, peaks: Sizes, ends: npt.NDArray[np.int64]) -> tuple[Sizes, Sizes]:
    """The sums and the peaks of the batches that end at ``ends``."""
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    highest = np.maximum.reduceat(peaks, starts, axis=1) if len(peaks) and len(ends) else peaks[:, starts]
    return (np.add.reduceat(sizes, starts, axis=1) if len(ends) else sizes[:, :0]), highest


def _sums(values: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sums of consecutive runs of values, which end at ``ends`` and are not empty."""
    sums: npt.NDArray[np.int64] = np.add.reduceat(values, np.concatenate(([0], ends[:-1])))
    return sums


def _groups(items: Sequence[Any], ends: npt.NDArray[np.int64]) -> list[tuple[Any, ...]]:
    """Consecutive runs of ``items``, which end at ``ends``."""
    return [tuple(items[start:end]) for start, end in itertools.pairwise([0, *ends.tolist()])]


def one_by_one(eager: Callable[[int], float]) -> TokenCosts:
    """A vectorised ``eager``, which is called once for each distinct token count."""
    known = functools.lru_cache(_KEPT_COSTS)(eager)

    def costs(tokens: npt.NDArray[np.int64]) -> Floats:
        counts, places = np.unique(tokens, return_inverse=True)
        found: Floats = np.fromiter(map(known, counts.tolist()), np.float64, len(counts))[places]
        return found

    return costs


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


class BatchPlanner:
    """Packs items into batches that respect all limits of the captured keys.

    Args:
        config: the encoder's configuration.
        keys: the captured keys. Without keys all items run eagerly, in as few calls as ``max_eager_tokens`` allows.
        costs: costs of replays and eager calls; None: pack greedily.
        max_eager_tokens: maximum output tokens of an eager call over several items.
    """

    def __init__(
        self,
        config: EncoderCudaGraphConfig,
        keys: Sequence[EncoderGraphKey],
        costs: EncoderCosts | None,
        max_eager_tokens: int,
    ) -> None:
        self._config, self._costs, self._max_eager_tokens = config, costs, max_eager_tokens
        # On an axis that rounds up, the index of a value is that of the smallest bound that is at least the value.
        self._bounds = [
            (place, cast("tuple[int, ...]", axis.values)) for place, axis in enumerate(config.axes) if axis.rounds_up
        ]
        self._keys = grouped(config, keys)
        self._tables = {group: RungTable([self._rung(key) for key in found]) for group, found in self._keys.items()}
        # Requests with the same sizes are frequent, and planning takes host time.
        self._plan = functools.lru_cache(_KEPT_PLANS)(self._planned)

    def plan(self, specs: Sequence[EncoderItemSpec]) -> tuple[PlannedBatch, ...]:
        """Batches that together contain each item once. Groups of items that cannot share a graph are planned apart."""
        return (self._plan if len(specs) <= _KEPT_ITEMS else self._planned)(tuple(specs))

    def _planned(self, specs: Sequence[EncoderItemSpec]) -> tuple[PlannedBatch, ...]:
        groups: dict[Hashable, list[int]] = {}
        for item, group in enumerate(self._groups_of(specs)):
            groups.setdefault(group, []).append(item)
        batches = []
        for group, items in groups.items():
            for batch in self._plan_group(group, [specs[item] for item in items]):
                batches.append(PlannedBatch(tuple(map(items.__getitem__, batch.items)), batch.key))
        return tuple(batches)

    def _plan_group(self, group: Hashable, specs: Sequence[EncoderItemSpec]) -> list[PlannedBatch]:
        sizes = [[s.output_tokens for s in specs], [s.input_size for s in specs], [1] * len(specs)]
        if self._config.max_frames is not None:
            sizes.append([spec.frames for spec in specs])
        table = np.array(sizes, dtype=np.int64)
        if group not in self._tables:
            return plan_eagerly(table[0], self._max_eager_tokens)
        peaks = np.empty((len(self._bounds), len(specs)), dtype=np.int64)
        for row, (place, bounds) in zip(peaks, self._bounds, strict=True):
            row[:] = np.searchsorted(bounds, [cast("int", spec.axes[place][1]) for spec in specs])
        if self._costs is None:
            return plan_greedily(table, self._tables[group], peaks)
        surcharge, surcharges = self._costs.surcharges.get(group), None
        if surcharge is not None:
            surcharges = surcharge(table[1], np.array([spec.frames for spec in specs]))  # guard: encoder_item_costs
        eager = self._costs.eager[group]
        return plan_cheaply(table, self._tables[group], eager, self._max_eager_tokens, peaks, surcharges)

    def _groups_of(self, specs: Sequence[EncoderItemSpec]) -> list[Hashable]:
        """:func:`group_of` each item, with a fast path if all axes round up."""
        if len(self._bounds) == len(self._config.axes):
            return [(spec.path,) for spec in specs]
        return [group_of(self._config, spec.path, spec.axes) for spec in specs]

    def _rung(self, key: EncoderGraphKey) -> Rung:
        # guard: encoder_limit_items, encoder_limit_patches
        limits: tuple[int, ...] = (key.tokens, key.patches, key.items)
        if key.frames is not None:
            limits = (*limits, key.frames)  # guard: encoder_limit_frames
        bounds = tuple(bisect_left(bounds, cast("int", key.axes[place][1])) for place, bounds in self._bounds)
        return Rung(key, limits, 0.0 if self._costs is None else self._costs.replay[key], bounds)
