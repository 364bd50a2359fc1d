"""Statistics and the report of an encoder, budgets planned from them; items over ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from graphpass.encoder import EncoderItemSpec, ItemShares, balance_items, sharding
from graphpass.encoder.sharding import encoded_by_all
from graphpass.errors import EncoderConfigError
from tests.unit.encoder import toy


def test_an_encoders_numbers_are_those_of_its_statistics() -> None:
    manager = toy.made(toy.ToyEncoder(), capture=False, token_budgets=[4, 8, 16, 32])
    manager.execute(toy.images([8]))
    (early,) = manager.report().problems
    said = (early.kind, early.what, early.times, early.remedy)
    assert said == ("no graph", "nothing is captured", 1, "call capture()")
    manager.capture()
    for patches in ([6], [10], [6, 6], [6], [22], [70]):
        manager.execute(toy.images(patches))
    report, stats = manager.report(), manager.get_cumulative_stats()
    figures = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    keys = figures["replays"]["keys"]
    assert [key["sizes"]["tokens"] for key in keys] == [32, 16, 8, 4]
    assert all(key["sizes"]["items"] for key in keys)
    assert [(key["calls"], key["real"], key["padding"], key["capture_s"]) for key in keys] == [
        (budget.replays, budget.real_tokens, budget.padding, budget.captured.seconds) for budget in stats.budgets
    ]
    assert [calls["calls"] for calls in figures["replays"]["without_graph"]] == [stats.eager_calls] == [2]
    (above,) = report.problems
    assert above.what == "items have more output tokens than the largest captured budget, 32: they run eagerly"
    assert above.places == ("35 tokens",)
    assert above.times == 1
    assert "pass token_budgets that hold them" in above.remedy
    assert (figures["cost"]["graphs"], figures["cost"]["replays"]) == (4, stats.replays)
    assert figures["cost"]["buffer_bytes"] == stats.buffer_bytes > 0
    (traffic,) = figures["padding"]
    assert (traffic["field"], traffic["option"]) == ("tokens", "token_budgets")
    assert dict(traffic["histogram"]) == stats.histogram
    assert report.suggested_sizes(4) == {"tokens": [3, 6, 11, 32]}
    assert report.suggested_sizes(1) == {"tokens": [32]}, "the largest budget stays"
    text = str(report)
    assert "tokens=32 items=" in text
    assert "Suggested for this traffic: token_budgets=[3, 5, 6, 11, 32]" in text
    assert "num_reqs" not in text
    assert "num_tokens" not in text


def test_a_request_under_another_setting_is_a_problem() -> None:
    manager = toy.made(toy.ToyEncoder(), token_budgets=[4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        manager.execute(toy.images([6]))
    ((setting, requests),) = manager.get_cumulative_stats().other_settings.items()
    (problem,) = manager.report().problems
    assert (problem.kind, problem.times) == ("no graph", requests)
    assert setting in problem.what
    assert "capture()" in problem.remedy
    with torch.autocast("cpu", dtype=torch.bfloat16):
        manager.clear()
        manager.capture()
        manager.execute(toy.images([6]))
        assert manager.report().problems == ()


# Items over ranks: everything once, balanced by size and then by count, the same on every rank.


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ([], 2, ItemShares([], [0, 0], [0, 0])),
        ([5], 3, ItemShares([0], [1, 0, 0], [5, 0, 0])),
        ([1, 9, 4, 4], 2, ItemShares([1, 2, 3, 0], [1, 3], [9, 9])),
        ([3, 3, 3, 3], 2, ItemShares([0, 2, 1, 3], [2, 2], [6, 6])),
        ([0, 0, 0], 2, ItemShares([0, 2, 1], [2, 1], [0, 0])),
        ([7, 2], 1, ItemShares([0, 1], [2], [9])),
    ],
)
def test_largest_first_to_the_least_loaded_rank(sizes: list[int], num_ranks: int, expected: ItemShares) -> None:
    assert balance_items(sizes, num_ranks) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_shares_are_balanced_by_what_is_read(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what is returned: of patches one item has as many as the three others."""
    monkeypatch.setattr(sharding, "gather_rows", lambda own, *_: own)
    monkeypatch.setattr(sharding, "LEAST_SAVED", 20)
    specs = [EncoderItemSpec(10, 7), EncoderItemSpec(11, 7), EncoderItemSpec(30, 1), EncoderItemSpec(9, 7)]
    asked: list[int] = []

    def encode(_: Any, share: Sequence[int]) -> tuple[torch.Tensor, ...]:
        asked.extend(share)
        return (torch.zeros(sum(specs[item].output_tokens for item in share), 3),)

    agreement = Mock(rank=rank, num_ranks=2, exchange=lambda row: [list(row)] * 2)
    encoded_by_all(lambda: specs, [torch.empty(0, 3)], None, agreement, encode)
    assert sorted(asked) == [[2], [0, 1, 3]][rank]
    asked.clear()
    monkeypatch.setattr(sharding, "LEAST_SAVED", 31)  # the other share has 30 of 60 patches
    encoded_by_all(lambda: specs, [torch.empty(0, 3)], None, agreement, encode)
    assert asked == [0, 1, 2, 3], "a small request stays whole"


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "numbers"), [([1], 0, "num_ranks.*found 0"), ([3, -1], 2, "size.*found -1")]
)
def test_what_cannot_be_distributed(sizes: list[int], num_ranks: int, numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        balance_items(sizes, num_ranks)
