"""A model that changes after the capture: weights, modules, settings of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch, CudaGraphManager, InputSpec
from graphpass.capture.staging import Layouts
from graphpass.errors import CaptureError, ShapeError, StaticInputError
from tests.unit.models import Rowwise
from tests.unit.serving.ambient import AMBIENT_CHANGES, autocast, training
from tests.unit.serving.managed import LARGEST, WIDTH, Rows, X, assert_right, captured, made, notes, rows, run


def test_weights_replaced_in_every_way_are_noticed() -> None:
    model = Rows().eval()
    manager = captured(model)
    assert_right(manager)
    for step in range(3):
        model.inner.weight = nn.Parameter(torch.full((5, WIDTH), float(step)))
        assert_right(manager)
        model.inner.weight.data = torch.randn(5, WIDTH)
        assert_right(manager)
        torch.utils.swap_tensors(model.inner.weight, nn.Parameter(torch.randn(5, WIDTH)))
        assert_right(manager)
        model.inner = nn.Linear(WIDTH, 5).eval()
        assert_right(manager)
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
        assert_right(manager)
    assert "captured again" in notes(manager)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_transposed_weight_is_refused(mode: str) -> None:
    model = Rowwise(WIDTH).eval()  # a weight that has the shape of its transpose
    manager = captured(model, mode)
    assert_right(manager)
    weight = model.inner.weight
    weight.data = weight.data.t()
    with pytest.raises(ShapeError, match="another layout") as raised:
        run(manager, rows(3))
    assert raised.value.expected != raised.value.found
    weight.data = weight.data.t()
    assert_right(manager)
    assert manager.runtime.stats().captured == 3


def test_layouts_are_compared_and_not_modes() -> None:
    weight, other = nn.Parameter(torch.randn(4, 4)), torch.randn(3)
    layouts = Layouts([weight, other])
    assert layouts.changed([weight, other]) is None
    weight.requires_grad_(False)
    weight.add_(1)
    assert layouts.changed([weight, other]) is None
    assert layouts.match(weight, other)
    weight.data = weight.data.t()
    changed = layouts.changed([weight, other])
    assert changed is not None
    assert "(1, 4)" in changed[2]


def test_moved_weights_are_refused_by_name_under_on_moved_input_error() -> None:
    model = Rows().eval()
    manager = captured(model, on_moved_input="error")
    old = model.inner.weight
    model.inner.weight = nn.Parameter(torch.ones(5, WIDTH))
    with pytest.raises(StaticInputError, match="FULL 4 tokens") as raised:
        run(manager, rows(3))
    assert "recapture" in raised.value.remedy
    model.inner.weight = old
    assert_right(manager)
    model.inner.weight = nn.Parameter(torch.ones(5, WIDTH))
    manager.recapture()
    assert_right(manager)


class Changes(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.layers = nn.ModuleList([nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for layer in self.layers:
            x = layer(x)
        return x * self.factor


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_an_exchanged_submodule_without_parameters_is_noticed(mode: str) -> None:
    model = Changes().eval()
    manager = captured(model, mode)
    assert_right(manager)
    model.act = nn.ReLU()
    assert_right(manager)
    assert "captured again" in notes(manager)


@pytest.mark.parametrize(
    ("mode", "change"),
    [*(("FULL", change) for change in AMBIENT_CHANGES), *(("PIECEWISE", change) for change in (training, autocast))],
)
def test_a_change_of_ambient_state_is_refused_by_name(mode: str, change: Any) -> None:
    model = Rows().eval()
    manager = captured(model, mode)
    assert_right(manager)
    with change(model), pytest.raises(CaptureError, match=f"{change.__name__} changed") as raised:
        run(manager, rows(3))
    assert raised.value.expected != raised.value.found
    assert_right(manager)
    assert manager.runtime.stats().captured == 3


class Picks(Rows):
    """The rows that the batch names: a number that is valid in a large batch is none in a small one."""

    def forward(self, x: torch.Tensor, last_rows: torch.Tensor) -> torch.Tensor:
        return super().forward(x).index_select(0, last_rows)


PICKED = InputSpec("last_rows", (LARGEST,), torch.int64, token_dim=None, request_dim=0)


def picking(num_tokens: int, num_reqs: int) -> Batch:
    last_rows = torch.arange(num_tokens - num_reqs, num_tokens)
    return Batch(num_tokens, inputs={"x": rows(num_tokens), "last_rows": last_rows}, num_reqs=num_reqs)


def replace_weights(manager: CudaGraphManager) -> None:
    manager.model.inner.weight = nn.Parameter(manager.model.inner.weight.clone())


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize(
    "capture_again",
    [
        CudaGraphManager.recapture,
        CudaGraphManager.estimate,
        replace_weights,
        lambda manager: (manager.close(), manager.capture(max_bytes=10**9)),
    ],
    ids=["recapture", "estimate", "replaced weights", "within a limit"],
)
def test_small_keys_are_captured_after_large_batches(
    capture_again: Callable[[CudaGraphManager], object], mode: str
) -> None:
    """What a large batch left in the buffers is no input of a small one."""
    model = Picks().eval()
    manager = captured(model, mode, specs=[X, PICKED])
    for num_tokens, num_reqs in ((LARGEST, 3), (8, 3), (2, 1), (1, 1)):
        manager.run(picking(LARGEST, 3))  # without a graph: it leaves what no key can read
        capture_again(manager)
        batch = picking(num_tokens, num_reqs)
        torch.testing.assert_close(manager.run(batch), model(**batch.inputs or {}).detach())
    manager.close()


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_a_batch_that_an_engine_wrote_outlives_a_capture(mode: str) -> None:
    model = Picks().eval()
    manager = made(model, mode, specs=[X, PICKED])
    for num_tokens in (LARGEST, 2):
        batch = picking(num_tokens, 2)
        manager.buffers["x"][:num_tokens].copy_(rows(num_tokens))
        manager.buffers["last_rows"][:2].copy_(torch.arange(num_tokens - 2, num_tokens))
        if manager.needs_capture():
            manager.capture()
        found = manager.run(Batch(num_tokens, num_reqs=2))
        torch.testing.assert_close(found, model(**batch.inputs or {}).detach())
        manager.close()
