"""The compilers for regions, with a common signature, and the aten graph that the AOT step of one produces.

A trace function reads that graph where the region is compiled: a separate trace would double the time. A region whose
compiler has no AOT step is traced separately, in a new shape environment, unless it is an aten graph already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, operators, symbolic, trees
from graphpass.compile.structure import inputs_within, symbols_of
from graphpass.errors import one_of


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler for regions."""

    #: Takes a graph with a flat tuple as output, which it may change, and a fake tensor or symbolic size for each
    #: placeholder. Inductor's CUDA graphs are always off, because the wrapper around the region captures. A compiler
    #: that functionalizes takes a third argument, a function that it calls with the aten graph.
    compile: Callable[..., Callable[..., Any]]
    opaque: bool  #: its kernels bypass torch's dispatcher, so a recorder must treat a call as one op
    functionalizes: bool  #: it rewrites writes to inputs, and its artifacts depend on which inputs share memory


_COMPILERS: Mapping[str, Compiler] = MappingProxyType(
    {
        "inductor": Compiler(dynamo.inductor, opaque=True, functionalizes=True),
        "aot_eager": Compiler(dynamo.aot_eager, opaque=False, functionalizes=True),
        "eager": Compiler(lambda graph_module, examples: graph_module.forward, opaque=False, functionalizes=False),
    }
)
COMPILERS = tuple(_COMPILERS)
"""The names of the compilers."""


def compiler_named(name: str) -> Compiler:
    """The compiler with this name."""
    one_of(name, COMPILERS, "unknown compiler", remedy="leave it out")
    return _COMPILERS[name]


def compile_training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile a whole graph for training with autograd; it is never captured."""
    return compiler_named(compiler).compile(graph_module, example_inputs)


TraceFunction = Callable[[fx.GraphModule], Any]
"""Reads an aten graph whose nodes have ``meta["val"]``; the result is stored."""


class RegionPass(Protocol):
    """A trace function that may change the graph that it reads, before the compiler compiles it."""

    @property
    def key(self) -> Any:
        """Hashable: regions of one structure share an artifact if it is equal."""

    @property
    def changed(self) -> fx.GraphModule | None:
        """A copy of the changed graph; None if it is as it was."""

    @property
    def decisions(self) -> Any:
        """What it changed, comparable."""

    def __call__(self, aten: fx.GraphModule) -> Any:
        """The result that is stored."""


TraceOf = Callable[[Any], RegionPass]
"""Region -> its pass, a new one for each compilation."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionTrace:
    """The result of a trace function for the aten graph of one region."""

    result: Any  #: the function's return value, shared by regions of one structure; None if ``problem`` is set
    problem: str | None = None  #: why there is no result, or None
    #: (its expression in the traced graph, the region's own symbol) for each symbol: a number if tracing fixed it. Of
    #: the structure's trace, None for a symbol that no input has.
    symbols: tuple[tuple[sympy.Expr | None, sympy.Symbol], ...] = ()

    def of_region(self, symbols: Sequence[sympy.Symbol]) -> RegionTrace:
        """The structure's trace for a region, whose symbols are these, in the order of the structure."""
        pairs = zip(self.symbols, symbols, strict=self.problem is None)
        return replace(self, symbols=tuple((traced, own) for (traced, _), own in pairs if traced is not None))


class TraceOnce:
    """A callback for the compiler that receives the aten graph; errors of the trace do not reach the compiler.

    The graph must have the region's inputs and outputs; and its calls whose results are unused, which tracing may drop,
    where the region ``runs_as_it_is``, uncompiled.
    """

    def __init__(self, trace: TraceFunction, graph_module: fx.GraphModule, *, runs_as_it_is: bool = False) -> None:
        self._trace = trace
        self._region = graph_module
        self._unused = _unused_ops(graph_module) if runs_as_it_is else frozenset()
        self._traces: list[RegionTrace] = []

    def __call__(self, aten: fx.GraphModule) -> None:
        """Run the trace function on the aten graph, unless that differs from the region."""
        try:
            problem = _difference(self._region, aten) or self._dropped(aten)
            if problem is None:
                with symbolic.quiet_shapes(symbolic.fake_mode_of(inputs_of(aten))):
                    self._traces.append(RegionTrace(self._trace(aten)))
                return
        except Exception as error:
            problem = f"its aten graph could not be read: {summary(error)}"
        self._traces.append(RegionTrace(None, problem))

    def result(self, symbols: Iterable[tuple[sympy.Expr | None, sympy.Symbol]]) -> RegionTrace:
        """The trace with these symbols, or the problem if the compiler did not call back exactly once."""
        if len(self._traces) != 1:
            return RegionTrace(None, f"its compiler produced {len(self._traces)} aten graphs instead of one")
        (trace,) = self._traces
        return replace(trace, symbols=tuple(symbols)) if trace.problem is None else trace

    def _dropped(self, aten: fx.GraphModule) -> str | None:
        dropped = self._unused - _ops_of(aten)
        return f"tracing drops {', '.join(sorted(dropped))}, whose results nothing uses" if dropped else None


def trace_alone(trace: TraceFunction, graph_module: fx.GraphModule, symbols: Sequence[sympy.Symbol]) -> RegionTrace:
    """Trace a region that no AOT step compiles, or read it if it is aten; ``symbols`` in the order of the structure."""
    try:
        if any(symbolic.is_unbacked(symbol) for symbol in symbols_of(inputs_of(graph_module))):
            return RegionTrace(None, "it takes sizes that depend on data")
        show = TraceOnce(trace, graph_module, runs_as_it_is=True)
        if _is_aten(graph_module):
            show(graph_module)
            return show.result(zip(symbols, symbols, strict=True))
        inputs = inputs_within(inputs_of(graph_module), {})
        if inputs is None:
            return RegionTrace(None, "its inputs have layouts that cannot be reproduced")
        values, fake_mode, renamed = inputs
        with dynamo.tracing_with(fake_mode):
            dynamo.aot_eager(own_copy(graph_module, keep_shapes=False), values, show)
        return show.result((renamed.get(symbol), symbol) for symbol in symbols)
    except Exception as error:
        return RegionTrace(None, f"it cannot be traced to aten: {summary(error)}")


def _is_aten(graph_module: fx.GraphModule) -> bool:
    """Whether a graph is of overloads that write nothing, with their values, as AOTAutograd would make it."""
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    return all("val" in node.meta for node in nodes) and all(
        isinstance(node.target, operators.OpOverload)
        and not operators.schema_of(node.target).is_mutable  # guard: traced_writes
        for node in nodes
        if node.op != "placeholder"
    )


def _difference(region: fx.GraphModule, aten: fx.GraphModule) -> str | None:
    """Why the aten graph's inputs and outputs do not match the region's one by one; None if they do.

    AOTAutograd merges overlapping inputs, drops repeated ones, and adds outputs for writes.
    """
    for name, values_of in (("input", inputs_of), ("output", _outputs)):
        traced, expected = values_of(aten), values_of(region)
        if len(traced) != len(expected):
            return f"its aten graph has {len(traced)} {name}s instead of {len(expected)}"
        for position, (one, other) in enumerate(zip(traced, expected, strict=True)):
            if _kind(one) != _kind(other):
                return f"{name} {position} of its aten graph has another type"
    return None


def inputs_of(graph_module: fx.GraphModule) -> list[Any]:
    """The values of a graph's inputs."""
    return [symbolic.example_value(node) for node in graph_module.graph.find_nodes(op="placeholder")]


def _outputs(graph_module: fx.GraphModule) -> list[Any]:
    leaves = trees.flatten(graph_module.graph.output_node().args[0])[0]
    return [symbolic.example_value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


def _unused_ops(graph_module: fx.GraphModule) -> frozenset[str]:
    """The names of custom ops that are called for their effects: nothing uses a result."""
    unused = (node.target for node in graph_module.graph.nodes if not node.users)
    names = {operators.operator_name(target) for target in unused}
    return frozenset(name for name in names if name is not None and not name.startswith(("aten::", "prims::")))


def _ops_of(graph_module: fx.GraphModule) -> frozenset[str]:
    called = (target for node in graph_module.graph.nodes for target in (node.target, *node.args))
    return frozenset(name for target in called if (name := operators.operator_name(target)) is not None)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim())
    return "number" if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) else type(value)


def summary(error: Exception) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def own_copy(graph_module: fx.GraphModule, *, keep_shapes: bool = True) -> fx.GraphModule:
    """A copy that the compiler may change, with values named by position because Inductor's cache keys have names."""
    left_out = () if keep_shapes else ("example_value", "val", "unbacked_bindings")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(graph_module.graph.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: copies[argument])
        name = f"v{number}"
        target = name if node.op == "placeholder" else node.target
        copies[node] = graph.create_node(node.op, target, args, kwargs, name=name)
        copies[node].meta = {key: value for key, value in node.meta.items() if key not in left_out}
    return fx.GraphModule(graph_module, graph)
