"""Factories for the commands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Cut(nn.Module):
    """A host read, a tensor on the CPU, a splitting op and a batch mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)
        self.temperature = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner(x))
        x = self.outer(x).sigmoid()
        x = x * self.temperature
        x = x.cos() + 1
        limit = x.sum().item()
        x = x.sin() / limit
        return x - x.mean(0)


def cut() -> tuple[nn.Module, torch.Tensor]:
    return Cut(), torch.ones(6, 16)


def cut_on_a_fake_gpu() -> tuple[nn.Module, torch.Tensor]:
    """Parameters and input are fake tensors on a GPU that need not exist; the temperature is on the CPU."""
    # With symbols, a host read gives a symbolic number: fake tensors have no values.
    model, mode = Cut(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        for layer in (model.inner, model.outer):
            layer.weight = nn.Parameter(torch.empty(16, 16, device="cuda:0"))
            layer.bias = nn.Parameter(torch.empty(16, device="cuda:0"))
        return model, torch.empty(6, 16, device="cuda:0")


def named() -> tuple[Any, dict[str, torch.Tensor]]:
    return (lambda x, y: x + y), {"x": torch.ones(5, 3), "y": torch.ones(5, 3)}


def raising() -> None:
    raise KeyError("no weights here")


def leaving() -> None:
    raise SystemExit(7)


def wrong_length() -> tuple[int, int, int, int]:
    return 1, 2, 3, 4


def number() -> int:
    return 3


class Wrong(nn.Module):
    """Compiled, it returns other values than eagerly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x


def wrong() -> tuple[nn.Module, torch.Tensor]:
    return Wrong(), torch.ones(5, 3)


def talking() -> tuple[nn.Module, torch.Tensor]:
    print("this goes to stdout")  # noqa: T201
    return nn.Linear(4, 4), torch.ones(5, 4)
