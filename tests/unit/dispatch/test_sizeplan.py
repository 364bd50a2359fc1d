"""Planned sizes against every other ladder."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpass import CudagraphDispatcher, plan_sizes
from graphpass.errors import OptionError

Rational = int | Fraction

WEIGHTS = st.integers(0, 20)
# size → (weight, cost): costs of few values, so that many ladders cost the same, and in no order
TRAFFIC = st.dictionaries(st.integers(1, 40), st.tuples(WEIGHTS, st.integers(0, 6)), min_size=1, max_size=8).filter(
    lambda traffic: any(weight for weight, _ in traffic.values())
)


def ladders(sizes: Iterable[int], largest: int, max_graphs: int) -> list[tuple[int, ...]]:
    """Every ladder of ``sizes`` up to ``largest``."""
    smaller = sorted(size for size in sizes if size < largest)
    return [(*rest, largest) for count in range(max_graphs) for rest in combinations(smaller, count)]


def rung(ladder: Sequence[int], size: int) -> int:
    return ladder[bisect_left(ladder, size)]


def work(ladder: Sequence[int], histogram: Mapping[int, Rational], cost: Callable[[int], Rational] = int) -> Rational:
    """What the traffic costs over a ladder, without rounding."""
    return sum(weight * cost(rung(ladder, size)) for size, weight in histogram.items())


def waste(ladder: Sequence[int], histogram: Mapping[int, int]) -> float:
    return 1 - sum(size * weight for size, weight in histogram.items()) / work(ladder, histogram)


# -- exact ------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(TRAFFIC, st.integers(1, 9))
def test_no_ladder_of_observed_sizes_is_better(traffic: dict[int, tuple[int, int]], max_graphs: int) -> None:
    """Whatever the cost; of equals the one with fewer sizes, then with smaller ones from the largest down."""
    histogram = {size: weight for size, (weight, _) in traffic.items()}
    costs = {size: cost for size, (_, cost) in traffic.items()}
    best = min(
        ladders(traffic, max(traffic), max_graphs),
        key=lambda ladder: (work(ladder, histogram, costs.__getitem__), len(ladder), ladder[::-1]),
    )
    plan = plan_sizes(histogram, max_graphs, cost=costs.__getitem__)
    assert plan.sizes == best
    least = work(best, histogram, costs.__getitem__)
    without_padding = sum(
        weight * min(cost for other, cost in costs.items() if other >= size) for size, weight in histogram.items()
    )
    assert plan.expected_cost == pytest.approx(least / sum(histogram.values()), rel=1e-12)
    assert plan.waste == pytest.approx(1 - without_padding / least if least else 0, abs=1e-12)


@given(st.dictionaries(st.integers(1, 9), WEIGHTS, min_size=1), st.integers(1, 4), st.lists(st.integers(0, 3)))
def test_with_costs_that_ascend_no_other_size_helps(counts: dict[int, int], max_graphs: int, steps: list[int]) -> None:
    counts[max(counts)] += 1
    costs = {size: sum(steps[:size]) for size in range(1, 12)}
    plan = plan_sizes(counts, max_graphs, cost=costs.__getitem__)
    everything = [ladder for top in (9, 11) if top >= max(counts) for ladder in ladders(costs, top, max_graphs)]
    everything += ladders(costs, max(counts), max_graphs)
    least = min(work(ladder, counts, costs.__getitem__) for ladder in everything)
    assert work(plan.sizes, counts, costs.__getitem__) == least


@pytest.mark.parametrize(
    ("histogram", "max_graphs", "sizes"),
    [
        ({1: 1, 2: 1, 3: 1}, 2, (1, 3)),  # (2, 3) costs the same
        ({5: 1, 64: 0}, 4, (5, 64)),  # covered, though it never came
        ({5: 0, 6: 1, 64: 1}, 4, (6, 64)),
        ({np.int64(5): np.float32(0.5), 8: True}, np.int32(4), (5, 8)),
    ],
)
def test_sizes(histogram: dict[int, float], max_graphs: int, sizes: tuple[int, ...]) -> None:
    plan = plan_sizes(histogram, max_graphs)
    assert plan.sizes == sizes
    assert {type(size) for size in plan.sizes} == {int}
    assert plan == plan_sizes(dict(reversed(histogram.items())), max_graphs)


# -- against other ladders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [5e-324, 1e-200, 1e200, 1e308])
@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e200, 5e307])
def test_sums_of_finite_numbers_stay_finite(weight: float, unit: float) -> None:
    """Also where their products or sums are no float64."""
    plan = plan_sizes({1: weight, 2: weight, 3: weight}, 2, cost=lambda size: size * unit)
    assert plan.sizes == (1, 3)
    assert plan.expected_cost == pytest.approx(7 / 3 * unit)
    assert plan.waste == pytest.approx(1 / 7)


def test_the_dispatcher_does_what_was_planned() -> None:
    histogram = Counter({size: 1 + size % 5 for size in range(1, 300, 3)})
    plan = plan_sizes(histogram, 12)
    dispatcher = CudagraphDispatcher("PIECEWISE", plan.sizes, max_num_reqs=1)
    for mode, descriptors in dispatcher.capture_plan():
        for descriptor in descriptors:
            dispatcher.mark_captured(mode, descriptor)
    padded = sum(count * dispatcher.dispatch(size).descriptor.num_tokens for size, count in histogram.items())
    assert plan.expected_cost == pytest.approx(padded / histogram.total(), rel=1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("histogram", "problem"),
    [
        ({}, "no traffic"),
        ([4, 8], "no traffic"),
        ({4: 0, 8: 0.0}, "no traffic"),
        ({0: 1, 8: 1}, "a size .* found 0;"),
        ({-4: 1}, "a size .* found -4;"),
        ({4.0: 1}, "a size .* found 4.0;"),
        ({"4": 1}, "a size .* found '4';"),
        ({True: 1}, "a size .* found True;"),
        ({4: -1, 8: 1}, "weight of size 4 .* found -1;"),
        ({4: 1, 8: math.nan}, "weight of size 8 .* found nan;"),
        ({4: 1, 8: math.inf}, "weight of size 8 .* found inf;"),
        ({4: 10**400}, "weight of size 4 "),
        ({4: "1"}, "weight of size 4 .* found '1';"),
        ({4: None}, "weight of size 4 .* found None;"),
        ({10**400: 1}, "cost of size "),
    ],
)
def test_a_histogram_is_refused(histogram: dict[int, float], problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        plan_sizes(histogram, 4)
    assert caught.value.remedy


@pytest.mark.parametrize("max_graphs", [0, -1, 1.5, None, True, "4"])
def test_max_graphs_is_refused(max_graphs: int) -> None:
    with pytest.raises(OptionError, match="max_graphs cannot be used"):
        plan_sizes({4: 1}, max_graphs)


@pytest.mark.parametrize("value", [math.nan, -1, math.inf, None, "4"])
def test_a_cost_is_refused(value: float) -> None:
    with pytest.raises(OptionError, match="the cost of size 8 cannot be used"):
        plan_sizes({4: 1, 8: 1}, 4, cost=lambda size: value if size == 8 else 1)
