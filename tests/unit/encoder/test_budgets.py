"""Ladders of budgets: doubling, fine, and as the user gives them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass import EncoderOptions
from graphpass.encoder import generate_budgets, smallest_fitting_budget
from graphpass.encoder.options import checked_budgets, fine_budgets
from graphpass.errors import EncoderConfigError


@pytest.mark.parametrize(
    ("minimum", "maximum", "ratio", "budgets"),
    [
        (64, 4096, 2, [64, 128, 256, 512, 1024, 2048, 4096]),
        (64, 1000, 2, [64, 128, 256, 512, 1000]),
        (5, 5, 2, [5]),
        (1, 3, 2, [1, 2, 3]),
        (1, 6, 1.1, [1, 2, 3, 4, 5, 6]),
        (10, 40, 1.5, [10, 15, 22, 33, 40]),
    ],
)
def test_a_ladder_grows_by_its_ratio_and_ends_at_the_maximum(
    minimum: int, maximum: int, ratio: float, budgets: list[int]
) -> None:
    assert generate_budgets(minimum, maximum, ratio=ratio) == budgets


@pytest.mark.parametrize(
    ("minimum", "maximum", "ratio", "numbers"),
    [
        (0, 4, 2, "minimum=0, maximum=4"),
        (-3, 4, 2, "minimum=-3"),
        (9, 4, 2, "minimum=9, maximum=4"),
        (1, 4, 1, "ratio=1"),
        (1, 4, 0.5, "ratio=0.5"),
        (1, 4, math.inf, "ratio=inf"),
        (1, 4, math.nan, "ratio=nan"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused_with_its_numbers(
    minimum: int, maximum: int, ratio: float, numbers: str
) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        generate_budgets(minimum, maximum, ratio=ratio)


@pytest.mark.parametrize(("tokens", "budget"), [(0, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_the_smallest_fitting_budget(tokens: int, budget: int | None) -> None:
    assert smallest_fitting_budget([4, 8], tokens) == budget


def test_nothing_fits_no_budget() -> None:
    assert smallest_fitting_budget([], 0) is None


def worst_padding(budgets: list[int]) -> float:
    return max((1 - (small + 1) / large for small, large in itertools.pairwise(budgets)), default=0)


def test_the_default_number_of_graphs_pads_little() -> None:
    budgets = fine_budgets(16, 4096, max_graphs=EncoderOptions().max_graphs)
    assert len(budgets) <= EncoderOptions().max_graphs
    assert worst_padding(budgets) <= 0.125
    assert set(budgets) >= {4096, 2048, 1024, 512, 256, 128, 64, 32, 16}


@given(st.integers(1, 300), st.integers(0, 5000), st.integers(2, 40))
def test_a_fine_ladder_keeps_to_its_length_and_halves_where_it_can(minimum: int, above: int, max_graphs: int) -> None:
    budgets = fine_budgets(minimum, minimum + above, max_graphs=max_graphs)
    assert budgets == sorted(set(budgets))
    assert (budgets[0], budgets[-1]) == (minimum, minimum + above)
    assert len(budgets) <= max_graphs
    if max_graphs > math.log2((minimum + above) / minimum) + 1:
        assert worst_padding(budgets) <= 0.5


@pytest.mark.parametrize(("max_graphs", "most"), [(10, 0.5), (50, 0.125), (100, 0.08), (200, 0.045)])
def test_more_graphs_pad_less(max_graphs: int, most: float) -> None:
    budgets = fine_budgets(16, 4096, max_graphs=max_graphs)
    assert len(budgets) <= max_graphs
    assert worst_padding(budgets) <= most


def test_budgets_are_multiples_of_what_items_are() -> None:
    budgets = fine_budgets(50, 1620, max_graphs=8, multiple=50)
    assert {budget % 50 for budget in budgets} == {0}
    assert (budgets[0], budgets[-1]) == (50, 1600)


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"minimum": 1, "maximum": 8, "max_graphs": 0}, "room for 0"),
        ({"minimum": 8, "maximum": 4, "max_graphs": 3}, "minimum=8, maximum=4"),
        ({"minimum": 3, "maximum": 4, "max_graphs": 3, "multiple": 5}, "minimum=1, maximum=0"),
    ],
)
def test_a_fine_ladder_that_cannot_be_is_refused(arguments: dict[str, int], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        fine_budgets(**arguments)


def test_one_graph_is_the_largest() -> None:
    assert fine_budgets(2, 100, max_graphs=1) == [100]


@pytest.mark.parametrize(
    ("budgets", "numbers"),
    [
        ([], r"\[\]"),
        ([0, 4], "found 0"),
        ([4, -1], "found -1"),
        ([4, 2.5], r"found 2\.5"),
        ([4, True], "found True"),
        ([8, 4, 8], "8 2 times"),
        ([4, 200], "from 4, its smallest item, to 100, its largest batch; found 200"),
        ([1, 3], "found 3"),
    ],
)
def test_budgets_of_the_user_that_cannot_be_are_refused(budgets: list[int], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        checked_budgets(budgets, 4, 100)


def test_budgets_of_the_user_ascend() -> None:
    assert checked_budgets([100, 2, 8], 4, 100) == (2, 8, 100)
