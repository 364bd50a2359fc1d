"""Partition takes steps in proportion to the graph, and what is split and stitched does what the graph does."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from graphpass import partition
from graphpass.regions import Partition, analysis
from tests.unit.models import module

PACKAGE = str(Path(analysis.__file__).parent)
SPLIT = ["aten::sin"]


def traced(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """What torch.compile makes of a function."""
    made: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        made.append(gm)
        return gm.forward

    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = made
    return gm


def dynamic(*shape: int) -> torch.Tensor:
    tensor = torch.ones(*shape)
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


def layers(n: int) -> fx.GraphModule:
    """Sizes, tuples, symbols of inputs, host reads, and allocations that a region takes over: each for each layer."""

    def run(x: torch.Tensor, weights: list[torch.Tensor], sized: list[torch.Tensor]) -> torch.Tensor:
        for weight, tensor in zip(weights, sized, strict=True):
            x = torch.relu(x @ weight).reshape(x.shape[0] * 2, -1)
            x = torch.sin(x).reshape(-1, 8)
            a, b = torch.sin(x).split(4, -1)
            x = torch.sin(torch.cat([b, a], -1) * x.max(0).values)
            x = x + torch.sin(torch.zeros(8), out=torch.empty(8))  # alone between two splits
            x = x + torch.sin(tensor.expand(2, -1) * tensor.shape[0]).sum().item()
        return x

    return traced(run, dynamic(4, 8), [torch.ones(8, 8) for _ in range(n)], [dynamic(5 + i) for i in range(n)])


def many_allocations(n: int) -> fx.GraphModule:
    """All between the same two splits, before the one region that is captured."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.sin(x)
        made = [torch.zeros(8) for _ in range(n)]
        x = torch.sin(x)
        return [x * y for y in made]

    return traced(run, torch.ones(8))


def constants(n: int) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    graph.output((graph.call_function(torch.relu, (x,)), *(complex(i) for i in range(n))))
    return fx.GraphModule({}, graph)


def steps(gm: fx.GraphModule) -> int:
    """Python functions entered while ``gm`` is partitioned, and lines run in partition's own files."""
    entered: Counter[CodeType] = Counter()

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        entered[frame.f_code] += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        entered[frame.f_code] += 1
        return on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what it calls for earlier garbage would be counted
    sys.settrace(on_call)
    try:
        partition(gm, SPLIT)
    finally:
        sys.settrace(before)
        gc.enable()
    return entered.total()


@pytest.mark.parametrize("graph_of", [layers, many_allocations, constants], ids=lambda f: f.__name__)
def test_steps_grow_linearly(graph_of: Callable[[int], fx.GraphModule]) -> None:
    partition(graph_of(2), SPLIT)
    few, some, many = (steps(graph_of(n)) for n in (4, 8, 16))
    # Torch 2.11 takes a step more for some of the 16 nodes. A quadratic term would be 96 steps or more.
    assert many - some <= 2.01 * (some - few) + 16


# Property: whatever is split, the stitched callable does what the graph does.


ROWS, COLUMNS = 4, 6
SPLITTABLE = ["aten::add", "aten::softmax", "aten::mul", "aten::chunk", "aten::view", "aten::empty_like", "aten::t"]


def add_step(graph: fx.Graph, values: list[fx.Node], step: tuple[str, int, int]) -> None:
    """Append one op over earlier values; every value stays a (4, 6) matrix."""
    name, i, j = step
    x, y = values[i % len(values)], values[j % len(values)]
    match name:
        case "add":
            values.append(graph.call_function(operator.add, (x, y)))
        case "softmax":
            values.append(graph.call_function(F.softmax, (x, -1)))
        case "mul_":
            graph.call_method("mul_", (x, 0.5))
        case "iadd":
            values.append(graph.call_function(operator.iadd, (x, 1)))
        case "setitem":
            graph.call_function(operator.setitem, (x, i % ROWS, 1.0))
        case "write through view":
            flat = graph.call_method("view", (x, -1))
            graph.call_method("add_", (flat, 1))
        case "chunk":
            halves = graph.call_method("chunk", (x, 2))
            parts = [graph.call_function(operator.getitem, (halves, k)) for k in (1, 0)]
            values.append(graph.call_function(torch.cat, (parts,)))
        case "max":
            best = graph.call_function(torch.max, (x,), {"dim": 0})
            values.append(graph.call_function(operator.add, (y, graph.call_function(operator.getitem, (best, 0)))))
        case "resize":
            size = graph.call_method("size", (x,))
            values.append(graph.call_method("view", (graph.call_method("flatten", (y,)), size)))
        case "row":
            row = graph.call_function(operator.getitem, (x, i % ROWS))
            values.append(graph.call_function(operator.mul, (y, row)))
        case "allocate":
            out = graph.call_function(torch.zeros_like, (x,))
            graph.call_method("copy_", (out, y))
            values.append(out)
        case _:
            raise AssertionError(name)


NAMES = ["add", "softmax", "mul_", "iadd", "setitem", "write through view", "chunk", "max", "resize", "row", "allocate"]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=12)


@given(
    steps=STEPS,
    ops=st.sets(st.sampled_from(SPLITTABLE)),
    returned=st.lists(st.integers(0, 9), max_size=4),
)
def test_stitched_equals_the_graph(steps: list[tuple[str, int, int]], ops: set[str], returned: list[int]) -> None:
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for step in steps:
        add_step(graph, values, step)
    graph.output(tuple(values[i % len(values)] for i in returned))
    gm = fx.GraphModule(nn.Module(), graph)
    examples = tuple(torch.rand(ROWS, COLUMNS) for _ in range(2))
    split = partition(gm, sorted(ops), example_inputs=examples)

    ours, theirs = ([tensor.clone() for tensor in examples] for _ in range(2))
    torch.testing.assert_close(split.stitched(*ours), gm(*theirs))
    torch.testing.assert_close(ours, theirs)
    assert_consistent(split, examples, ours)


def assert_consistent(split: Any, before: tuple[torch.Tensor, ...], after: list[torch.Tensor]) -> None:
    """Inputs that changed are known, kinds alternate, and captured regions have something to capture."""
    changed = {i for i, (old, new) in enumerate(zip(before, after, strict=True)) if not torch.equal(old, new)}
    assert changed <= set(split.mutated_inputs)
    kinds = [region.kind for region in split.regions]
    assert all(left != right for left, right in itertools.pairwise(kinds))
    for region in split.regions:
        assert (region.why is None) == (region.kind == "captured")
        region.graph_module.graph.lint()


# The stitched callable: generated code, early release, and the same code over other callables.


SOFTMAX = ["aten::softmax"]
Pair = namedtuple("Pair", ["left", "right"])


def split_of(function: Callable[..., Any]) -> Partition:
    traced = fx.symbolic_trace(module(lambda self, x: function(x)))
    return partition(traced, SOFTMAX, example_inputs=(torch.rand(4, 4),))


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


def test_arguments_keep_their_names_and_defaults() -> None:
    def scaled(x: torch.Tensor, scale: float = 2.0, *, other: Any = None) -> torch.Tensor:
        return F.softmax(x, -1) * scale

    split = partition(fx.symbolic_trace(scaled), SOFTMAX, example_inputs=(torch.rand(4, 4),))
    x = torch.rand(4, 4)
    torch.testing.assert_close(split.stitched(x), scaled(x))
    torch.testing.assert_close(split.stitched(x=x, scale=3.0), scaled(x, 3.0))


def test_unused_arguments_are_accepted() -> None:
    split = partition(fx.symbolic_trace(lambda a, b: a + 1), example_inputs=(torch.ones(1), torch.ones(1)))
    assert "del b" in split._stitching.source()
    assert split.stitched(torch.ones(1), torch.ones(1)).item() == 2


@pytest.mark.parametrize("name", ["r0", "r1", "_constant_0"])
def test_a_value_may_be_called_like_a_region(name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder(name)
    y = graph.call_function(F.softmax, (graph.call_function(torch.add, (x, 1)), -1))
    graph.output((y, 2.5))
    split = partition(fx.GraphModule(nn.Module(), graph), SOFTMAX, example_inputs=(torch.rand(4),))
    value = torch.rand(4)
    torch.testing.assert_close(split.stitched(value), (F.softmax(value + 1, -1), 2.5))


def test_output_values_are_in_pytree_order() -> None:
    split = split_of(lambda x: {"b": F.softmax(x, -1), "a": (x[0], None, 3)})
    assert [getattr(value, "shape", None) for _, value in split.output_values] == [(4, 4), (4,), None, None]
