"""What may change between calls, and threads that share a model: the next call is that of the model of now."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import GraphpassError
from graphpass.compat import dynamo
from graphpass.errors import ShapeError
from tests.unit.graphed.oracle import graphed, replays
from tests.unit.models import linear, module
from tests.unit.serving.ambient import default_dtype


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Changing(nn.Module):
    """A model whose Python state Dynamo guards in many ways."""

    SCALE = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.drop = nn.Dropout(0.5)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.scales = [1.0, 2.0]
        self.flags = {"first"}
        self.named: dict[str, float] = {}
        self.kind = Kind.PLAIN
        self.count: float = 2
        self.table = [torch.ones(4)]
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        for scale in (*self.scales, *self.named.values()):
            x = x * scale
        x = self.drop(x) * (1 if "first" in self.flags else 3) * (2 if self.kind is Kind.DOUBLED else 1)
        ones = torch.ones(4, dtype=torch.long) * self.count
        return (x * (5 if hasattr(self, "extra") else 1) * self.SCALE) * self.table[0] + self.shift + ones.sum() // 3


def agrees(fast: Callable[..., Any], model: Callable[..., Any], *sizes: int, dtype: torch.dtype | None = None) -> None:
    """Calls of these sizes, each after the same seed, return what the model returns."""
    for step, size in enumerate(sizes):
        x = torch.randn(size, 4, dtype=dtype)
        torch.manual_seed(step)
        with torch.no_grad():
            want = model(x)
        torch.manual_seed(step)
        torch.testing.assert_close(fast(x), want)


def turned(model: Changing) -> None:
    weight = model.layers[0].weight
    weight.data = weight.data.t()  # type: ignore[operator, union-attr]


TURNED = "strides of a weight, at its address"
CHANGES: dict[str, Callable[[Changing], Any]] = {
    "a longer list": lambda m: m.scales.append(3.0),
    "a new item of a dict": lambda m: m.named.update(new=4.0),
    "a smaller set": lambda m: m.flags.clear(),
    "another enum member": lambda m: setattr(m, "kind", Kind.DOUBLED),
    "another function": lambda m: setattr(m, "activation", torch.tanh),
    "another layer": lambda m: m.layers.append(nn.Linear(4, 4)),
    "an attribute that was absent": lambda m: setattr(m, "extra", 1),
    "a float where an int was": lambda m: setattr(m, "count", 2.0),
    "another class attribute of the instance": lambda m: setattr(m, "SCALE", 7),
    "a tensor in a list": lambda m: m.table.__setitem__(0, torch.full((4,), 3.0)),
    "another forward of a layer": lambda m: setattr(m.layers[0], "forward", lambda x: x * 3),
    "train mode": lambda m: m.train(),
    "a submodule of another size": lambda m: m.layers.__setitem__(0, nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))),
    TURNED: turned,
}


@pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, declared: bool) -> None:
    model, eager = Changing().eval(), Changing().eval()
    fast = graphed(model, *(([2, 4, 8], {"x": 0}) if declared else ()))
    if declared:
        fast.capture(torch.randn(3, 4))
    agrees(fast, eager, 3, 5, 3, 5, 3, 5)
    assert replays(fast) > 0
    for each in (model, eager):
        torch.manual_seed(9)
        try:
            with torch.no_grad():
                CHANGES[change](each)
        except GraphpassError:
            pytest.skip("refused by a typed error")
    before = replays(fast)
    if change == TURNED and not dynamo.guards_module_layouts():
        with pytest.raises(ShapeError, match=r"another layout than at capture.*strides \(1, 4\).*contiguous copy"):
            fast(torch.randn(3, 4))
        for each in (model, eager):  # the remedy
            each.layers[0].weight.data = each.layers[0].weight.data.contiguous()
    agrees(fast, eager, 3, 5, 4, 3, 5, 4, 3, 5, 4)
    assert replays(fast) > before


@pytest.mark.parametrize(
    "ambient",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: default_dtype(nn.Identity()),
        torch.inference_mode,
        torch.enable_grad,
    ],
    ids=["autocast", "default dtype", "inference mode", "grad"],
)
def test_ambient_state(ambient: Callable[[], Any]) -> None:
    model = module(lambda self, x: self.inner(x) + torch.ones(4), inner=linear(4)).eval()
    fast = graphed(model)
    for number in range(12):
        x = torch.randn(3 + number % 2, 4)
        with ambient() if number % 4 > 1 else contextlib.nullcontext():
            found = fast(x)
            with torch.no_grad():
                torch.testing.assert_close(found, model(x))
    assert replays(fast) > 0


def test_many_models_of_one_class_each_have_their_recompile_limit() -> None:
    for _ in range(12):
        model = Changing().eval()
        fast = graphed(model)
        agrees(fast, model, 3, 3, 3)
        assert replays(fast) > 0
