"""Calls past Dynamo: what its guards would have seen is compared, by name; new parameters are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpass
from graphpass import CaptureError, GraphedModel
from tests.unit.manager.ambient import AMBIENT_CHANGES


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x))


def captured() -> tuple[Model, GraphedModel]:
    model = Model().eval()
    fast = graphpass.graphed(model, [4, 8], {"x": 0}, compiler="eager")
    fast.capture(torch.randn(4, 6))
    return model, fast


def calls_of_forward(fast: GraphedModel) -> int:
    return sum(c.replayed for c in fast.runtime.counts().values())


def test_a_whole_model_is_called_past_dynamo() -> None:
    model, fast = captured()
    torch.compiler.set_stance("force_eager")
    try:
        before = calls_of_forward(fast)
        x = torch.randn(3, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
        assert calls_of_forward(fast) == before + 1, "Dynamo would have run it eagerly"
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("change", AMBIENT_CHANGES)
def test_a_change_of_ambient_state_is_refused_by_name(change: Any) -> None:
    model, fast = captured()
    x = torch.randn(3, 6)
    with change(model), pytest.raises(CaptureError, match=f"{change.__name__} changed") as raised:
        fast(x)
    assert raised.value.expected != raised.value.found
    torch.testing.assert_close(fast(x), model(x).detach())


def test_after_close_the_new_state_is_captured() -> None:
    model, fast = captured()
    fast.close()
    model.train()
    torch.manual_seed(5)
    got = fast(torch.ones(4, 6))
    torch.manual_seed(5)
    torch.testing.assert_close(got, model(torch.ones(4, 6)).detach())
    assert got.eq(0).any(), "dropout is on"


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_and_inference_mode_of_the_caller_do_not_matter(grad: bool) -> None:
    model, fast = captured()
    x = torch.randn(3, 6)
    with torch.set_grad_enabled(grad):
        got = fast(x)
    assert not got.requires_grad
    torch.testing.assert_close(got, model(x).detach())
    with torch.inference_mode():
        torch.testing.assert_close(fast(torch.ones(3, 6)), model(torch.ones(3, 6)))


def test_a_replaced_parameter_is_found() -> None:
    model, fast = captured()
    for step in range(3):
        model.inner.weight = nn.Parameter(torch.full((6, 6), float(step)))
        for _ in range(2):
            x = torch.randn(3, 6)
            torch.testing.assert_close(fast(x), model(x).detach())


def test_a_parameter_with_new_memory_is_found() -> None:
    model, fast = captured()
    for _ in range(3):
        model.inner.weight.data = torch.randn(6, 6)
        x = torch.randn(3, 6)
        torch.testing.assert_close(fast(x), model(x).detach())


def test_weights_loaded_in_place_need_no_capture() -> None:
    model, fast = captured()
    model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})
    before = fast.runtime.stats().captured
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert fast.runtime.stats().captured == before


def test_a_replaced_submodule_is_found() -> None:
    model, fast = captured()
    model.inner = nn.Linear(6, 6)
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), model(x).detach())


def test_a_tensor_the_model_keeps_elsewhere_goes_through_dynamo() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.ones(6)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[0]

    model = Keeps()
    fast = graphpass.graphed(model, [4], {"x": 0}, compiler="eager")
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), x)
    model.table[0] = torch.full((6,), 3.0)
    torch.testing.assert_close(fast(x), x * 3)
    assert any("neither arguments, parameters nor buffers" in what for _, what in fast.report()["Notes"].rows)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_python_attribute_that_changes_is_not_frozen(mode: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = Scaled()
    fast = graphpass.graphed(model, [4], {"x": 0}, compiler="eager", mode=mode)
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x), x * 2)
    model.factor = 5.0
    torch.testing.assert_close(fast(x), x * 5)


def test_two_graphed_models_of_one_class_keep_apart() -> None:
    one, first = captured()
    two = Model().eval()
    nn.init.ones_(two.inner.weight)
    second = graphpass.graphed(two, [4, 8], {"x": 0}, compiler="eager")
    for _ in range(2):
        x = torch.randn(3, 6)
        torch.testing.assert_close(first(x), one(x).detach())
        torch.testing.assert_close(second(x), two(x).detach())
    assert first.runtime is not second.runtime


def test_random_numbers_follow_the_seed() -> None:
    model, fast = captured()
    fast.close()
    model.train()
    x = torch.ones(4, 6)
    fast(x)
    torch.manual_seed(1)
    got = [fast(x), fast(x)]
    torch.manual_seed(1)
    torch.testing.assert_close(got, [model(x).detach(), model(x).detach()])
    assert not torch.equal(*got)
