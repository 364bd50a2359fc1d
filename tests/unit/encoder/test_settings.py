"""Settings that change after the capture: autocast, training, defaults, autograd and inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from tests.unit.encoder import toy
from tests.unit.encoder.toy import MIXED, assert_same, made


@contextlib.contextmanager
def training(tower: toy.ToyTower) -> Iterator[None]:
    tower.blocks[1].train()
    yield
    tower.blocks[1].eval()


@contextlib.contextmanager
def double_by_default(tower: toy.ToyTower) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def reduced_products(tower: toy.ToyTower) -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def deterministic(tower: toy.ToyTower) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def autocast(tower: toy.ToyTower) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


OTHER_SETTINGS = {
    "autocast": autocast,
    "training": training,
    "default_dtype": double_by_default,
    "matmul_precision": reduced_products,
    "deterministic": deterministic,
}


@pytest.mark.parametrize("kind", [toy.ToyEncoder, toy.Compiled])
@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_settings_of_now_are_used(setting: str, kind: type[toy.ToyEncoder], caplog: pytest.LogCaptureFixture) -> None:
    """Under other settings than at the capture the encoder runs eagerly; under the old ones its graphs replay again."""
    encoder = kind(toy.ToyTower(dropout=0.5))
    manager = made(encoder, max_eager_tokens=1000, compiler="eager" if kind is toy.Compiled else None)
    items = toy.images(MIXED)
    plain = toy.one_by_one(encoder, items)
    with OTHER_SETTINGS[setting](encoder.tower):
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
