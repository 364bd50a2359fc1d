"""Batch sizes that padding keeps serving get budgets of their own, when the user asks."""

from __future__ import annotations

import pytest
import torch

from graphpass import EncoderCudaGraphManager
from graphpass.encoder import PackingCosts
from graphpass.encoder.budgets import EncoderGraphs
from graphpass.encoder.protocol import EncoderGraphKey
from graphpass.errors import CaptureError, EncoderConfigError
from graphpass.serving.estimate import NOTHING_ESTIMATED
from graphpass.serving.traffic import CapturedGraph
from tests.unit.encoder import toy
from tests.unit.encoder.toy import BUDGETS, MERGE, assert_right, made
from tests.unit.serving.managed import GrowingRuntime


def repeated(manager: EncoderCudaGraphManager, *tokens: int, times: int = 3) -> None:
    for size in tokens * times:
        manager.execute(toy.images([MERGE * size]))


def budgets(manager: EncoderCudaGraphManager) -> list[int]:
    """Of the captured graphs, the largest first; a key of each path and axis."""
    return [budget.captured.descriptor.num_tokens for budget in manager.get_cumulative_stats().budgets]


def test_a_size_that_recurs_gets_its_own_budget() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder)
    repeated(manager, 11, 13, 16)
    repeated(manager, 7, times=2)
    before = {budget.captured.descriptor: budget.captured for budget in manager.get_cumulative_stats().budgets}
    assert manager.adapt() == (11, 13)
    assert budgets(manager) == [32, 16, 13, 11, 8, 4]
    assert_right(manager, encoder)
    for tokens in (11, 13, 16, 3):
        assert_right(manager, encoder, [MERGE * tokens])
    now = {budget.captured.descriptor: budget for budget in manager.get_cumulative_stats().budgets}
    assert all(now[key].captured is captured for key, captured in before.items()), "captured once"
    assert {key.num_tokens: now[key].replays for key in now.keys() - before.keys()} == {11: 1, 13: 1}
    assert manager.adapt() == ()


def test_the_new_budgets_are_captured_again_with_the_others() -> None:
    encoder = toy.ToyEncoder(paths=("image", "video"))
    manager = made(encoder)
    for _ in range(3):
        assert_right(manager, encoder, [22, 22], paths=["image", "video"])
    assert manager.adapt() == (11,)
    assert budgets(manager) == [32, 32, 16, 16, 11, 11, 8, 8, 4, 4]
    with torch.no_grad():
        encoder.tower.embed.weight.data = encoder.tower.embed.weight.data * 2
    assert_right(manager, encoder, [22, 6], paths=["video", "image"])
    assert budgets(manager) == [32, 32, 16, 16, 11, 11, 8, 8, 4, 4]


def test_what_is_refused() -> None:
    manager = made(toy.ToyEncoder(), capture=False)
    with pytest.raises(CaptureError, match=r"cannot adapt.*found no graphs"):
        manager.adapt()
    manager.capture()
    with pytest.raises(EncoderConfigError, match="max_sizes"):
        manager.adapt(0)
    priced = made(toy.ToyEncoder(), costs=PackingCosts(dict.fromkeys(BUDGETS, 1.0), lambda tokens: 3.0 + tokens))
    repeated(priced, 9)
    with pytest.raises(EncoderConfigError, match="9"):
        priced.adapt()
    assert_right(priced, toy.ToyEncoder())
    assert budgets(priced) == [32, 16, 8, 4]


def test_another_setting_is_refused_and_replaced_weights_are_captured_first() -> None:
    encoder = toy.ToyEncoder(toy.ToyTower(dropout=0.5))
    manager = made(encoder)
    repeated(manager, 11)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        manager.adapt()
    encoder.tower.train()
    with pytest.raises(CaptureError, match="train"):
        manager.adapt()
    encoder.tower.eval()
    with torch.no_grad():
        encoder.tower.embed.weight.data = encoder.tower.embed.weight.data * 2
    assert manager._captured is not None
    stale = manager._captured.graphs
    assert manager.adapt() == (11,)
    assert manager._captured.graphs is not stale
    forwards = len(encoder.forwards)
    assert_right(manager, encoder, [22])
    assert len(encoder.forwards) == forwards, "nothing is captured again"


@pytest.mark.parametrize("fails_at", [13, 32])
def test_after_a_failure_the_next_request_captures_again(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the pool was dropped, and the budgets of before were being captured again."""
    monkeypatch.setattr("graphpass.encoder.budgets.GraphRuntime", lambda pool, device: GrowingRuntime())
    encoder = toy.ToyEncoder()
    manager = made(encoder, max_pool_bytes=400)
    repeated(manager, 13)
    monkeypatch.setattr("graphpass.encoder.budgets.EncoderLadder._what_fits", lambda ladder: NOTHING_ESTIMATED.pool)
    of_key = EncoderGraphs.capture

    def fails(graphs: EncoderGraphs, key: EncoderGraphKey) -> CapturedGraph:
        if key.tokens == fails_at:
            raise RuntimeError("boom")
        return of_key(graphs, key)

    monkeypatch.setattr(EncoderGraphs, "capture", fails)
    with pytest.raises(RuntimeError, match="boom"):
        manager.adapt()
    monkeypatch.setattr(EncoderGraphs, "capture", of_key)
    assert_right(manager, encoder)
    assert budgets(manager) == [32, 16, 8, 4]
