"""What changes after the capture: weights, attributes, hooks; settings of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from tests.unit.encoder import toy
from tests.unit.encoder.test_manager import replaced
from tests.unit.encoder.toy import MIXED, assert_right, assert_same, made
from tests.unit.serving.ambient import AMBIENT_CHANGES, autocast


@pytest.mark.parametrize("method", ["prepare_encoder_cudagraph_replay_buffers", "encoder_eager_forward"])
def test_a_request_that_fails_leaves_the_next_ones(method: str) -> None:
    """It finds the device out of memory, when its buffers are prepared or in an eager call."""
    encoder = toy.ToyEncoder()
    manager = made(encoder)
    error = torch.OutOfMemoryError("no memory")
    with patch.object(encoder, method, side_effect=error), pytest.raises(torch.OutOfMemoryError):
        manager.execute(toy.images(MIXED))
    before = manager.get_cumulative_stats()
    assert_right(manager, encoder)
    stats = manager.get_cumulative_stats()
    assert (stats.hits - before.hits, stats.misses - before.misses) == (toy.NUM_WITH_TOKENS - 1, 1)


def test_statistics_go_on_when_graphs_are_dropped() -> None:
    manager = made(toy.ToyEncoder())
    for sizes in ([6], [22], [6, 2]):
        manager.execute(toy.images(sizes))
    before = manager.get_cumulative_stats()
    assert (before.hits, before.replays, before.padding_waste) == (4, 3, pytest.approx(1 - 18 / 24))
    manager.clear()
    after = manager.get_cumulative_stats()
    assert (after.hits, after.histogram) == (before.hits, before.histogram)
    assert (after.replays, after.padding_waste) == (before.replays, before.padding_waste)


@pytest.mark.parametrize("setting", ["autocast", "training"])
def test_weights_that_change_under_another_setting_wait_for_the_settings_of_the_capture(setting: str) -> None:
    encoder = toy.ToyEncoder()
    manager, items = made(encoder), toy.images([4, 8])
    replaced(encoder.tower)
    encoder.tower.train(setting == "training")
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        manager.execute(items)
    assert manager.get_cumulative_stats().misses == 2
    encoder.tower.eval()
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    assert manager.get_cumulative_stats().hits == 2


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_a_capture_of_new_weights_that_fails_is_tried_again(error: BaseException) -> None:
    encoder = toy.ToyEncoder()
    manager, items = made(encoder), toy.images([4, 8])
    replaced(encoder.tower)
    prepare = "prepare_encoder_cudagraph_capture_inputs"
    with patch.object(encoder, prepare, side_effect=error), pytest.raises(type(error)):
        manager.execute(items)
    assert not manager.is_captured()
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    assert manager.get_cumulative_stats().hits == 2


def test_eager_calls_that_find_no_memory_cost_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    def eager(call: Callable[..., EncoderOutput], items: EncoderItems) -> EncoderOutput:
        if len(items["patches"]) >= 32:
            raise torch.OutOfMemoryError("no memory")
        return call(items)

    encoder = toy.changed(toy.WithExamples(), "encoder_eager_forward", eager)
    manager = made(encoder, costs="measured", token_budgets=[4, 8, 16, 32])
    assert manager.get_cumulative_stats().failed == ()
    assert "no memory for an eager call beside the graphs" in caplog.text
    (problem,) = [problem for problem in manager.report().problems if "no memory for an eager call" in problem.what]
    assert "32 tokens num_reqs=32" in problem.places
    items = toy.images([40, 60])
    assert_same(manager.execute(items), toy.one_by_one(toy.ToyEncoder(encoder.tower), items))
    assert manager.get_cumulative_stats().misses == 0


# Settings that change after the capture: autocast, training, defaults, autograd and inference mode.


OTHER_SETTINGS = {change.__name__: change for change in AMBIENT_CHANGES}


@pytest.mark.parametrize("kind", [toy.ToyEncoder, toy.Compiled])
@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_settings_of_now_are_used(setting: str, kind: type[toy.ToyEncoder], caplog: pytest.LogCaptureFixture) -> None:
    """Under other settings than at the capture the encoder runs eagerly; under the old ones its graphs replay again."""
    encoder = kind(toy.ToyTower(dropout=0.5))
    manager = made(encoder, max_eager_tokens=1000, compiler="eager" if kind is toy.Compiled else None)
    items = toy.images(MIXED)
    plain = toy.one_by_one(encoder, items)
    with OTHER_SETTINGS[setting](encoder.tower.blocks[1]):
        expected = of_all(encoder, items)
        for _ in range(2):
            torch.manual_seed(3)
            found = manager.execute(items)
            assert [one.dtype for one in found] == [one.dtype for one in expected]
            assert_same(found, expected)
    stats = manager.get_cumulative_stats()
    assert (stats.hits, stats.misses, dict(stats.other_settings)) == (0, 2 * toy.NUM_WITH_TOKENS, {setting: 2})
    logged = [record.message for record in caplog.records if record.name == "graphpass"]
    # The advice after eight calls without a context: how many of the tower's own calls count depends on Dynamo.
    logged = [message for message in logged if "without a forward context" not in message]
    assert [f"{setting} changed since" in message for message in logged] == [True]
    assert setting in str(stats)
    assert_same(manager.execute(items), plain)
    assert manager.get_cumulative_stats().hits == toy.NUM_WITH_TOKENS - 1


def of_all(encoder: toy.ToyEncoder, items: EncoderItems) -> Sequence[EncoderOutput]:
    """What the tower says of all items in one call."""
    with torch.no_grad():
        torch.manual_seed(3)
        output = encoder.encoder_eager_forward(items)
        encoder.eager_calls.clear()
    return encoder.postprocess_encoder_output((output,), encoder.get_encoder_cudagraph_item_specs(items))


@pytest.mark.parametrize("kind", [toy.ToyEncoder, toy.Compiled])
def test_autocast_at_the_capture_is_captured(kind: type[toy.ToyEncoder]) -> None:
    encoder = kind()
    with autocast(encoder.tower):
        manager = made(encoder, compiler="eager" if kind is toy.Compiled else None)
        items = toy.images(MIXED)
        expected = toy.one_by_one(encoder, items)
        found = manager.execute(items)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert manager.get_cumulative_stats().hits == toy.NUM_WITH_TOKENS - 1
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    assert dict(manager.get_cumulative_stats().other_settings) == {"autocast": 1}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("mode_of_capture", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_autograd_and_inference_mode_change_nothing(
    mode: Callable[[], Any], mode_of_capture: Callable[[], Any]
) -> None:
    encoder = toy.ToyEncoder()
    with mode_of_capture():
        manager = made(encoder)
    with mode():
        items = toy.images(MIXED)
        found = manager.execute(items)
    assert_same(found, toy.one_by_one(encoder, items))
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in found)  # type: ignore[union-attr]
    assert manager.get_cumulative_stats().hits == toy.NUM_WITH_TOKENS - 1
