"""A small stack of layers that the tests of saved starts save, change and load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends import debugging

import graphpass as gp

INPUTS, SIZES = 8, [2, 4]
SAVES_AOT_EAGER = pytest.mark.skipif(
    not hasattr(debugging, "AOTEagerOutputCode"), reason="this torch saves no artifacts of aot_eager"
)
OPTIONS = {
    "capture_sizes": SIZES,
    "dynamic_dims": {"x": 0},
    "compiler": "eager",
    "splitting_ops": ["graphpass_saved::mixed"],
    "mode": "PIECEWISE",
    "progress": False,
}


@torch.library.custom_op("graphpass_saved::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@mixed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def bent(x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    return torch.relu(x) + by * x


class Norm(nn.Module):
    """Cheaper to trace than torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(INPUTS)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.divided(x) * self.weight

    def divided(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs() + self.eps)


class Bend:
    """No module: what a trace inlines of it has no guard."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return bent(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bend = Bend()
        self.linear, self.norm, self.act = nn.Linear(INPUTS, INPUTS), Norm(), nn.ReLU()
        self.scale = 0.5
        self.register_buffer("shift", torch.zeros(INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bend.apply(self.act(self.linear(self.norm(x)))) * self.scale + self.shift


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.graphpass_saved.mixed(x + self.layers[0](x))
        for layer in self.layers[1:]:
            x = x + layer(x)
        return x


class Plain(Stack):
    """Without the custom operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Broken(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def stack(kind: type[Stack] = Stack, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return kind().eval().requires_grad_(False)


def example(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))


def compiled(folder: Any, **options: Any) -> Any:
    """A new stack under torch.compile, with its runtime and the stack itself."""
    runtime, model = gp.GraphRuntime(), stack()
    saved = {"dispatch": "auto", "runtime": runtime, "warm_start": folder}
    fast = torch.compile(model, backend="cgpass", dynamic=True, options={**OPTIONS, **saved, **options})
    fast.runtime, fast.eager = runtime, model
    return fast


def assert_right(fast: Any) -> None:
    with torch.no_grad():
        for rows in (4, 3, 4):
            torch.testing.assert_close(fast(example(rows)), fast.eager(example(rows)))
