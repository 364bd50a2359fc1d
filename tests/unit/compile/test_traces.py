"""The aten graph of each structure is shown once, by the step that compiles it, and nothing is left behind by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

from graphpass import partition
from graphpass.compat import dynamo, symbolic
from graphpass.compile import COMPILERS, CompiledRegions, RegionCompiler, RegionTrace, traced_regions
from graphpass.compile.compilers import TraceOf
from graphpass.regions import Partition
from tests.unit.compile.passes import Reading, reading
from tests.unit.compile.test_once import Layers

cut = torch.ops.compiletest.cut
# One stands for the compilers that functionalise, the other for those that do not.
EACH_COMPILER = pytest.mark.parametrize(
    "compiler", [pytest.param(name, marks=pytest.mark.soak if name == "inductor" else ()) for name in COMPILERS]
)


def ops_of(aten: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in aten.graph.nodes if node.op == "call_function"]


@dataclass
class Traced:
    """A backend that compiles with a trace, and what it saw."""

    compiler: str
    trace: Callable[[fx.GraphModule], Any] | None = ops_of
    passes: TraceOf | None = None
    regions: RegionCompiler = field(default_factory=RegionCompiler)
    parts: list[Partition] = field(default_factory=list)
    compiled: list[CompiledRegions] = field(default_factory=list)
    eager: list[Mapping[str, RegionTrace]] = field(default_factory=list)
    facts: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        parts = partition(graph_module, ["compiletest::cut"])
        captured = [region for region in parts.regions if region.kind == "captured"]
        passes = None if self.trace is None else self.passes or reading(self.trace)
        compiled = self.regions.compile(captured, self.compiler, trace=passes)
        shape_env = symbolic.shape_env_of(given.value for given in parts.inputs)
        before = symbolic.facts_of(shape_env)
        if self.trace is not None:
            self.eager.append(traced_regions([r for r in parts.regions if r.kind == "eager"], self.trace))
        self.facts.append((before, symbolic.facts_of(shape_env)))
        self.parts.append(parts)
        self.compiled.append(compiled)
        callees = {r.name: compiled.by_name.get(r.name) or r.graph_module.forward for r in parts.regions}
        bound: Callable[..., Any] = parts.bind(callees)
        return bound

    def run(self, model: Any, *inputs: Any) -> Any:
        with torch.no_grad():
            return torch.compile(model, backend=self, dynamic=True, fullgraph=True)(*inputs)


def test_equal_regions_share_an_artifact_if_their_passes_decide_alike() -> None:
    def apart(region: Any) -> Reading:
        return Reading(ops_of, key=region.name)

    for passes, expected in ((None, 3), (apart, 5)):
        traced = Traced("aot_eager", passes=passes)
        traced.run(Layers(4).eval(), torch.randn(3, 4))
        assert traced.compiled[0].num_new == expected


@EACH_COMPILER
def test_an_error_of_the_trace_is_a_reason_and_breaks_nothing(compiler: str) -> None:
    def fails(aten: fx.GraphModule) -> None:
        raise ZeroDivisionError("of all things")

    traced = Traced(compiler, fails)
    model, x = Layers(1).eval(), torch.randn(3, 4)
    torch.testing.assert_close(traced.run(model, x), model(x))
    (compiled,) = traced.compiled
    for trace in (*compiled.traces.values(), *traced.eager[0].values()):
        assert trace.result is None
        assert trace.problem is not None
        assert "ZeroDivisionError: of all things" in trace.problem


@EACH_COMPILER
def test_writes_stay_in_the_graph_and_inputs_that_overlap_have_none(
    compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch would log what it raises where inputs overlap, and a record holds the tensors of the call."""

    def writes(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return a + b, b[1:], a.shape[0]

    traced = Traced(compiler)
    traced.run(writes, torch.zeros(6), torch.zeros(6))
    (trace,) = traced.compiled[0].traces.values()
    assert trace.problem is None
    assert "aten.copy_.default" in trace.result
    memory = torch.zeros(9)
    for overlapping in ((memory[:6], memory[2:8]), (memory, memory.detach())):
        torch.compiler.reset()
        traced.run(writes, *overlapping)
        (trace,) = traced.compiled[-1].traces.values()
        assert trace.result is None
        assert trace.problem == "it writes to inputs that have gaps or share memory"
    assert not caplog.records


def test_sizes_that_only_a_run_can_tell_are_a_reason() -> None:
    def shrinks(x: torch.Tensor) -> Any:
        chosen = torch.masked_select(x, x > 1)
        return cut(torch.relu(x) * 2), cut(chosen)

    traced = Traced("aot_eager")
    x = torch.tensor([1.0, 2.0, 5.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(traced.run(shrinks, x), shrinks(x))
    made, taken = traced.eager[0].values()
    assert "aten.masked_select.default" in made.result
    assert (taken.result, taken.problem) == (None, "it takes sizes that depend on data")


def test_a_number_that_is_put_into_a_tensor_is_on_its_device() -> None:
    """The constant of ``x[i] = 1``, which AOTAutograd has on the CPU; the device ``meta`` stands for a GPU here."""
    aten = torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    constant = graph.get_attr("one")
    fresh = graph.call_function(aten.lift_fresh_copy.default, (constant,))
    constant.meta["val"] = fresh.meta["val"] = torch.tensor(1.0)
    graph.output((graph.call_function(aten.index_put.default, (x, [x], fresh)),))
    module = fx.GraphModule({"one": torch.tensor(1.0)}, graph)
    dynamo.move_constants(module)
    assert module.one.device.type == constant.meta["val"].device.type == fresh.meta["val"].device.type == "meta"


@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_is_put_where_a_mask_says_is_an_argument(place: int) -> None:
    """As ``hidden_states[~mask] = 0`` in WavLM: ATen reads it there without a wait for the device."""
    aten = torch.ops.aten
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.randn(3, 4, 5), torch.rand(3, 4)[:: 1 + 2 * place].squeeze(0) < 0.5
    constant = graph.get_attr("one")
    fresh = graph.call_function(aten.lift_fresh_copy.default, (constant,))
    constant.meta["val"] = fresh.meta["val"] = torch.tensor(7.0)
    put = graph.call_function(aten.index_put.default, (x, [None] * place + [mask], fresh))
    put.meta["val"] = torch.randn(3, 4, 5)
    graph.output((put,))
    module = fx.GraphModule({"one": torch.tensor(7.0)}, graph)
    given = [one.meta["val"] for one in (x, mask)]
    expected = module(*given)
    dynamo.move_constants(module)
    module.graph.lint()
    module.recompile()
    (filled,) = graph.find_nodes(op="call_function", target=aten.masked_fill.Scalar)
    assert filled.args[2] == 7.0
    assert not graph.find_nodes(op="call_function", target=aten.index_put.default)
    assert torch.equal(module(*given)[0], expected[0])
