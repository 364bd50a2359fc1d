"""Whole models: what Dynamo makes of them is partitioned, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from graphpass import partition
from graphpass.regions import Partition

Split = Callable[..., Partition]


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    def block(t: torch.Tensor) -> torch.Tensor:
        return t.sin() + 1

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) * 2  # type: ignore[no-any-return]


def vmapped(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.sin() + row.sum())(x) * 2


def differentiated(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda t: t.sin().sum())(x) * 2


def looped(x: torch.Tensor) -> torch.Tensor:
    def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, y * 2

    start = torch.zeros((), dtype=torch.int64)
    return torch._higher_order_ops.while_loop(lambda i, y: i < 3, step, (start, x))[1] + 1  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    """A custom function, which Dynamo turns into a higher-order op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def custom_gradient(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x) + 1  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("function", [checkpointed, vmapped, differentiated, custom_gradient])
def test_higher_order_code_is_one_captured_region(dynamo_split: Split, function: Callable[..., Any]) -> None:
    split = dynamo_split(function, torch.rand(3, 4, requires_grad=function is custom_gradient))
    assert [region.kind for region in split.regions] == ["captured"]
    assert split.mutated_inputs == ()


def test_a_loop_that_the_host_ends_is_eager(dynamo_split: Split) -> None:
    split = dynamo_split(looped, torch.rand(3, 4))
    (loop,) = [region for region in split.regions if "control flow" in (region.why or "")]
    assert "while_loop" in loop.why
    assert split.regions[-1].kind == "captured"


def test_an_aten_graph_is_split() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return F.softmax(x @ y, -1) * 2

    x, y = torch.rand(3, 4), torch.rand(4, 5)
    gm = make_fx(function, tracing_mode="fake")(x, y)
    split = partition(gm, ["aten::_softmax"])
    assert [region.kind for region in split.regions] == ["captured", "eager", "captured"]
    assert split.mutated_inputs == (1,)
    torch.testing.assert_close(split.stitched(x, y.clone()), function(x, y.clone()))
