"""Partition takes steps in proportion to the graph: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import fx

from graphpass import partition
from graphpass.regions import SplitReason, analysis

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
    def run(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(x @ weight).reshape(x.shape[0] * 2, -1)
            x = torch.sin(x).reshape(-1, 8)
        return x

    return traced(run, dynamic(4, 8), [torch.ones(8, 8) for _ in range(n)])


def tuples(n: int) -> fx.GraphModule:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            a, b = torch.sin(x).split(2)
            x = torch.cat([b, a]) * x.max(0).values
        return x

    return traced(run, torch.ones(4, 8))


def lone_allocations(n: int) -> fx.GraphModule:
    """Each between two splits, to be moved to a region that is captured."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(torch.sin(x + 1) + torch.ones(8))
        for _ in range(n):
            x = torch.sin(x)
            x = torch.sin(torch.zeros(8), out=torch.empty(8))
        return x * 2

    return traced(run, torch.ones(8))


def many_allocations(n: int) -> fx.GraphModule:
    """All between the same two splits, before the one region that is captured."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.sin(x)
        made = [torch.zeros(8) for _ in range(n)]
        x = torch.sin(x)
        return [x * y for y in made]

    return traced(run, torch.ones(8))


def symbols(n: int) -> fx.GraphModule:
    """An input with a size of its own for each region."""

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.sin(tensor.expand(2, -1) * tensor.shape[0]) for tensor in tensors]

    return traced(run, [dynamic(5 + i) for i in range(n)])


def host_reads(n: int) -> fx.GraphModule:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = torch.sin(x) + x.sum().item()
        return x

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
    sys.settrace(on_call)
    try:
        partition(gm, SPLIT)
    finally:
        sys.settrace(before)
    return entered.total()


@pytest.mark.parametrize(
    "graph_of",
    [layers, tuples, lone_allocations, many_allocations, symbols, host_reads, constants],
    ids=lambda f: f.__name__,
)
def test_steps_grow_linearly(graph_of: Callable[[int], fx.GraphModule]) -> None:
    partition(graph_of(2), SPLIT)
    few, some, many = (steps(graph_of(n)) for n in (8, 16, 32))
    # Torch 2.11 takes a step more for some of the 32 nodes. A quadratic term would be 384 steps or more.
    assert many - some <= 2.01 * (some - few) + 32


@pytest.mark.parametrize("num_layers", [2, 8])
def test_rules_see_every_node_once(num_layers: int) -> None:
    asked: Counter[str] = Counter()

    def rule(node: fx.Node) -> SplitReason | None:
        asked[node.name] += 1
        return None

    split = partition(layers(num_layers), SPLIT, rules=[rule])
    inner = [node for region in split.regions for node in region.graph_module.graph.nodes if node.op == "call_function"]
    assert set(asked.values()) == {1}
    assert len(asked) <= sum(len(region.graph_module.graph.nodes) for region in split.regions)
    assert len(inner) >= 2 * num_layers


@pytest.mark.parametrize("num_layers", [2, 8])
def test_known_ops_are_not_run_on_fake_tensors(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[fx.Node] = []
    execute = analysis.execute
    monkeypatch.setattr(analysis, "execute", lambda node, *rest: (run.append(node), execute(node, *rest))[1])
    partition(layers(num_layers), SPLIT)
    assert run == []
