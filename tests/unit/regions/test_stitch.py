"""The stitched callable: generated code, early release, and the same code over other callables."""

from __future__ import annotations

import ast
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphpass import partition
from graphpass.errors import PartitionError
from graphpass.regions import Partition

SOFTMAX = ["aten::softmax"]
Pair = namedtuple("Pair", ["left", "right"])


class Traced(nn.Module):
    """A module with the forward under test."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def split_of(function: Callable[..., Any]) -> Partition:
    return partition(fx.symbolic_trace(Traced(function)), SOFTMAX, example_inputs=(torch.rand(4, 4),))


STRUCTURES = [
    lambda x: F.softmax(x, -1),
    lambda x: (F.softmax(x, -1),),
    lambda x: [x, F.softmax(x, -1) + 1],
    lambda x: {"a": x + 1, "b": {"c": (F.softmax(x, -1), None)}},
    lambda x: (x, x, 1, 2.5, None, True),
    lambda x: {1: float("inf"), "nan": (), "list": []},
    lambda x: Pair(x + 1, F.softmax(x, -1)),
    lambda x: torch.max(F.softmax(x, -1), dim=0),
    lambda x: None,
]


@pytest.mark.parametrize("function", STRUCTURES)
def test_outputs_keep_their_structure(function: Callable[..., Any]) -> None:
    x = torch.rand(4, 4)
    got, want = split_of(function).stitched(x), function(x)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want, equal_nan=True) if want is not None else None


def test_outputs_keep_their_constants() -> None:
    constants = ("text", torch.float16, slice(1, None), float("-inf"), torch.device("cpu"), False)
    assert split_of(lambda x: (F.softmax(x, -1), *constants)).stitched(torch.rand(4, 4))[1:] == constants


def test_arguments_keep_their_names_and_defaults() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 2.0, *, other: Any = None) -> torch.Tensor:
            return F.softmax(x, -1) * scale

    split = partition(fx.symbolic_trace(Model()), SOFTMAX, example_inputs=(torch.rand(4, 4),))
    x = torch.rand(4, 4)
    torch.testing.assert_close(split.stitched(x), Model()(x))
    torch.testing.assert_close(split.stitched(x=x, scale=3.0), Model()(x, 3.0))


def test_the_source_is_one_function() -> None:
    (function,) = ast.parse(split_of(lambda x: F.softmax(x + 1, -1) * 2).source).body
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["x"]


def test_values_are_released_after_their_last_use() -> None:
    """When the last region runs, nothing but its input is alive of what the regions before it made."""
    split = split_of(lambda x: F.softmax(x + 1, -1) * 2)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def callee(graph_module: fx.GraphModule) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            gc.collect()
            alive.append(sum(reference() is not None for reference in made))
            outputs = graph_module(*inputs)
            made.extend(weakref.ref(output) for output in outputs)
            return outputs

        return call

    bound = split.bind({region.name: callee(region.graph_module) for region in split.regions})
    bound(torch.rand(4, 4))
    assert alive == [0, 1, 1]


def test_an_argument_is_released_after_its_last_use() -> None:
    # Read off the code: whether the caller's frame lets go as well depends on how Python was entered.
    split = split_of(lambda x: F.softmax(x + 1, -1) * 2)
    lines = [line.strip() for line in split.source.splitlines()]
    calls = [index for index, line in enumerate(lines) if "= r" in line]
    assert calls[0] < lines.index("del x") < calls[1]


def test_unused_arguments_are_accepted() -> None:
    split = partition(fx.symbolic_trace(lambda a, b: a + 1), example_inputs=(torch.ones(1), torch.ones(1)))
    assert "del b" in split.source
    assert split.stitched(torch.ones(1), torch.ones(1)).item() == 2


def test_bind_calls_each_callee_once_in_order() -> None:
    split = split_of(lambda x: F.softmax(x + 1, -1) * 2)
    calls: list[str] = []

    def note(name: str, graph_module: fx.GraphModule) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            calls.append(name)
            return graph_module(*inputs)

        return call

    bound = split.bind({region.name: note(region.name, region.graph_module) for region in split.regions})
    x = torch.rand(4, 4)
    torch.testing.assert_close(bound(x), split.stitched(x))
    assert calls == ["r0", "r1", "r2"]
    assert bound.__code__ is split.stitched.__code__


@pytest.mark.parametrize("names", [[], ["r0"], ["r0", "r1", "r2", "r3"]])
def test_bind_wants_one_callee_for_each_region(names: list[str]) -> None:
    split = split_of(lambda x: F.softmax(x + 1, -1) * 2)
    with pytest.raises(PartitionError, match="callees for r0, r1, r2"):
        split.bind(dict.fromkeys(names, len))


@pytest.mark.parametrize("name", ["r0", "r1", "_constant_0"])
def test_a_value_may_be_called_like_a_region(name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder(name)
    y = graph.call_function(F.softmax, (graph.call_function(torch.add, (x, 1)), -1))
    graph.output((y, 2.5))
    split = partition(fx.GraphModule(nn.Module(), graph), SOFTMAX, example_inputs=(torch.rand(4),))
    value = torch.rand(4)
    torch.testing.assert_close(split.stitched(value), (F.softmax(value + 1, -1), 2.5))


def test_output_shapes_are_in_pytree_order() -> None:
    split = split_of(lambda x: {"b": F.softmax(x, -1), "a": (x[0], None, 3)})
    assert split.output_shapes == ((4, 4), (4,), None, None)
