"""The backend function: turns a graph from Dynamo into a callable."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgpass.appended import AppendedInputs, attributes_read, lift_attributes
from cgpass.autorules import dispatched
from cgpass.callable import CompiledGraph, GraphedCallable
from cgpass.fromstart import count_from_start
from cgpass.keysizes import KeySizes
from cgpass.recorded import region_records, size_records
from cgpass.reporting import report_graph
from cgpass.retraces import Retraces, TraceKey
from graphpass.capture.lookup import runtime_of_compiler
from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo, nnmodules
from graphpass.compile import RegionCompiler, compile_training, traced_regions
from graphpass.errors import DeviceError, OptionError, compiles_late
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings
from graphpass.regions.floats import FloatInputs, floats_as_tensors
from graphpass.regions.padding import AtenGraph
from graphpass.regions.split import Partition, partition
from graphpass.regions.symbols import graph_inputs
from graphpass.report.records import CallableRecord, CompileSeconds

__all__ = ["backend"]


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one graph; Dynamo calls this for each graph of a model compiled with ``backend="cgpass"``.

    Args:
        graph_module: the graph as Dynamo traced it.
        example_inputs: its inputs; symbolic sizes where shapes are dynamic.
        options: see :func:`cgpass.options`.
        mode: refused: torch.compile's ``mode`` names Inductor presets.

    Returns:
        A callable with the graph's inputs and outputs. Under autograd it is compiled and never captured.

    Raises:
        OptionError: an option is unknown or cannot be used.
        PartitionError: the graph cannot be split as asked.
        DeviceError: inputs are on two GPUs, or are tensor subclasses.
        CaptureError: ``padding_check`` is ``strict`` and the padding of a declared size is not proved; or the function
            was captured ahead, and ``on_fallback`` is ``error``.
    """
    if mode is not None:
        raise _no_presets(mode)
    named = {graph_input.source_name for graph_input in graph_inputs(graph_module.graph)}
    aliases = {alias: name for alias, name in dynamo.argument_aliases().items() if alias not in named}
    settings = Settings.of(options).with_names(aliases)
    runtime = settings.runtime or runtime_of_compiler(dynamo.calling_compiler())
    read = [*example_inputs, *attributes_read(graph_module).values()]
    _refuse_subclasses(read)
    name = runtime.next_callable_name()
    if _needs_autograd(read):
        return _training(name, graph_module, example_inputs, runtime, settings)
    traced = _Traced.of(graph_module, settings)
    is_new = not runtime.owned(Retraces).knows(traced.key)
    if is_new and settings.on_fallback == "error" and runtime.is_captured_ahead(dynamo.frame_id()):
        raise compiles_late(dynamo.recompile_reason())
    made = _captured(name, traced, runtime, settings)
    return traced.floats.moved_before(made)


def _captured(name: str, traced: _Traced, runtime: GraphRuntime, settings: Settings) -> GraphedCallable:
    """Partition, compile and wrap a graph; if an earlier trace was equal, return its callable."""
    start_s = time.perf_counter()
    parts = partition(traced.whole, settings.splitting_ops)
    partition_s = time.perf_counter() - start_s
    sizes = KeySizes.of(parts, traced.whole, settings)
    # Proofs need aten graphs. Without symbolic sizes nothing can be padded, but a manager proves other properties.
    trace = AtenGraph.of if parts.has_symbols() or not settings.dispatches_itself() else None
    dynamo.forget_arguments(traced.whole.graph)
    compiled = runtime.owned(RegionCompiler).compile(
        [region for region in parts.regions if region.kind == "captured"],
        settings.compiler,
        sizes.compiled_apart(),
        trace=trace,
    )
    retraces = runtime.owned(Retraces)
    known = retraces.serving(traced.key, compiled.by_name)
    if known is not None:
        runtime.retraced(known.name)
        return known
    _dump(name, parts, settings)
    eager = [region for region in parts.regions if region.kind == "eager"]
    traces = {**compiled.traces, **({} if trace is None else traced_regions(eager, trace))}
    start_s = time.perf_counter()
    auto, proof = dispatched(name, parts, traces, settings) if settings.dispatches_itself() else (None, None)
    proof_s = time.perf_counter() - start_s
    runtime.register(
        CallableRecord(
            name=name,
            regions=region_records(parts, compiled.by_name),
            artifacts=compiled.num_new,
            frame=dynamo.frame_id(),
            ends=traced.ends_early,
            seconds=CompileSeconds(partition_s, compiled.key_s, compiled.compile_s, proof_s),
            admits=sizes.admits if sizes.symbols else None,
            sizes=() if auto is None or proof is None else size_records(*auto, proof),
            assumptions=() if proof is None else proof.assumptions,
            mode=None if auto is None else auto[1].mode if auto[1].off is None else CUDAGraphMode.NONE,
            off=None if auto is None else auto[1].off,
        )
    )
    _note_problems(name, sizes, traced.floats, runtime)
    dispatch = None if auto is None or proof is None else (auto[1], proof)
    report_graph(name, parts, traced.ends_early, dispatch, runtime, settings)
    graph = CompiledGraph(
        name=name,
        partition=parts,
        compiled=compiled.by_name,
        traces=traces,
        taken=traced.taken,
        appended=traced.appended,
        ends_early=None if traced.ends_early is None else f"graph break: {traced.ends_early}",
        returns_flat=_returns_flat(traced.whole),
        side_effects=traced.side_effects,
    )
    made = GraphedCallable(graph, runtime, settings, auto)
    retraces.add(traced.key, made)
    return made


@dataclass(frozen=True, slots=True)
class _Traced:
    """A copy of Dynamo's graph, ready to be partitioned.

    Attributes:
        whole: the copy, without unused tensor inputs and with appended ones.
        floats: the Python floats among Dynamo's arguments.
        taken: positions of the remaining inputs among Dynamo's.
        appended: the inputs after those; None if there are none.
        ends_early: the graph break after it; None if the function ends there.
        side_effects: changes of Python state that Dynamo's code makes after the graph has run.
        key: equal for traces that one callable can serve; None if no other trace can share the callable.
    """

    whole: fx.GraphModule
    floats: FloatInputs
    taken: list[int]
    appended: AppendedInputs | None
    ends_early: Reason | None
    side_effects: tuple[dynamo.SideEffect, ...]
    key: TraceKey | None

    @classmethod
    def of(cls, graph_module: fx.GraphModule, settings: Settings) -> _Traced:
        ends_early = dynamo.graph_break_after(graph_module)
        whole = _own_copy(graph_module)
        floats = floats_as_tensors(whole)
        side_effects = dynamo.side_effects_of_compilation()
        key = TraceKey.of(whole, settings, ends_early, side_effects)
        taken = _drop_unread_inputs(whole)
        attributes = lift_attributes(whole, dynamo.attribute_sources(graph_module))  # guard: attributes_undone
        sizes = count_from_start(whole, settings)
        appended = AppendedInputs(attributes, sizes) if attributes or sizes is not None else None
        return cls(whole, floats, taken, appended, ends_early, side_effects, key)


def _no_presets(mode: str) -> OptionError:
    return OptionError(
        "torch.compile's mode= is for Inductor presets",
        expected="options=cgpass.options(mode=...)",
        found=f"mode={mode!r}",
        remedy="leave mode= out; cgpass captures graphs itself",
    )


def _note_problems(name: str, sizes: KeySizes, floats: FloatInputs, runtime: GraphRuntime) -> None:
    rnn = dynamo.untraced_rnn()
    if rnn is not None and not any(
        record.ends for record in runtime.callables()
    ):  # else the remedy of the break says it
        runtime.warn(f"{rnn} runs in Python: Dynamo does not trace it", dynamo.ALLOW_RNN, at=name)
    for number, op, where in floats.constants:
        text = f"the float {number} is a constant in the graph, and each value is compiled apart: {op} takes no tensor"
        runtime.warn(text + (f" at {where}" if where else ""), "pass few values of it", at=name)
    for unmatched in sizes.unmatched_names(is_first=len(runtime.callables()) == 1):
        runtime.warn(unmatched, "name the inputs as the graph does", at=name)
    uncompiled = sizes.not_compiled_apart()
    if uncompiled is not None:
        runtime.warn(uncompiled.why, uncompiled.remedy, at=name)
    for problem in sizes.excluded():
        runtime.note(problem, at=name)


def _training(
    name: str, graph_module: fx.GraphModule, example_inputs: Sequence[Any], runtime: GraphRuntime, settings: Settings
) -> Any:
    why, remedy = "compiled under autograd: never captured", "call it under torch.inference_mode() or torch.no_grad()"
    reason = Reason(why, remedy, is_expected=True)
    runtime.warn(why, remedy, at=name, is_recorded=True)
    runtime.register(CallableRecord(name=name, regions=(), artifacts=1, off=reason))
    compiled = compile_training(graph_module, example_inputs, settings.compiler)
    calls = runtime.ledger.without_graph(name, reason)

    def counted(*args: Any) -> Any:
        calls.count_call(reason)
        return compiled(*args)

    return counted


def _needs_autograd(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _refuse_subclasses(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and nnmodules.is_wrapper_subclass(value):
            raise DeviceError(
                "tensor subclasses cannot be captured",
                expected="plain tensors and parameters",
                found=type(value).__name__,
                remedy="unwrap it before the call (DTensor: `tensor.to_local()`), or compile it with another backend",
            )


def _own_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy to edit: Dynamo later reads the placeholders of its own graph to choose the callable's arguments."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def _returns_flat(graph_module: fx.GraphModule) -> bool:
    returned = graph_module.graph.output_node().args[0]
    return isinstance(returned, (tuple, list)) and not any(isinstance(v, (tuple, list, dict)) for v in returned)


def _drop_unread_inputs(graph_module: fx.GraphModule) -> list[int]:
    """Erase unused tensor inputs, so that they are not copied; return the positions of the remaining inputs."""
    taken = []
    for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        if node.users or not isinstance(dynamo.example_value(node), torch.Tensor):
            taken.append(position)
        else:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return taken


def _dump(name: str, parts: Partition, settings: Settings) -> None:
    if settings.dump_dir is not None:
        settings.dump_dir.mkdir(parents=True, exist_ok=True)
        (settings.dump_dir / f"{name}.txt").write_text(parts.dump(), encoding="utf-8")
