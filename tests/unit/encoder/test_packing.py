"""Items into batches, and each limit of a key by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.encoder import (
    EncoderAxis,
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItemSpec,
    PackedBatch,
    PackingCosts,
    pack_items,
    planner,
    smallest_fitting_budget,
)
from graphpass.encoder.costs import EncoderCosts
from graphpass.encoder.planner import BatchPlanner, Rung, RungTable, plan_cheaply, plan_eagerly
from graphpass.errors import EncoderConfigError
from tests.unit.encoder.toy import least_of_cuts

Problem = tuple[list[int], list[int], int, PackingCosts]
Vectors = tuple[np.ndarray, np.ndarray, list[Rung]]
TOKENS = st.lists(st.integers(0, 40), max_size=40)
BUDGETS = st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True)
MAX_ITEMS = st.integers(1, 12)


@st.composite
def costs_of(draw: st.DrawFn, budgets: Sequence[int]) -> PackingCosts:
    """Replays may cost anything; eager calls a constant and something for each token."""
    replay = {budget: draw(st.floats(0.01, 100)) for budget in budgets}
    launch, token = draw(st.floats(0, 100)), draw(st.floats(0.001, 5))
    return PackingCosts(replay, lambda tokens: launch + token * tokens, draw(st.none() | st.integers(1, 400)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    budgets = draw(BUDGETS)
    return draw(TOKENS), budgets, draw(MAX_ITEMS), draw(costs_of(budgets))


def price(batches: Sequence[PackedBatch], cost: PackingCosts) -> float:
    return sum(cost.eager(b.tokens) if b.budget is None else cost.replay[b.budget] for b in batches)


def greedy_by_hand(tokens: Sequence[int], budgets: Sequence[int], max_items: int) -> list[PackedBatch]:
    """The seeds' rule, spelt out item by item."""
    ladder = sorted(budgets)
    packed: list[PackedBatch] = []
    items: list[int] = []
    total = 0

    def close() -> None:
        if items:
            packed.append(PackedBatch(tuple(items), total, smallest_fitting_budget(ladder, total)))

    for item in sorted(filter(tokens.__getitem__, range(len(tokens))), key=lambda index: tokens[index]):
        if items and (total + tokens[item] > ladder[-1] or len(items) >= max_items):
            close()
            items, total = [], 0
        items.append(item)
        total += tokens[item]
    close()
    return packed


@given(TOKENS, BUDGETS, MAX_ITEMS)
def test_without_costs_it_is_the_greedy(tokens: list[int], budgets: list[int], max_items: int) -> None:
    assert pack_items(tokens, budgets, max_items) == greedy_by_hand(tokens, budgets, max_items)


@given(problems(), st.booleans())
def test_everything_is_served_once_and_within_the_limits(problem: Problem, has_costs: bool) -> None:
    tokens, budgets, max_items, cost = problem
    batches = pack_items(tokens, budgets, max_items, cost=cost if has_costs else None)
    assert sorted(item for batch in batches for item in batch.items) == [n for n, count in enumerate(tokens) if count]
    for batch in batches:
        assert batch.items
        assert batch.tokens == sum(tokens[item] for item in batch.items)
        if batch.budget is not None:
            assert batch.tokens <= batch.budget
            assert len(batch.items) <= max_items
        elif len(batch.items) > 1:
            most = max(budgets) if cost.max_eager_tokens is None else cost.max_eager_tokens
            assert batch.tokens <= most


@given(problems())
def test_with_costs_no_simple_plan_is_cheaper(problem: Problem) -> None:
    tokens, budgets, max_items, cost = problem
    found = price(pack_items(tokens, budgets, max_items, cost=cost), cost)
    one_by_one = [
        PackedBatch((item,), count, smallest_fitting_budget(sorted(budgets), count))
        for item, count in enumerate(tokens)
        if count
    ]
    greedy = pack_items(tokens, budgets, max_items)
    assert found <= price(one_by_one, cost) * (1 + 1e-9)
    assert found <= price(greedy, cost) * (1 + 1e-9)
    most = max(budgets) if cost.max_eager_tokens is None else cost.max_eager_tokens
    if any(tokens) and sum(tokens) <= most:
        assert found <= cost.eager(sum(tokens)) * (1 + 1e-9)


def by_tokens(fixed: float, each: float) -> Callable[[int], float]:
    return lambda tokens: fixed + each * tokens


@pytest.mark.parametrize(
    ("tokens", "cost", "batches"),
    [
        ([4, 2, 4, 3], PackingCosts({4: 100.0}, by_tokens(10, 1), 8), [((1, 3), 5, None), ((0, 2), 8, None)]),
        ([8, 4], PackingCosts({4: 1.0, 8: 100.0}, by_tokens(5, 0), 8), [((1,), 4, 4), ((0,), 8, None)]),
        ([9, 3], PackingCosts({4: 5.0}, by_tokens(6, 0), 20), [((1, 0), 12, None)]),
        ([9], PackingCosts({4: 1.0}, lambda tokens: float("inf")), [((0,), 9, None)]),
    ],
    ids=["eager calls are joined", "one replays", "one eager call for all, cheaper than a replay", "nothing fits"],
)
def test_eager_calls_are_made_where_that_is_cheaper(
    tokens: list[int], cost: PackingCosts, batches: list[tuple[tuple[int, ...], int, int | None]]
) -> None:
    found = pack_items(tokens, sorted(cost.replay), 1, cost=cost)
    assert found == [PackedBatch(*batch) for batch in batches]


def test_without_budgets_everything_is_eager() -> None:
    assert pack_items([3, 1], [], 4) == [PackedBatch((1,), 1, None), PackedBatch((0,), 3, None)]


@pytest.mark.parametrize(
    ("arguments", "numbers"), [(([1], [4], 0), "max_items.*found 0"), (([2, -1], [4], 1), "token count.*found -1")]
)
def test_arguments_that_cannot_be_are_refused(arguments: tuple[list[int], list[int], int], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        pack_items(*arguments)


@pytest.mark.parametrize("costs", [{4: 1.0}, {4: 1.0, 8: float("inf")}, {4: 1.0, 8: -1.0}, {4: 1.0, 8: float("nan")}])
def test_a_budget_without_a_usable_cost_is_refused(costs: dict[int, float]) -> None:
    with pytest.raises(EncoderConfigError, match=r"budget 8 has no cost.*\{4: 1\.0"):
        pack_items([1], [4, 8], 1, cost=PackingCosts(costs, by_tokens(1, 1)))


@pytest.mark.parametrize("count", [100, 1000, 5000])
@pytest.mark.parametrize("largest", [1, 600, 4096])
def test_thousands_of_items_take_few_steps(count: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the time is counted: batches that are priced, and questions for the eager cost."""
    priced: list[int] = []
    find = RungTable.find

    def counting(table: RungTable, sums: planner.Sizes, peaks: planner.Sizes) -> object:
        priced.append(sums.shape[1])
        return find(table, sums, peaks)

    asked: list[int] = []

    def eager(tokens: int) -> float:
        asked.append(tokens)
        return 16 + 0.0055 * tokens

    monkeypatch.setattr(RungTable, "find", counting)
    budgets = list(range(64, 4097, 64))
    tokens = np.random.default_rng(0).integers(1, largest + 1, count).tolist()
    cost = PackingCosts({budget: 0.5 + 0.0045 * budget for budget in budgets}, eager)
    batches = pack_items(tokens, budgets, 32, cost=cost)
    assert sorted(item for batch in batches for item in batch.items) == list(range(count))
    assert len(priced) == 4, "which items fit, the cuts, and the batches of two plans"
    assert max(priced) <= max(planner.MAX_CELLS, planner.SHORTEST * count)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(("count", "budget"), [(1000, 10), (5000, 30)])
def test_many_items_are_cut_as_a_whole(count: int, budget: int) -> None:
    """There are no blocks at whose ends a batch is cut short; 30 are more than the cuts try for 5,000 items."""
    cost = PackingCosts({budget: 1.0}, by_tokens(1000, 1))
    assert len(pack_items([1] * count, [budget], budget, cost=cost)) == -(-count // budget)


# -- several limits ---------------------------------------------------------------------------------------------------

LIMITS = st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 6))


@st.composite
def vector_problems(draw: st.DrawFn) -> Vectors:
    """Sizes in three dimensions, and one bound of the largest item, on ladders that ascend in every dimension."""
    count = draw(st.integers(0, 20))
    sizes = [draw(st.lists(st.integers(0, most), min_size=count, max_size=count)) for most in (20, 40, 3)]
    peaks = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    rungs = []
    for bound in draw(st.lists(st.integers(0, 2), max_size=3, unique=True)):
        steps = draw(st.lists(LIMITS, min_size=1, max_size=4))
        for limits in itertools.accumulate(steps, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))):
            rungs.append((draw(st.floats(0.1, 10)), limits, (bound,), len(rungs)))
    return np.array(sizes, dtype=np.int64).reshape(3, count), np.array([peaks], dtype=np.int64), rungs


def fitting(problem: Vectors, items: Sequence[int]) -> list[Rung]:
    """The rungs that hold a batch of these items."""
    sizes, peaks, rungs = problem
    of_all, highest = sizes[:, list(items)].sum(axis=1), peaks[0, list(items)].max()
    return [rung for rung in rungs if (of_all <= np.array(rung[1])).all() and highest <= rung[2][0]]


def eager_cost(problem: Vectors, items: Sequence[int]) -> float:
    return float(5.0 + problem[0][0, list(items)].sum())


def least(problem: Vectors, items: Sequence[int], surcharge: float = 0.0) -> float:
    """The cost of a batch that replays the cheapest rung, or is an eager call of at most 30 tokens."""
    eager = eager_cost(problem, items)
    eagerly = [eager + surcharge] if len(items) == 1 or eager <= 35 else []
    return min([*(cost for cost, *_ in fitting(problem, items)), *eagerly], default=float("inf"))


@given(vector_problems(), st.lists(st.floats(-2, 20), min_size=7, max_size=7))
def test_surcharges_of_eager_calls_are_part_of_the_plan(problem: Vectors, surcharges: list[float]) -> None:
    """No cut of the sorted items is cheaper."""
    sizes, peaks, rungs = problem
    problem = sizes, peaks, rungs = sizes[:, :7], peaks[:, :7], rungs
    of_items = np.array(surcharges[: sizes.shape[1]])

    def surcharge(items: Sequence[int]) -> float:
        return float(of_items[list(items)].sum())

    def eagerly(items: Sequence[int]) -> float:
        return eager_cost(problem, items) + surcharge(items)

    planned = plan_cheaply(sizes, RungTable(rungs), lambda tokens: 5.0 + tokens, 30, peaks, of_items)
    found = sum(eagerly(items) if key is None else rungs[key][0] for items, key in planned)
    alone = [item for item in range(sizes.shape[1]) if not fitting(problem, [item])]
    order = sorted(set(range(sizes.shape[1])) - set(alone), key=lambda item: sizes[0, item])
    cheapest = least_of_cuts(order, lambda items: least(problem, items, surcharge(items)))
    assert found <= cheapest + sum(eagerly([item]) for item in alone) + 1e-6


def test_an_eager_call_of_one_item_has_no_maximum() -> None:
    cost = PackingCosts({1: 1.0, 5: 3.0}, lambda tokens: 1.0 * tokens, max_eager_tokens=1)
    batches = pack_items([2] * 200, [1, 5], 1, cost=cost)
    assert price(batches, cost) == 400


def test_eager_calls_keep_the_order_and_the_limit() -> None:
    planned = plan_eagerly(np.array([3, 4, 9, 1, 0, 7, 2]), 8)
    assert planned == [((0, 1), None), ((2,), None), ((3, 4, 5), None), ((6,), None)]


# From sizes to keys: each limit of a key by itself decides whether two items share a replay.


CONFIG = EncoderCudaGraphConfig(
    ("image",),
    ("patches",),
    8,
    paths=("image", "video"),
    axes=(EncoderAxis("size", ("s", "m")), EncoderAxis("longest", (10, 20), rounds_up=True)),
    max_frames=4,
)
KEYS = [
    EncoderGraphKey(tokens, 2 * tokens, items, 2 * items, path, (("size", size), ("longest", longest)))
    for tokens, items in ((20, 2), (10, 1))
    for path in CONFIG.paths
    for size in ("s", "m")
    for longest in (10, 20)
]
HALF: dict[str, Any] = {"output_tokens": 10, "input_size": 20, "frames": 2, "path": "image", "axes": ("s", 10)}
"""Two of it fill the larger key."""


def item(**changes: Any) -> EncoderItemSpec:
    given = {**HALF, **changes}
    return EncoderItemSpec(**{**given, "axes": tuple(zip(("size", "longest"), given["axes"], strict=True))})


def planned(specs: list[EncoderItemSpec], has_costs: bool) -> list[PackedBatch]:
    """Sharing is cheaper than two replays, and an eager call is dearest."""
    replay = {key: 1.0 + key.tokens / 100 + dict(key.axes)["longest"] / 1000 for key in KEYS}  # type: ignore[operator]
    groups = {(path, size) for path in CONFIG.paths for size in ("s", "m")}
    costs = EncoderCosts(replay, dict.fromkeys(groups, lambda tokens: 100.0 + tokens))
    return list(BatchPlanner(CONFIG, KEYS, costs if has_costs else None, 0).plan(specs))


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        ({}, [20]),
        ({"output_tokens": 11, "input_size": 20}, [10, 20]),
        ({"input_size": 21}, [10, 20]),
        ({"frames": 3}, [10, 20]),
        ({"output_tokens": 9}, [20]),
        ({"path": "video"}, [10, 10]),
        ({"axes": ("m", 10)}, [10, 10]),
        ({"axes": ("s", 20)}, [20]),
        ({"axes": ("s", 21)}, [10, None]),
        ({"axes": ("l", 10)}, [10, None]),
        ({"input_size": 41}, [10, None]),
    ],
    ids=str,
)
def test_each_limit_takes_part(other: dict[str, Any], tokens: list[int | None], has_costs: bool) -> None:
    specs = [item(), item(**other)]
    batches = planned(specs, has_costs)
    found = [batch.budget.tokens if batch.budget else None for batch in batches]
    assert sorted(found, key=str) == sorted(tokens, key=str)
    for batch in batches:
        if batch.budget is not None:
            mine = [specs[place] for place in batch.items]
            assert sum(spec.output_tokens for spec in mine) <= batch.budget.tokens
            assert sum(spec.input_size for spec in mine) <= batch.budget.patches
            assert sum(spec.frames for spec in mine) <= (batch.budget.frames or 0)
            assert max(dict(spec.axes)["longest"] for spec in mine) <= dict(batch.budget.axes)["longest"]  # type: ignore[operator,type-var]
            assert {(spec.path, spec.axes[0]) for spec in mine} == {(batch.budget.path, batch.budget.axes[0])}


@pytest.mark.parametrize("has_costs", [False, True])
def test_the_number_of_items_takes_part(has_costs: bool) -> None:
    batches = planned([item(output_tokens=1, input_size=1, frames=1)] * 3, has_costs)
    assert sorted(len(batch.items) for batch in batches) == [1, 2]
