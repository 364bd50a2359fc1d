"""Whole models: what Dynamo makes of them is partitioned, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpass import partition
from graphpass.regions import Partition

transformers = pytest.importorskip("transformers")

Split = Callable[..., Partition]
ATTENTION = ["torch.nn.functional.scaled_dot_product_attention"]


def bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    return transformers.BertModel(config).eval()


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("dynamic", [False, True])
def test_bert_splits_at_attention(dynamo_split: Split, dynamic: bool) -> None:
    model, ids = bert(2), torch.arange(14).view(2, 7)
    with torch.no_grad():
        split = dynamo_split(
            lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state,
            ids,
            torch.ones_like(ids),
            ops=ATTENTION,
            dynamic=dynamic,
        )
    assert [region.kind for region in split.regions] == ["captured", "eager"] * 2 + ["captured"]
    assert split.mutated_inputs == ()


@pytest.mark.parametrize("dynamic", [False, True])
def test_llama_splits_at_attention(dynamo_split: Split, dynamic: bool) -> None:
    model, ids = llama(3), torch.arange(14).view(2, 7)
    with torch.no_grad():
        split = dynamo_split(lambda ids: model(ids, use_cache=False).logits, ids, ops=ATTENTION, dynamic=dynamic)
    assert [region.kind for region in split.regions] == ["captured", "eager"] * 3 + ["captured"]
    (shape,) = split.output_shapes
    assert shape is not None
    assert shape[2] == 100


def test_a_model_that_trains_is_split_all_the_same(dynamo_split: Split) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in model[:1]:
            x = layer(x)
        return model[3](F.softmax(model[2](x), -1))

    split = dynamo_split(function, torch.rand(2, 3, 8, 8), ops=["aten::softmax"])
    assert [region.kind for region in split.regions] == ["captured", "eager", "captured"]


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


def test_the_walk_is_linear_in_the_graph() -> None:
    """Nodes visited by the rules and copied into regions: twice the layers, twice the nodes."""
    sizes = []
    for layers in (4, 8):
        model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.Softmax(-1))))
        gm = torch.fx.symbolic_trace(model)
        visited: list[str] = []

        def visit(node: torch.fx.Node, visited: list[str] = visited) -> None:
            visited.append(node.name)

        split = partition(gm, [nn.Softmax], rules=(visit,), example_inputs=(torch.rand(2, 4),))
        sizes.append((len(visited), sum(len(region.graph_module.graph.nodes) for region in split.regions)))
    assert sizes[1] == (2 * sizes[0][0], 2 * sizes[0][1])
