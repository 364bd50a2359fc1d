"""A small stack of layers that the tests of saved starts save, change and load."""

from __future__ import annotations

import torch
from torch import nn

INPUTS, SIZES = 8, [2, 4]
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(INPUTS, INPUTS), nn.LayerNorm(INPUTS), nn.ReLU()
        self.scale = 0.5
        self.register_buffer("shift", torch.zeros(INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bent(self.act(self.linear(self.norm(x)))) * self.scale + self.shift


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.ops.graphpass_saved.mixed(layer(x))
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
