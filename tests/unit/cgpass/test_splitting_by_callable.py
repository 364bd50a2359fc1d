"""Splitting ops named as Python callables: functions that Dynamo inlines, and module classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cgpass
import graphpass as gp
from graphpass import GraphRuntime


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What a model's author wrote: nothing of this name is left in Dynamo's graph."""
    weights = torch.softmax(query @ key.transpose(-1, -2), -1)
    return weights @ value


@functools.wraps(attention)
def decorated(*args: Any) -> Any:
    return attention(*args)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x)


class Layers(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            y = linear(x)
            x = x + (self.attend(y) if isinstance(self.attend, nn.Module) else self.attend(y, y, y))
        return torch.softmax(x, -1)


def regions_of(model: nn.Module, op: Any, rt: GraphRuntime) -> list[tuple[str, int]]:
    x = torch.randn(3, 4)
    options = cgpass.options(splitting_ops=[op], compiler="eager", runtime=rt)
    compiled = torch.compile(model, backend="cgpass", options=options)
    key = gp.BatchDescriptor(3)
    with torch.no_grad():
        for mode in (gp.CUDAGraphMode.NONE, gp.CUDAGraphMode.PIECEWISE, gp.CUDAGraphMode.FULL):
            for _ in range(2):
                x = torch.randn(3, 4)
                with rt.capturing(), gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
                    torch.testing.assert_close(compiled(x), model(x))
    return [(region.kind, region.num_ops) for region in rt.callables()[0].regions]


@pytest.mark.parametrize(
    ("attend", "op"),
    [
        (attention, attention),
        (attention, f"{__name__}.attention"),
        (decorated, decorated),
        (Attention(), Attention),
        (Attention(), attention),
        (Attention(), f"{__name__}.Attention"),
    ],
    ids=["function", "dotted name", "decorated", "module class", "function in a module", "dotted class"],
)
def test_what_dynamo_inlined_runs_eagerly_as_a_whole(attend: Any, op: Any, rt: GraphRuntime) -> None:
    found = regions_of(Layers(attend).eval(), op, rt)
    assert [kind for kind, _ in found] == ["captured", "eager", "captured", "eager", "captured"]
    # Transpose, product, softmax, product, besides inputs and output; the softmax at the end is no part of it.
    eager = [num_ops for kind, num_ops in found if kind == "eager"]
    assert eager[0] == eager[1]
    assert rt.compiled() == 3


def test_a_function_of_the_same_name_elsewhere_is_another_one(rt: GraphRuntime) -> None:
    def attention(*args: torch.Tensor) -> torch.Tensor:
        return torch.relu(args[0])

    assert [kind for kind, _ in regions_of(Layers(attention).eval(), globals()["attention"], rt)] == ["captured"]
