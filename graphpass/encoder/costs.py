"""Costs of replays and eager calls, measured once after the capture (docs/encoder_packing.md).

The cost of a call is that of its size, plus what each of its items adds: a constant, and attention, proportional to the
square of each frame's patches. The two coefficients are fitted to calls of equal size and different items.

A plan contains every item once. So the planner only needs what an item adds to an eager call beyond what it adds to a
replay: :attr:`EncoderCosts.surcharges`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.protocol import EncoderGraphKey, EncoderItemSpec
from graphpass.errors import EncoderConfigError
from graphpass.serving.traffic import timed_s

_TIMED_SIZES, _TIMED_EAGERLY = 12, 6  # an eager call takes several times as long as a replay
_FILLED = 0.95
"""Examples of other items have at least this share of the usual example's tokens."""
_NEVER_S = 1e6
_KEPT_COSTS = 1 << 14
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
TokenCosts = Callable[[Ints], Floats]


@dataclass(frozen=True, slots=True)
class PackingCosts:
    """Costs of replays and eager calls, in the same unit."""

    replay: Mapping[int, float]  #: {budget: cost of one replay}
    eager: Callable[[int], float]  #: the cost of one eager call as a function of its output tokens
    #: maximum output tokens of an eager call over several items; None: the largest budget. A single item may have more.
    max_eager_tokens: int | None = None


def eager_curve(sizes: Sequence[int], seconds: Sequence[float]) -> TokenCosts:
    """Durations of eager calls: linear between ``sizes``, constant below (launches), proportional above."""

    def curve(tokens: Ints) -> Floats:
        return np.interp(tokens, sizes, seconds) * np.maximum(1, tokens / sizes[-1])

    return curve


@dataclass(frozen=True, slots=True)
class ItemCosts:
    """Seconds that an item adds to a call."""

    each_s: float = 0.0  #: for every item
    square_s: float = 0.0  #: for the square of each frame's patches

    def __call__(self, patches: Ints, frames: Ints) -> Floats:
        """Of each item."""
        found: Floats = self.each_s + self.square_s * (patches**2 / np.maximum(1, frames))
        return found

    def of_call(self, load: Load) -> float:
        """Of a call."""
        return self.each_s * load.items + self.square_s * load.squares


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a call."""

    tokens: int  #: output tokens of its items
    items: int
    squares: float  #: sum of the squares of the patches of each frame

    @classmethod
    def of(cls, specs: Sequence[EncoderItemSpec]) -> Load:
        """Of these items."""
        squares = sum(spec.input_size**2 / max(1, spec.frames) for spec in specs)
        return cls(sum(spec.output_tokens for spec in specs), len(specs), squares)


TimedExample = tuple[Load, Callable[[], object], Callable[[], object]]
"""The size of items, a function that replays their key, and one that runs them eagerly."""


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """Costs of replays and eager calls, in seconds."""

    replay: Mapping[EncoderGraphKey, float]  #: {key: cost of one replay}, without what its items add
    #: {group of :func:`graphpass.encoder.protocol.group_of`: function of output tokens}, likewise
    eager: Mapping[object, TokenCosts]
    #: {group: what an item adds to an eager call, beyond what it adds to a replay}
    surcharges: Mapping[object, ItemCosts] = field(default_factory=dict)

    @classmethod
    def of_user(cls, costs: PackingCosts, groups: Mapping[object, Sequence[EncoderGraphKey]]) -> EncoderCosts:
        """The user's costs, equal for all keys of a budget."""
        replay = {key: replay_cost(key.tokens, costs) for keys in groups.values() for key in keys}
        return cls(replay, dict.fromkeys(groups, one_by_one(costs.eager)))


_Timed = tuple[EncoderGraphKey, Load, float]
"""A key, the size of a call of it, and its seconds, infinite if there was no memory."""


def one_by_one(eager: Callable[[int], float]) -> TokenCosts:
    """A vectorised ``eager``, called once for each token count."""
    known = functools.lru_cache(_KEPT_COSTS)(eager)

    def costs(tokens: Ints) -> Floats:
        counts, places = np.unique(tokens, return_inverse=True)
        found: Floats = np.fromiter(map(known, counts.tolist()), np.float64, len(counts))[places]
        return found

    return costs


def replay_cost(budget: int, cost: PackingCosts) -> float:
    """The cost of a replay of ``budget``."""
    if budget not in cost.replay or not 0 <= cost.replay[budget] < math.inf:
        raise EncoderConfigError(
            f"budget {budget} has no cost",
            expected=f"a finite cost of at least 0 of one replay for every budget, including {budget}",
            found=f"costs {dict(cost.replay)}",
            remedy="measure every budget, or pack without costs",
        )
    return float(cost.replay[budget])


ExampleOf = Callable[[EncoderGraphKey, int | None], TimedExample]


def measured_costs(
    groups: Mapping[object, Sequence[EncoderGraphKey]], example_of: ExampleOf, device: torch.device
) -> EncoderCosts:
    """Measure replays and eager calls of some keys of each group, and interpolate those of the others.

    ``example_of(key, number of items)`` makes an example, of the usual number for None, or where the encoder cannot
    choose it. An example is valid until the next one.
    """
    replay_s: dict[EncoderGraphKey, float] = {}
    eager: dict[object, TokenCosts] = {}
    surcharges: dict[object, ItemCosts] = {}
    for group, keys in groups.items():
        by_axes: dict[object, list[EncoderGraphKey]] = {}
        for key in sorted(keys, key=lambda key: key.tokens):
            by_axes.setdefault(key.axes, []).append(key)
        # An eager call does not depend on bounds of axes: only the ladder with the largest budget is measured.
        largest = max(by_axes.values(), key=lambda ladder: ladder[-1].tokens)
        eagerly = spread(spread(largest, _TIMED_SIZES), _TIMED_EAGERLY)
        replays: list[_Timed] = []
        eager_calls: list[_Timed] = []
        for key in itertools.chain.from_iterable(spread(ladder, _TIMED_SIZES) for ladder in by_axes.values()):
            load, replay, run_eagerly = example_of(key, None)
            replays.append((key, load, _seconds(replay, device)))
            if key in eagerly:
                eager_calls.append((key, load, _eager_seconds(run_eagerly, device)))
        more_replays, more_eager_calls = _timed_with_other_items(eager_calls, example_of, device)
        of_replay, of_eager = _fitted([*replays, *more_replays]), _fitted([*eager_calls, *more_eager_calls])
        for axes, ladder in by_axes.items():
            timed = {k.tokens: max(0.0, s - of_replay.of_call(load)) for k, load, s in replays if k.axes == axes}
            known = np.interp([key.tokens for key in ladder], list(timed), list(timed.values()))
            replay_s |= zip(ladder, known.tolist(), strict=True)
        eager[group] = _curve(eager_calls, of_eager)
        surcharges[group] = ItemCosts(of_eager.each_s - of_replay.each_s, of_eager.square_s - of_replay.square_s)
    return EncoderCosts(replay_s, eager, surcharges)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    return timed_s(run, device, enough_s=0.02)  # long runs vary little


def _eager_seconds(run: Callable[[], object], device: torch.device) -> float:
    try:
        return _seconds(run, device)
    except torch.OutOfMemoryError:
        return math.inf


def _timed_with_other_items(
    usual: Sequence[_Timed], example_of: ExampleOf, device: torch.device
) -> tuple[list[_Timed], list[_Timed]]:
    """Calls of one item, and of the most, on the largest key and one half-way up to it."""
    replays: list[_Timed] = []
    eager_calls: list[_Timed] = []
    for key, usual_load, _ in {usual[place][0]: usual[place] for place in (len(usual) // 2, -1)}.values():
        counts = {usual_load.items}
        for count in (1, key.items):
            load, replay, run_eagerly = example_of(key, count)
            if load.items not in counts and load.tokens >= _FILLED * usual_load.tokens:
                counts.add(load.items)
                replays.append((key, load, _seconds(replay, device)))
                eager_calls.append((key, load, _eager_seconds(run_eagerly, device)))
    return replays, eager_calls


def _fitted(timings: Sequence[_Timed]) -> ItemCosts:
    """What items add, from the differences between loads of equal keys, else 0."""
    finite = [timing for timing in timings if timing[2] < math.inf]
    keys = [key for key, *_ in finite]
    table = np.array([(load.items, load.squares, seconds) for _, load, seconds in finite]).reshape(-1, 3)
    for key in set(keys):
        of_key = [place for place, other in enumerate(keys) if other == key]
        table[of_key] -= table[of_key].mean(axis=0)
    scales = np.abs(table).max(axis=0, initial=0.0)
    columns = [column for column in (0, 1) if scales[column] > 0]
    found = [0.0, 0.0]
    while columns:
        solved = np.linalg.lstsq(table[:, columns] / scales[columns], table[:, 2], rcond=None)[0]
        if (solved >= 0).all():
            for column, value in zip(columns, solved.tolist(), strict=True):
                found[column] = value / scales[column]
            break
        columns.pop(int(solved.argmin()))
    return ItemCosts(*found)


def _curve(usual: Sequence[_Timed], of_items: ItemCosts) -> TokenCosts:
    ascending = sorted(((load, seconds) for _, load, seconds in usual), key=lambda timing: timing[0].tokens)
    without = [max(0.0, min(seconds, _NEVER_S) - of_items.of_call(load)) for load, seconds in ascending]
    rising = np.maximum.accumulate(without).tolist()
    by_tokens = dict(zip((load.tokens for load, _ in ascending), rising, strict=True))
    return eager_curve(tuple(by_tokens), tuple(by_tokens.values()))


def spread(keys: Sequence[EncoderGraphKey], most: int) -> list[EncoderGraphKey]:
    """At most ``most`` of ``keys``, with the first and the last."""
    if len(keys) <= most:
        return list(keys)
    return [keys[round(index * (len(keys) - 1) / (most - 1))] for index in range(most)]
