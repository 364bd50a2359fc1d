"""The report of an encoder: budgets in the user's words, items that ran eagerly, suggested budgets."""

from __future__ import annotations

import json

import torch

from graphpass import EncoderCudaGraphManager, EncoderOptions
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
