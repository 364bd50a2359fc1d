"""Models that are no single graph, or that FULL cannot hold."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch, InputSpec
from graphpass.errors import CaptureError, ShapeError
from tests.unit.engine.managed import (
    LARGEST,
    PIECEWISE,
    WIDTH,
    Rows,
    X,
    assert_right,
    captured,
    captured_keys,
    made,
    notes,
    replays,
    rows,
    run,
)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.inner(x).relu()


@pytest.mark.parametrize(
    ("scope", "mode"),
    [
        (torch.enable_grad, "FULL"),
        (torch.enable_grad, "PIECEWISE"),
        (torch.no_grad, "FULL"),
        (torch.inference_mode, "FULL"),
    ],
)
def test_a_model_with_a_graph_break_goes_through_dynamo_and_says_so(scope: Any, mode: str) -> None:
    model = Breaks().eval()
    manager = captured(model, mode)
    assert "every step goes through Dynamo's guards: the model is 2 graphs" in notes(manager)
    before, artifacts = replays(manager), manager.runtime.compiled()
    with scope():
        assert_right(manager, model, range(1, 9))
    assert replays(manager) == before + 2 * 8
    assert manager.runtime.compiled() == artifacts
    assert manager.stats().replays == 8
    assert_right(manager, model, [9])


def test_compare_compares_every_step() -> None:
    """Through Dynamo, in any grad mode of the caller."""
    model = Rows().eval()
    manager = captured(model, compare=True)
    assert "compare=True" in notes(manager)
    before = replays(manager)
    assert_right(manager, model, range(1, 9))
    assert replays(manager) == before + 8


def test_debug_runs_the_same_steps_eagerly() -> None:
    model = Rows().eval()
    manager = captured(model, "FULL_AND_PIECEWISE", debug=True)
    assert_right(manager, model, range(1, LARGEST + 1))


def test_a_tensor_that_the_model_keeps_elsewhere_goes_through_dynamo() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.ones(WIDTH)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[0]

    model = Keeps()
    manager = captured(model)
    assert "neither arguments, parameters nor buffers" in notes(manager)
    assert_right(manager, model)
    model.table[0] = torch.full((WIDTH,), 3.0)
    assert_right(manager, model)


class ReadsItem(nn.Module):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x * first[0].item() + 1


@pytest.mark.parametrize("on_fallback", ["warn", "silent", "error"])
def test_a_model_that_full_cannot_hold_goes_on_in_regions(on_fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    specs = [X, InputSpec("first", (1,), torch.float32, token_dim=None)]
    manager = made(ReadsItem(), "FULL", specs=specs, on_fallback=on_fallback)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if on_fallback == "error":
            with pytest.raises(CaptureError, match="cannot be captured as a whole") as raised:
                manager.capture()
            assert "PIECEWISE" in raised.value.remedy
            return
        with caplog.at_level(logging.WARNING, "graphpass"):
            manager.capture()
        said = [record for record in caplog.records if "FULL is not possible" in record.getMessage()]
        assert len(said) == (on_fallback == "warn")
        assert "FULL is not possible, PIECEWISE instead" in notes(manager)
        assert [mode for mode, _, _ in captured_keys(manager)] == [PIECEWISE] * 3
        for num_tokens in (3, 8, 1, 9):
            x, first = rows(num_tokens), torch.tensor([float(num_tokens)])
            got = manager.run(Batch(num_tokens, inputs={"x": x, "first": first}))
            torch.testing.assert_close(got, x * num_tokens + 1)
    assert manager.stats().replays == 3


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_another_structure_at_another_size_is_refused_by_name(mode: str) -> None:
    manager = captured(lambda x: (x + 1, x * 2) if x.shape[0] > 8 else (x + 1,), mode, sizes=(2, 8))
    with pytest.raises(ShapeError, match="another structure"):
        run(manager, rows(9))
    torch.testing.assert_close(run(manager, rows(3)), (rows(3) + 1,))
    manager = made(lambda x: (x + 1, x * 2) if x.shape[0] > 4 else (x + 1,), mode, sizes=(2, 8))
    with pytest.raises(ShapeError, match=r"another structure|does not fit"):
        manager.capture()


def test_another_dtype_at_another_size_is_refused_by_name() -> None:
    manager = made(lambda x: x.bfloat16() if x.shape[0] > 4 else x)
    with pytest.raises(ShapeError, match="output 0") as raised:
        manager.capture()
    assert "bfloat16" in raised.value.expected
    assert "float32" in raised.value.found
