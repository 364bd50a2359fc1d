"""Assignment: which nodes share a region, what is never cut apart, what is never captured."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphpass import partition
from graphpass.regions import Partition

Split = Callable[..., Partition]
SOFTMAX = ["aten::softmax"]


def kinds(split: Partition) -> list[str]:
    return [region.kind for region in split.regions]


def targets(split: Partition, index: int) -> list[Any]:
    """Targets of the call nodes of one region."""
    nodes = split.regions[index].graph_module.graph.nodes
    return [node.target for node in nodes if node.op.startswith("call")]


def test_a_late_getitem_moves_to_its_producer() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    halves = graph.call_function(torch.chunk, (graph.call_function(torch.sin, (x,)), 2))
    cut = graph.call_function(F.softmax, (x, -1))
    late = graph.call_function(operator.getitem, (halves, 1))
    graph.output(graph.call_function(torch.add, (cut, graph.call_function(torch.sum, (late,)))))
    split = partition(fx.GraphModule(nn.Module(), graph), SOFTMAX, example_inputs=(torch.rand(4, 4),))
    assert targets(split, 0) == [torch.sin, torch.chunk, operator.getitem]
    assert targets(split, 2) == [torch.sum, torch.add]


def autocast_block(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    with torch.autocast("cpu", torch.bfloat16):
        y = F.softmax(y @ y, -1) + 1
    return y * 3


def kernel_block(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    with sdpa_kernel(SDPBackend.MATH):
        y = F.softmax(y * 2, -1) + 1
    return y * 3


def nested_block(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = y @ y
        with torch.enable_grad():
            y = F.softmax(y, -1)
        y = y + 1
    return y * 3


@pytest.mark.parametrize("function", [autocast_block, kernel_block, nested_block])
def test_a_pair_with_an_eager_op_runs_eagerly_as_a_whole(dynamo_split: Split, function: Callable[..., Any]) -> None:
    split = dynamo_split(function, torch.rand(3, 3), ops=SOFTMAX)
    assert kinds(split) == ["captured", "eager", "captured"]
    assert "mode pair: torch.nn.functional.softmax inside" in str(split.regions[1].why)
    assert "splitting op: torch.nn.functional.softmax" in str(split.regions[1].why)
    assert len(targets(split, 0)) == len(targets(split, 2)) == 1


def test_a_higher_order_op_stays_with_its_subgraphs(dynamo_split: Split) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (F.softmax(x, -1),))
        return y * 2

    split = dynamo_split(function, torch.rand(3, 3), ops=SOFTMAX)
    assert kinds(split) == ["captured", "eager", "captured"]
    assert "control flow" in split.regions[1].why
    assert len([node for node in split.regions[1].graph_module.graph.nodes if node.op == "get_attr"]) == 2
    assert "cond_true_0" not in split.regions[1].inputs


def test_a_graph_without_calls_has_no_regions() -> None:
    split = partition(fx.symbolic_trace(lambda x, y: (y, x)), example_inputs=(torch.ones(1), torch.ones(2)))
    assert split.regions == ()
    assert [len(tensor) for tensor in split.stitched(torch.ones(1), torch.ones(2))] == [2, 1]
