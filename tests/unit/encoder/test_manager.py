"""EncoderCudaGraphManager on the CPU tape: a toy tower with all that a real one may have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpass import EncoderCudaGraphManager
from graphpass.encoder import (
    EncoderGraphKey,
    PackingCosts,
    budgets,
)
from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from graphpass.errors import CaptureError
from tests.threads import in_threads
from tests.unit.encoder import toy
from tests.unit.encoder.toy import BUDGETS, MIXED, assert_right, assert_same, made, poison
from tests.unit.serving.managed import GrowingRuntime

# -- results ----------------------------------------------------------------------------------------------------------


def variant(name: str) -> tuple[toy.ToyEncoder, dict[str, list[Any]]]:
    """An encoder, and what its items have besides their sizes, for each place in :data:`MIXED`."""
    count = len(MIXED)
    if name == "two outputs":
        return toy.ToyEncoder(toy.ToyTower(levels=2)), {}
    if name == "frames":
        return toy.ToyEncoder(max_frames=3), {"frames": [1 + i % 4 for i in range(count)]}
    if name == "paths":
        return toy.ToyEncoder(paths=("image", "video")), {"paths": [("image", "video")[i % 2] for i in range(count)]}
    if name == "axis":
        return toy.ToyEncoder(axes=(toy.GAINS,)), {"axes": [(("gain", 1 + i % 3),) for i in range(count)]}
    if name == "axis that rounds up":
        return toy.ToyEncoder(axes=(toy.LONGEST,)), {"axes": [(("longest", size),) for size in MIXED]}
    return toy.ToyEncoder(), {}


VARIANTS = ("plain", "two outputs", "frames", "paths", "axis", "axis that rounds up")
CHEAP = PackingCosts(dict.fromkeys(BUDGETS, 1.0), lambda tokens: 3.0 + tokens)


@pytest.mark.parametrize("costs", [None, CHEAP], ids=["greedy", "costs"])
@pytest.mark.parametrize("name", VARIANTS)
def test_results_are_those_of_each_item_alone(name: str, costs: PackingCosts | None) -> None:
    encoder, lists = variant(name)
    manager = made(encoder, costs=costs)
    for seed, order in enumerate((list(range(len(MIXED))), [3, 0, 8, 1], [7], [5], [6, 2, 7, 7])):
        items = encoder.select_encoder_cudagraph_items(toy.images(MIXED, seed=seed, **lists), order)
        expected = toy.one_by_one(encoder, items)
        forwards = len(encoder.forwards)
        poison(manager)
        assert_same(manager.execute(items), expected)
        assert len(encoder.forwards) == forwards, "a replay runs none of the tower's Python"
    stats = manager.get_cumulative_stats()
    assert stats.replays > 0
    assert stats.hits + stats.misses == toy.NUM_WITH_TOKENS + 4 + 0 + 1 + 2


@pytest.fixture(scope="module")
def shared() -> tuple[toy.ToyEncoder, EncoderCudaGraphManager]:
    encoder = toy.ToyEncoder()
    return encoder, made(encoder, costs=CHEAP)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 36).map(lambda tokens: 2 * tokens), max_size=20), st.integers(0, 1000))
def test_any_items_in_any_packing(
    shared: tuple[toy.ToyEncoder, EncoderCudaGraphManager], sizes: list[int], seed: int
) -> None:
    encoder, manager = shared
    items = toy.images(sizes, seed=seed)
    expected = toy.one_by_one(encoder, items)
    poison(manager)
    assert_same(manager.execute(items), expected)


def test_every_limit_takes_part() -> None:
    """Six items of one token: by tokens they fit the largest budget, by frames three at a time."""
    encoder = toy.ToyEncoder(max_frames=6)
    manager = made(encoder, max_items_per_batch=4)
    manager.execute(toy.images([2] * 6))
    manager.execute(toy.images([2] * 6, frames=[2] * 6))
    manager.execute(toy.images([2], frames=[7]))
    stats = manager.get_cumulative_stats()
    assert (stats.replays, stats.hits, stats.misses) == (2 + 2, 12, 1)


def test_results_survive_later_calls() -> None:
    encoder = toy.ToyEncoder(toy.ToyTower(levels=2))
    manager = made(encoder)
    items = toy.images(MIXED)
    kept = manager.execute(items)
    expected = toy.one_by_one(encoder, items)
    for seed in range(3):
        manager.execute(toy.images(MIXED[::-1], seed=seed))
    manager.clear()
    assert_same(kept, expected)
    kept[0][0].fill_(7)
    assert_same(kept[1:], expected[1:])


class Identity(toy.ToyEncoder):
    """What it returns is the buffer itself."""

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        return buffers["wide"]

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        return {"wide": torch.zeros(key.tokens, toy.WIDTH)}

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        return {"wide": torch.full((sum(items["sizes"]) // toy.MERGE, toy.WIDTH), float(items["value"][0]))}


def test_results_that_are_the_buffer_survive() -> None:
    encoder = Identity(padding={}, budget_range=(1, 32))
    object.__setattr__(encoder.config, "buffer_keys", ("wide",))
    manager = made(encoder)
    first = manager.execute(toy.images([4], value=[1.0]))[0]
    manager.execute(toy.images([4], value=[2.0]))
    assert first.unique().tolist() == [1]


def test_two_managers_do_not_disturb_each_other() -> None:
    encoders = [toy.ToyEncoder(toy.ToyTower(seed=seed)) for seed in (0, 1)]
    managers = [made(encoder) for encoder in encoders]
    items = [toy.images(MIXED, seed=seed) for seed in (0, 1)]
    expected = [toy.one_by_one(encoder, one) for encoder, one in zip(encoders, items, strict=True)]
    for _ in range(2):
        for manager, one, result in zip(managers, items, expected, strict=True):
            assert_same(manager.execute(one), result)
    managers[0].clear()
    assert_same(managers[1].execute(items[1]), expected[1])


def test_threads_take_turns() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder)
    items = [toy.images(MIXED, seed=seed) for seed in range(4)]
    expected = [toy.one_by_one(encoder, one) for one in items]
    found: dict[int, list[EncoderOutput]] = {}
    in_threads(lambda index: found.update({index: manager.execute(items[index])}))
    for index in range(4):
        assert_same(found[index], expected[index])


# -- captures ---------------------------------------------------------------------------------------------------------


def test_an_eager_call_has_its_limit() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder, capture=False)  # 32 tokens: the largest budget
    manager.execute(toy.images([20, 40, 80, 4, 4]))
    assert encoder.eager_calls == [2, 1, 2]


def test_budgets_share_their_buffers() -> None:
    alone = made(toy.ToyEncoder(), token_budgets=[32])
    ladder = made(toy.ToyEncoder())
    assert ladder.get_cumulative_stats().buffer_bytes == alone.get_cumulative_stats().buffer_bytes > 0


def test_without_enable_nothing_is_captured() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder, enable=False)
    assert manager.get_num_graphs_to_capture() == 0
    assert not manager.is_captured()
    assert manager.estimate().total_bytes == 0
    assert_right(manager, encoder)
    assert encoder.forwards == []
    assert manager.report().problems == ()


def test_a_second_capture_is_refused_until_cleared() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder)
    with pytest.raises(CaptureError, match="4 graphs"):
        manager.capture()
    manager.clear()
    assert not manager.is_captured()
    assert_right(manager, encoder)
    assert manager.get_cumulative_stats().hits == 0
    manager.capture()
    assert_right(manager, encoder)
    assert manager.get_cumulative_stats().hits == toy.NUM_WITH_TOKENS - 1


class FailsAt(toy.ToyEncoder):
    """Cannot be captured at some budgets: it reads the device's memory there, or is interrupted."""

    fails_at: frozenset[int] = frozenset()
    error: BaseException | None = None

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        if key.tokens in self.fails_at:
            if self.error is not None:
                raise self.error
            buffers["lengths"][0].item()
        return super().encoder_cudagraph_forward(buffers, key)


@pytest.mark.parametrize("fails_at", [{8}, {32}, {4, 16}, set(BUDGETS)])
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no memory"), ZeroDivisionError("of the tower")])
def test_a_failed_capture_leaves_the_others_and_eager(fails_at: set[int], error: BaseException | None) -> None:
    encoder = FailsAt()
    encoder.fails_at, encoder.error = frozenset(fails_at), error
    manager = made(encoder)
    assert_right(manager, encoder)
    stats = manager.get_cumulative_stats()
    assert {b.captured.descriptor.num_tokens for b in stats.budgets} == set(BUDGETS) - fails_at
    assert {key.tokens for key, _ in stats.failed} == fails_at
    assert manager.is_captured() == (len(fails_at) < len(BUDGETS))
    encoder.fails_at = frozenset()
    manager.clear()
    manager.capture()
    assert len(manager.get_cumulative_stats().budgets) == len(BUDGETS)
    assert_right(manager, encoder)


@pytest.mark.parametrize(
    "fails_at", [frozenset[int](), frozenset({32})], ids=["all can be captured", "not the largest"]
)
def test_the_pool_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_at: frozenset[int]
) -> None:
    """A pool of 100 bytes for each graph: there is room for two."""
    monkeypatch.setattr(budgets, "GraphRuntime", GrowingRuntime)
    encoder = FailsAt()
    encoder.fails_at = fails_at
    manager = made(encoder, max_pool_bytes=250)
    stats = manager.get_cumulative_stats()
    can_be = [tokens for tokens in (32, 16, 8, 4) if tokens not in fails_at]
    assert [(b.captured.descriptor.num_tokens, b.captured.pool_bytes) for b in stats.budgets] == [
        (t, 100) for t in can_be[:2]
    ]
    left_out = [(key.tokens, str(reason)) for key, reason in stats.failed if key.tokens not in fails_at]
    assert left_out == [(tokens, "the pool would be larger than max_pool_bytes=250") for tokens in can_be[2:]]
    assert len(stats.failed) == len(fails_at) + len(left_out)
    assert stats.pool_bytes == 200
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("an encoder budget has no graph: the pool" in message for message in warned) == 1
    assert_right(manager, encoder)
    assert manager.get_cumulative_stats().hits > 0


def test_an_interrupt_ends_the_capture_and_leaves_eager() -> None:
    encoder = FailsAt()
    encoder.fails_at, encoder.error = frozenset({8}), KeyboardInterrupt()
    manager = made(encoder, capture=False)
    with pytest.raises(KeyboardInterrupt):
        manager.capture()
    assert not manager.is_captured()
    assert_right(manager, encoder)


def test_an_estimate_captures_few_budgets_and_leaves_nothing() -> None:
    encoder = toy.ToyEncoder()
    manager = made(encoder, capture=False)
    assert manager.get_num_graphs_to_capture() == len(BUDGETS)
    estimate = manager.estimate()
    assert {key.tokens for key in encoder.forwards} == {32}
    assert [(group.name, group.num_keys) for group in estimate.groups] == [("encoder", len(BUDGETS))]
    assert not manager.is_captured()
    encoder.forwards.clear()
    manager.capture()
    # Once to warm up and once to record, the largest budget first.
    assert [key.tokens for key in encoder.forwards] == [32, 32, 16, 16, 8, 8, 4, 4]
    assert manager.get_cumulative_stats().buffer_bytes == estimate.buffer_bytes == estimate.total_bytes


def replaced(tower: toy.ToyTower) -> None:
    tower.embed.weight = torch.nn.Parameter(tower.embed.weight.detach() * 2)


def moved(tower: toy.ToyTower) -> None:
    tower.merger.bias.data = tower.merger.bias.detach() + 1


def exchanged(tower: toy.ToyTower) -> None:
    tower.blocks[1] = toy.Block()


def transposed(tower: toy.ToyTower) -> None:
    """Another layout at the old address."""
    square = next(weight for weight in tower.parameters() if weight.shape == (toy.WIDTH, toy.WIDTH))
    square.data = square.data.t()


class Within:
    """An encoder that hands everything on to another one."""

    def __init__(self, encoder: toy.ToyEncoder) -> None:
        self.encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


@pytest.mark.parametrize("is_within", [False, True], ids=["plain", "within another"])
@pytest.mark.parametrize("change", [replaced, moved, exchanged, transposed])
def test_weights_of_now_are_used(
    change: Callable[[toy.ToyTower], None], is_within: bool, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = toy.ToyEncoder()
    manager = made(Within(encoder) if is_within else encoder)  # type: ignore[arg-type]
    items = toy.images(MIXED)
    before = manager.execute(items)
    change(encoder.tower)
    expected = toy.one_by_one(encoder, items)
    assert_same(manager.execute(items), expected)
    assert not torch.allclose(before[0], expected[0])  # type: ignore[arg-type]
    assert "captured again" in caplog.text
    caplog.clear()
    with torch.no_grad():
        encoder.tower.embed.weight.mul_(2)
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    assert caplog.text == ""


# -- costs ------------------------------------------------------------------------------------------------------------


def test_equal_requests_are_planned_once() -> None:
    asked: list[int] = []
    costs = PackingCosts(CHEAP.replay, lambda tokens: asked.append(tokens) or 100.0)  # type: ignore[func-returns-value]
    manager = made(toy.ToyEncoder(), costs=costs)
    manager.execute(toy.images(MIXED, seed=1))
    once = len(asked)
    assert once > 0
    manager.execute(toy.images(MIXED, seed=2))
    assert len(asked) == once


# -- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "compiler"), [({"compile": False}, None), ({"compiler": "eager"}, "eager")])
def test_options_say_whether_and_with_what(options: dict[str, Any], compiler: str | None) -> None:
    encoder = toy.Compiled()
    made(encoder, token_budgets=[4], **options)
    assert encoder.compiled_with == compiler


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager = made(toy.ToyEncoder(), log_every=2)
    with caplog.at_level(logging.INFO, "graphpass"):
        for _ in range(5):
            manager.execute(toy.images([4]))
    lines = [record.message for record in caplog.records if record.message.startswith("encoder graphs")]
    assert len(lines) == 2
    assert "4 requests, 4 items replayed and 0 run eagerly (hit rate 100.0 %), 4 replays, 50.0 % padding" in lines[1]
    assert "4 tokens" in str(manager.get_cumulative_stats())
