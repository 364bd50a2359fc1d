"""Statistics and the report of an encoder, and budgets that are planned from them."""

from __future__ import annotations

import json
import pickle

import torch

from graphpass import EncoderCudaGraphManager, EncoderOptions, plan_sizes
from graphpass.encoder import EncoderStats
from tests.unit.encoder import toy


def test_an_encoders_numbers_are_those_of_its_statistics() -> None:
    options = EncoderOptions(token_budgets=[4, 8, 16, 32], costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.execute(toy.images([8]))
    (early,) = manager.report().problems
    assert (early.kind, early.what, early.times, early.remedy) == (
        "no graph",
        "nothing is captured",
        1,
        "call capture()",
    )
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
    options = EncoderOptions(token_budgets=[4], costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.capture()
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


REQUESTS = ([6], [10], [6, 6], [6], [22], [10], [0], [6], [70])
"""Patches, two a token, of requests that are one batch each; the last item is above the largest budget."""


def stats_over(budgets: list[int]) -> EncoderStats:
    """What a manager with these budgets counts over :data:`REQUESTS`, one of them before the capture."""
    options = EncoderOptions(token_budgets=budgets, costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.execute(toy.images([8]))
    manager.capture()
    for sizes in REQUESTS:
        manager.execute(toy.images(sizes))
    return manager.get_cumulative_stats()


def test_planned_budgets_fit_what_came() -> None:
    before = stats_over([4, 8, 16, 32])
    assert before.histogram == {3: 3, 5: 2, 6: 1, 11: 1}
    assert list(before.histogram) == sorted(before.histogram)
    assert pickle.loads(pickle.dumps(before)).histogram == before.histogram

    plan = plan_sizes({32: 0, **before.histogram}, 4)
    after = stats_over(list(plan.sizes))
    assert plan.sizes == (3, 6, 11, 32)
    assert (after.histogram, after.misses) == (before.histogram, before.misses)
    computed = {
        name: [b.replays * b.captured.descriptor.num_tokens for b in s.budgets]
        for name, s in (("a", after), ("b", before))
    }
    assert sum(computed["a"]) < sum(computed["b"])


def test_the_snapshot_is_the_callers() -> None:
    options = EncoderOptions(token_budgets=[4], costs=None)
    manager = EncoderCudaGraphManager(toy.ToyEncoder(), options=options, device="cpu", dtype=torch.float32)
    manager.capture()
    empty = manager.get_cumulative_stats()
    manager.execute(toy.images([6]))
    assert (empty.histogram, manager.get_cumulative_stats().histogram) == ({}, {3: 1})
