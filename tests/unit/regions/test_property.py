"""Property: whatever is split, the stitched callable does what the graph does."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from graphpass import partition

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


@given(steps=STEPS, ops=st.sets(st.sampled_from(SPLITTABLE)), returned=st.lists(st.integers(0, 9), max_size=4))
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
