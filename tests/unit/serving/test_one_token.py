"""A manager whose keys all have one token compiles the model for that alone, where a batch has one request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import BatchDescriptor, CudaGraphManager
from graphpass.errors import CaptureError
from graphpass.offload import WeightOffloader
from tests.unit.offload.test_offload import Stack
from tests.unit.ranks.test_conversation import Written
from tests.unit.serving.managed import (
    FULL,
    WIDTH,
    Rows,
    assert_right,
    captured,
    hits,
    notes,
    of_x,
    refused,
    rows,
    run,
)

ONE: dict[str, Any] = {"sizes": (1,), "max_num_reqs": 1}


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def num_compiled(manager: CudaGraphManager) -> int:
    return manager.runtime.compiled()


def test_larger_batches_run_uncompiled() -> None:
    manager = captured(Rows().eval(), compiler="aot_eager", on_fallback="warn", **ONE)
    before = num_compiled(manager)
    assert_right(manager, (1, 3, 1, 8, 2))
    assert num_compiled(manager) == before
    assert hits(manager) == {(FULL, 1): 2}
    assert "3 tokens: the batch runs uncompiled and without a graph: the batch is above the largest key" in notes(
        manager
    )
    manager.close()


@pytest.mark.parametrize("batch", [{"num_tokens": 0}, {"num_tokens": 3, "num_reqs": 3}])
def test_batches_without_tokens_and_of_several_requests_do_not(batch: dict[str, int]) -> None:
    manager, x = captured(Rows().eval(), compiler="aot_eager", **ONE), rows(batch["num_tokens"])
    before = num_compiled(manager)
    found = manager.run(of_x(x, num_reqs=batch.get("num_reqs")))
    assert num_compiled(manager) > before
    torch.testing.assert_close(found, manager.model(x).detach())
    assert_right(manager, (1, 3, 1))
    manager.close()


def by_index(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[0]).unsqueeze(1)


def shifted(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:] = x[:-1]
    return y


class Calls(nn.Module):
    """Calls a function, so that it is a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.function(x)


@pytest.mark.parametrize("function", [lambda x: x - x.mean(0), by_index, shifted], ids=["mean", "index", "shift"])
def test_a_model_that_mixes_tokens_is_refused_as_ever(function: Any) -> None:
    refused("mixes the tokens", Calls(function), **ONE)


def test_sizes_for_which_the_model_does_something_else_are_compiled_for() -> None:
    model = Calls(lambda x: x - x.mean(0) if x.shape[0] in (2, 3) else x * 2)
    manager = captured(model, **ONE)
    assert model.calls == 0
    assert_right(manager, (1, 8, 4))
    with pytest.raises(CaptureError, match="mixes the tokens"):
        run(manager, rows(3))
    manager.close()


def test_a_model_that_has_changed_is_proved_again() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    whole = Calls(model)
    manager = captured(whole, **ONE)
    assert_right(manager, (1, 3))
    model[1] = Mixes()
    with pytest.raises(CaptureError, match="mixes the tokens"):
        run(manager, rows(3))
    manager.close()


def test_what_cannot_be_traced_is_compiled_for_all_sizes() -> None:
    class Branches(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.inner.weight.sum() < 1e9 else x

    manager = captured(Branches().eval(), compiler="aot_eager", **ONE)
    before = num_compiled(manager)
    assert_right(manager, (1, 3))
    assert num_compiled(manager) == before
    assert "uncompiled" not in notes(manager)
    manager.close()


def test_keys_of_one_token_serve_several_requests() -> None:
    manager = captured(Rows().eval(), compiler="aot_eager", sizes=(1,))
    before = num_compiled(manager)
    assert_right(manager, (1, 3, 8))
    assert run(manager, rows(0)).shape == (0, 5)
    assert num_compiled(manager) == before
    manager.close()


def test_ranks_and_offloaded_weights_have_a_compiled_model() -> None:
    stack, x = Stack(), rows(3)
    for model, given in (
        (Rows().eval(), {"agreement": Written()}),
        (stack, {"offloader": WeightOffloader(stack.layers, num_slots=2)}),
    ):
        manager = captured(model, compiler="aot_eager", **ONE, **given)
        before = num_compiled(manager)
        assert run(manager, x).shape[0] == 3
        assert num_compiled(manager) == before
        assert "uncompiled" not in notes(manager)
        manager.close()


@pytest.mark.parametrize("estimates", [False, True])
def test_a_larger_key_is_compiled_for(estimates: bool) -> None:
    manager = captured(Rows().eval(), **ONE)
    assert_right(manager, (1, 3))
    manager.dispatcher.add_key(FULL, BatchDescriptor(4, 1))
    if estimates:
        assert len(manager.estimate().keys) == 2
    manager.capture()
    assert_right(manager, (1, 3, 4, 1, 8))
    assert hits(manager) == {(FULL, 1): 3, (FULL, 4): 2}
    manager.recapture()
    assert_right(manager, (1, 3, 4))
    manager.close()


def test_an_input_that_larger_batches_write_alone_is_copied_back() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            x.add_(1)
        return x * 2

    manager = captured(Calls(written), **ONE)
    for num_tokens in (3, 1, 8):
        x, expected = rows(num_tokens), rows(num_tokens)
        torch.testing.assert_close(run(manager, x), written(expected))
        torch.testing.assert_close(x, expected)
    manager.close()
