"""Plans the batches of a request: which items share a call, and which key each batch replays (docs/encoder_packing.md).

Batches are limited by tokens and items, those of a manager by patches and frames, too. So sizes are vectors.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from graphpass.encoder.costs import EncoderCosts, Floats, PackingCosts, TokenCosts, one_by_one, replay_cost
from graphpass.encoder.protocol import EncoderCudaGraphConfig, EncoderGraphKey, EncoderItemSpec, group_of, grouped
from graphpass.errors import EncoderConfigError, positive

Sizes = npt.NDArray[np.int64]
"""[dimension, item]: sizes that add up in a batch, tokens first."""
Places = npt.NDArray[np.int64]
Planned: TypeAlias = tuple[tuple[int, ...], Any]
"""The places of a batch's items, and the key to replay; None for an eager call."""

Rung: TypeAlias = tuple[float, tuple[int, ...], tuple[int, ...], Any]
"""The cost of one replay, limits, bounds and key of one graph.

A limit is the maximum of a sum over a batch, for each dimension of sizes; a bound that of a value, for each of peaks.
"""

_KEPT_PLANS, _KEPT_ITEMS = 256, 256
LONGEST, SHORTEST = 128, 8
"""Bounds on the items of a batch; up to the first a plan is optimal."""
MAX_CELLS = 1 << 15
"""Most batches that are priced for one plan; for more, the bound on the items of a batch is lower."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Items that are encoded together."""

    items: tuple[int, ...]  #: indices of the items, the smallest item first
    tokens: int  #: sum of their output tokens
    budget: Any  #: the budget to replay, of a manager's batch its key; None: the batch runs eagerly


class RungTable:
    """Finds the cheapest rung for batches; of equal costs, the smallest.

    The limits of rungs with the same bounds ascend.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        ordered = sorted(rungs, key=lambda rung: rung[:3])
        self.none = len(ordered)  #: the place of batches that fit no rung
        self.keys = (*(key for *_, key in ordered), None)
        self.costs = np.array([*(cost for cost, *_ in ordered), np.inf])
        #: for each bounds: (bounds, limits [dimension, rung] in ascending order, the cheapest from each rung on)
        self._columns: list[tuple[Sizes, Sizes, Places]] = []
        by_bounds: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for place, (_, limit, bound, _) in enumerate(ordered):
            by_bounds.setdefault(bound, []).append((limit, place))
        for bounds, of_bounds in by_bounds.items():
            of_bounds.sort()
            places = [place for _, place in of_bounds]
            limits = np.array([limit for limit, _ in of_bounds], dtype=np.int64).T
            cheapest = np.minimum.accumulate(np.array([*places, self.none])[::-1])[::-1]
            self._columns.append((np.array(bounds, dtype=np.int64)[:, None], limits, cheapest))

    def find(self, sums: Sizes, peaks: Sizes) -> Places:
        """The place of the cheapest rung for each batch."""
        found = np.full(sums.shape[1], self.none)
        for bounds, limits, cheapest in self._columns:
            places = np.searchsorted(limits[0], sums[0])
            for of_rungs, totals in zip(limits[1:], sums[1:], strict=True):
                np.maximum(places, np.searchsorted(of_rungs, totals), out=places)
            if len(peaks):  # guard: encoder_limit_axis
                places[(peaks > bounds).any(axis=0)] = limits.shape[1]
            np.minimum(found, cheapest[places], out=found)
        return found

    def farthest(self, sums: Sizes, peaks: Sizes) -> Places:
        """For each item, the end of the longest batch from it on that fits a rung, from prefix sums of sizes."""
        count = peaks.shape[1]
        ends = np.arange(1, count + 1)
        for bounds, limits, _ in self._columns:
            reached = functools.reduce(np.minimum, map(_reach, sums, limits[:, -1]))
            if len(peaks):
                too_high = np.append(np.flatnonzero((peaks > bounds).any(axis=0)), count)
                np.minimum(reached, too_high[np.searchsorted(too_high, np.arange(count))], out=reached)
            np.maximum(ends, reached, out=ends)
        return ends


def pack_items(
    tokens: Sequence[int], budgets: Sequence[int], max_items: int, *, cost: PackingCosts | None = None
) -> list[PackedBatch]:
    """Distribute items over batches. Each item is in exactly one batch; no batch exceeds its budget or ``max_items``.

    An item of no tokens is in no batch. An item above the largest budget runs eagerly. The result depends only on the
    arguments.

    Args:
        tokens: the output tokens of each item.
        budgets: the captured budgets, in any order.
        max_items: maximum number of items in a replay.
        cost: measured costs; None: pack greedily.

    Raises:
        EncoderConfigError: a token count is negative, ``max_items`` is below 1, or a budget has no cost.
    """
    ladder = sorted(set(budgets))
    positive(max_items, "max_items", error=EncoderConfigError)
    counts = [positive(count, "a token count", at_least=0, error=EncoderConfigError) for count in tokens]
    table = RungTable([(replay_cost(b, cost) if cost else 0.0, (b, max_items), (), b) for b in ladder])
    working = [item for item, count in enumerate(counts) if count]
    sizes = np.array([[counts[item] for item in working], [1] * len(working)], dtype=np.int64)
    if cost is None:
        planned = plan_greedily(sizes, table)
    else:
        most = max(ladder, default=0) if cost.max_eager_tokens is None else cost.max_eager_tokens
        planned = plan_cheaply(sizes, table, one_by_one(cost.eager), most)
    return _packed(planned, working, counts)


def _packed(planned: Iterable[Planned], items: Sequence[int], tokens: Sequence[int]) -> list[PackedBatch]:
    named = [(tuple(items[place] for place in places), key) for places, key in planned]
    return [PackedBatch(batch, sum(tokens[item] for item in batch), key) for batch, key in named]


def plan_greedily(sizes: Sizes, table: RungTable, peaks: Sizes | None = None) -> list[Planned]:
    """Pack greedily: smallest items first, as many in a batch as a rung allows, each batch in the smallest rung.

    Items that fit no rung are eager batches at the end. ``peaks`` are [dimension, item], sizes of which a batch has
    the maximum.
    """
    items = _Items(sizes, peaks, table)
    cuts = items.greedy_cuts()
    rungs = table.find(*items.loads(cuts[:-1], cuts[1:]))
    batches = [(batch, table.keys[rung]) for batch, rung in zip(_groups(items.places, cuts), rungs, strict=True)]
    return [*batches, *(((item,), None) for item in items.unfit)]


def plan_cheaply(
    sizes: Sizes,
    table: RungTable,
    eager: TokenCosts,
    max_eager_tokens: int,
    peaks: Sizes | None = None,
    surcharges: Floats | None = None,
) -> list[Planned]:
    """The cheapest of three plans: the cheapest cuts, the greedy plan, and eager calls only.

    A batch runs eagerly, and eager batches are merged, if that is cheaper. An eager call over several items has at most
    ``max_eager_tokens``. ``surcharges`` are [item], see :class:`EncoderCosts`.
    """
    items = _Items(sizes, peaks, table)
    surcharges = np.zeros(sizes.shape[1]) if surcharges is None else surcharges
    calls = _EagerCalls(sizes[0], surcharges, eager, max_eager_tokens)
    found = (_cheapest_cuts(items, table, calls), items.greedy_cuts())  # guard: encoder_greedy_plan
    plans = [_priced(items, cuts, table, calls) for cuts in found]
    plans.append(calls.plan([(item,) for item in (*items.places, *items.unfit)]))  # guard: encoder_eager_plan
    return min(plans, key=lambda plan: plan[0])[1]


def plan_eagerly(tokens: Sizes, max_eager_tokens: int) -> list[Planned]:
    """Eager calls over consecutive items."""
    return [(items, None) for items in _groups(range(len(tokens)), _joined(tokens, max_eager_tokens))]


class _Items:
    """The items that fit a rung, by tokens, ascending. Batches are consecutive items."""

    def __init__(self, sizes: Sizes, peaks: Sizes | None, table: RungTable) -> None:
        peaks = sizes[:0] if peaks is None else peaks
        order = np.argsort(sizes[0], kind="stable")
        fits = table.find(sizes, peaks)[order] != table.none
        chosen = order[fits]
        self.places, self.unfit = chosen.tolist(), order[~fits].tolist()
        self.sums, self._peaks = _prefix_sums(sizes[:, chosen]), np.pad(peaks[:, chosen], ((0, 0), (0, 1)))
        self.farthest = table.farthest(self.sums, peaks[:, chosen])

    def loads(self, starts: Places, ends: Places) -> tuple[Sizes, Sizes]:
        """Sums and peaks, [dimension, batch]."""
        highest = self._peaks[:, starts]
        if len(highest) and len(starts):
            highest = np.maximum.reduceat(self._peaks, np.column_stack((starts, ends)).ravel(), axis=1)[:, ::2]
        return self.sums[:, ends] - self.sums[:, starts], highest

    def greedy_cuts(self) -> Places:
        """The bounds of batches of as many items as a rung holds."""
        return _walk(self.farthest.tolist())


_Plan = tuple[float, list[Planned]]
"""The total cost, and the batches."""


def _priced(items: _Items, cuts: Places, table: RungTable, calls: _EagerCalls) -> _Plan:
    """The batches between ``cuts``, each by the cheaper of replay and eager call."""
    starts, ends = cuts[:-1], cuts[1:]
    rungs = table.find(*items.loads(starts, ends))
    costs = table.costs[rungs]
    replays = costs <= calls.costs(items.places, starts, ends)  # guard: encoder_cheaper_eagerly
    groups = _groups(items.places, cuts)
    alone = [group for group, is_replayed in zip(groups, replays, strict=True) if not is_replayed]
    cost, batches = calls.plan([*alone, *((item,) for item in items.unfit)])
    replayed = [(groups[at], table.keys[rungs[at]]) for at in np.flatnonzero(replays)]
    return float(costs[replays].sum()) + cost, replayed + batches


def _cheapest_cuts(items: _Items, table: RungTable, calls: _EagerCalls) -> Places:
    """The bounds of batches with the least cost, by dynamic programming from the last item on."""
    count = len(items.places)
    widths = np.maximum(items.farthest, _reach(items.sums[0], calls.most)) - np.arange(count)
    longest = LONGEST
    while longest > SHORTEST and np.minimum(widths, longest).sum() > MAX_CELLS:
        longest //= 2
    widths = np.minimum(widths, longest)
    firsts = np.concatenate(([0], np.cumsum(widths)))
    starts = np.repeat(np.arange(count), widths)
    ends = starts + np.arange(len(starts)) - firsts[starts] + 1
    costs = np.minimum(table.costs[table.find(*items.loads(starts, ends))], calls.costs(items.places, starts, ends))
    least, following = [0.0] * (count + 1), [0] * count
    priced, first_cells = costs.tolist(), firsts.tolist()
    for start in reversed(range(count)):
        best = math.inf
        for end, cost in enumerate(priced[first_cells[start] : first_cells[start + 1]], start + 1):
            if cost + least[end] <= best:  # the longest of the cheapest: fewer replays
                best, following[start] = cost + least[end], end
        least[start] = best
    return _walk(following)


class _EagerCalls:
    """A call over several items has at most ``most`` tokens."""

    def __init__(self, tokens: Sizes, surcharges: Floats, eager: TokenCosts, most: int) -> None:
        self._tokens, self._surcharges, self._eager, self.most = tokens, surcharges, eager, most

    def costs(self, items: Sequence[int], starts: Places, ends: Places) -> Floats:
        """Of calls over ``items[start:end]``; infinite if they are not allowed."""
        tokens, surcharges = _prefix_sums(self._tokens[items]), _prefix_sums(self._surcharges[items])
        sums = tokens[ends] - tokens[starts]
        allowed = (sums <= self.most) | (ends - starts == 1)
        found = np.full(len(sums), np.inf)
        found[allowed] = self._eager(sums[allowed])
        found += surcharges[ends] - surcharges[starts]
        return found

    def plan(self, groups: Sequence[tuple[int, ...]]) -> _Plan:
        """The cheaper of one call for each group of items, or consecutive groups merged."""
        if not groups:
            return 0.0, []
        of_item = self._tokens.tolist()
        tokens = np.array([sum([of_item[item] for item in group]) for group in groups])
        cuts = _joined(tokens, self.most)
        merged = [tuple(itertools.chain.from_iterable(run)) for run in _groups(groups, cuts)]
        costs = [float(self._eager(sums).sum()) for sums in (tokens, np.add.reduceat(tokens, cuts[:-1]))]
        chosen = merged if costs[1] <= costs[0] else groups
        surcharges = float(self._surcharges[list(itertools.chain.from_iterable(groups))].sum())
        return min(costs) + surcharges, [(group, None) for group in chosen]


def _joined(tokens: Sizes, most: int) -> Places:
    """The bounds of calls that merge groups up to ``most`` tokens."""
    return _walk(_reach(_prefix_sums(tokens), most).tolist())


def _reach(sums: Sizes, most: int) -> Places:
    """For each place, the end of the longest run with a sum of at most ``most``; at least one place long."""
    return np.maximum(np.searchsorted(sums, sums[:-1] + most, side="right") - 1, np.arange(1, len(sums)))


def _walk(following: Sequence[int]) -> Places:
    """The bounds of batches, from the end of that which starts at each item."""
    cuts = [0]
    while cuts[-1] < len(following):
        cuts.append(following[cuts[-1]])
    return np.array(cuts, dtype=np.int64)


def _prefix_sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1), dtype=values.dtype)
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _groups(items: Sequence[Any], cuts: Places) -> list[tuple[Any, ...]]:
    return [tuple(items[start:end]) for start, end in itertools.pairwise(cuts.tolist())]


def runs_of(items: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers that follow each other."""
    starts = [place for place in range(len(items)) if not place or items[place] != items[place - 1] + 1]
    return [(items[start], items[end - 1]) for start, end in itertools.pairwise([*starts, len(items)])]


class BatchPlanner:
    """Packs items into batches within all limits of the captured keys.

    Without costs it packs greedily. Without keys all items run eagerly.
    """

    def __init__(
        self,
        config: EncoderCudaGraphConfig,
        keys: Sequence[EncoderGraphKey],
        costs: EncoderCosts | None,
        max_eager_tokens: int,
    ) -> None:
        self._config, self._costs, self._max_eager_tokens = config, costs, max_eager_tokens
        # On an axis that rounds up, a value has the index of the smallest bound that holds it.
        self._bounds = [
            (place, cast("tuple[int, ...]", axis.values)) for place, axis in enumerate(config.axes) if axis.rounds_up
        ]
        self._tables = {
            group: RungTable([self._rung(key) for key in found]) for group, found in grouped(config, keys).items()
        }
        self._plan = functools.lru_cache(_KEPT_PLANS)(self._planned)

    def plan(self, specs: Sequence[EncoderItemSpec]) -> tuple[PackedBatch, ...]:
        """Batches of all items with tokens. Items that cannot share a graph are planned apart."""
        return (self._plan if len(specs) <= _KEPT_ITEMS else self._planned)(tuple(specs))

    def _planned(self, specs: Sequence[EncoderItemSpec]) -> tuple[PackedBatch, ...]:
        groups: dict[Hashable, list[int]] = {}
        is_path_alone = len(self._bounds) == len(self._config.axes)  # the usual case
        for item, spec in enumerate(specs):
            if spec.output_tokens:  # guard: encoder_empty_items
                group = (spec.path,) if is_path_alone else group_of(self._config, spec.path, spec.axes)
                groups.setdefault(group, []).append(item)
        tokens = [spec.output_tokens for spec in specs]
        planned = [
            _packed(self._plan_group(group, [specs[item] for item in items]), items, tokens)
            for group, items in groups.items()
        ]
        return tuple(itertools.chain.from_iterable(planned))

    def _plan_group(self, group: Hashable, specs: Sequence[EncoderItemSpec]) -> list[Planned]:
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

    def _rung(self, key: EncoderGraphKey) -> Rung:
        # guard: encoder_limit_items, encoder_limit_patches
        limits: tuple[int, ...] = (key.tokens, key.patches, key.items)
        if key.frames is not None:
            limits = (*limits, key.frames)  # guard: encoder_limit_frames
        bounds = tuple(bisect_left(bounds, cast("int", key.axes[place][1])) for place, bounds in self._bounds)
        return 0.0 if self._costs is None else self._costs.replay[key], limits, bounds, key
