"""The backend function: turns a graph from Dynamo into a callable."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cgpass.callable import GraphedCallable
from cgpass.extrainputs import (
    AppendedInputs,
    append_made,
    append_real_sizes,
    attributes_read,
    lift_attributes,
)
from cgpass.graphrecord import region_records, report_graph, size_records
from cgpass.infloat64 import region_in_float64
from cgpass.keyrules import calls_collectives, dispatched
from cgpass.namedsizes import GraphSizes, unify_sizes, unmatched_names
from cgpass.paddingpass import padding_passes
from cgpass.wrappers import CompiledGraph
from graphpass.capture.runtime import GraphRuntime, runtime_of_compiler
from graphpass.compat import dynamo, nnmodules, operators, saving, sideeffects, symbolic
from graphpass.compat.subclasses import is_opaque
from graphpass.compile import (
    CompiledRegions,
    RegionCompiler,
    Tuning,
    compile_training,
    traced_regions,
)
from graphpass.compile.structure import structure_of
from graphpass.context import current_context
from graphpass.errors import DeviceError, OptionError
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Reason
from graphpass.options import Fallbacks, Settings
from graphpass.padding import AtenGraph, ignores_numbers
from graphpass.regions.execute import value_of
from graphpass.regions.floats import FloatConstants, floats_as_tensors
from graphpass.regions.holders import Arguments, ListEntries, emptied_before, lists_as_entries, unwrapped
from graphpass.regions.openmasks import without_open_masks
from graphpass.regions.split import Partition, partition, uncompiled_copy
from graphpass.regions.symbols import graph_inputs
from graphpass.report.records import LOADED, WARM_START, CallableRecord, CompileSeconds
from graphpass.saved.files import SEE_SAVED, UsedKeys
from graphpass.saved.graphs import GraphIdentity, SavedGraphs


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
        DeviceError: inputs are on two GPUs, or are nested tensors.
        CaptureError: ``padding_check`` is ``strict`` and the padding of a declared size is not proved; or the function
            was captured ahead, and ``on_fallback`` is ``error``.
    """
    if mode is not None:
        raise OptionError(
            "torch.compile's mode= is for Inductor presets",
            expected="options=cgpass.options(mode=...)",
            found=f"mode={mode!r}",
            remedy="leave mode= out; cgpass captures graphs itself",
        )
    named = {graph_input.source_name for graph_input in graph_inputs(graph_module.graph)}
    aliases = {alias: name for alias, name in dynamo.argument_aliases().items() if alias not in named}
    settings = Settings.of(options).with_names(aliases)
    runtime = settings.runtime or runtime_of_compiler(dynamo.calling_compiler())
    read = [*example_inputs, *attributes_read(graph_module).values()]
    _refuse_subclasses(read)
    name = runtime.next_callable_name()
    if operators.needs_grad(read):
        return _training(name, graph_module, example_inputs, runtime, settings)
    traced = _Traced.of(graph_module, settings)
    saved = None if settings.warm_start is None else runtime.owned(SavedGraphs)
    if saved is not None and saved.recording is not None:
        return saved.recorded(traced.identity, has_floats=traced.has_floats)
    runtime.compiles_frame(dynamo.frame_id(), dynamo.frame_code(), name)
    cache = runtime.owned(CallableCache)
    is_new = traced.key not in cache
    if is_new and runtime.is_captured_ahead(dynamo.frame_id()):
        Fallbacks(runtime, settings.on_fallback).report_late(dynamo.recompile_reason(), name)
    made = None
    if saved is not None and isinstance(traced.identity, GraphIdentity) and is_new:
        with runtime.ledger.timed(WARM_START, LOADED):
            given = (name, traced.appended, traced.side_effects)
            made = saved.load(traced.identity, given, runtime, settings)
    made = made or _captured(name, traced, runtime, settings, aliases)
    if traced.key is not None:
        cache[traced.key] = made
    return _of_runtime(runtime, emptied_before(traced.lists, made))


def _captured(
    name: str, traced: _Traced, runtime: GraphRuntime, settings: Settings, aliases: Mapping[str, str]
) -> GraphedCallable:
    start_s = time.perf_counter()
    parts = partition(traced.whole, settings.splitting_ops)
    partition_s = time.perf_counter() - start_s
    is_first = not runtime.callables()  # a later graph may begin after a graph break
    sizes = GraphSizes.of(parts, settings, is_first=is_first)
    # Proofs need aten graphs, and are about symbolic sizes. Without a trace the compiler uses its cache of AOT graphs.
    entries = {} if traced.appended is None or traced.appended.sizes is None else traced.appended.sizes.entries
    trace = padding_passes(parts, sizes, settings, entries) if parts.has_symbols() else None
    dynamo.forget_arguments(traced.whole.graph)
    compiled = _compiled(name, parts, sizes, trace, runtime, settings)
    if (known := runtime.owned(CallableCache).get(traced.key)) is not None and known.runs(compiled.by_name):
        runtime.retraced(known.name)
        return known
    _dump(name, parts, settings)
    eager = [region for region in parts.regions if region.kind == "eager"]
    traces = {**compiled.traces, **({} if trace is None else traced_regions(eager, AtenGraph.of, ignores_numbers))}
    start_s = time.perf_counter()
    rules, proof = dispatched(name, parts, sizes, traces, settings) if settings.dispatches_itself() else (None, None)
    proof_s = time.perf_counter() - start_s
    record = CallableRecord(
        name=name,
        regions=region_records(parts, compiled.by_name),
        artifacts=compiled.num_new,
        frame=dynamo.frame_id(),
        ends=traced.ends_early,
        seconds=CompileSeconds(partition_s, compiled.key_s, compiled.compile_s, proof_s),
        admits=sizes.admits_key if sizes.symbols else None,
        sizes=() if rules is None or proof is None else size_records(rules, proof, traces),
        assumptions=() if proof is None else proof.assumptions,
        mode=None if rules is None else rules.mode if rules.off is None else CUDAGraphMode.NONE,
        off=None if rules is None else rules.off,
    )
    runtime.register(record)
    _note_problems(name, traced.constants, runtime)
    _note_sizes(name, parts, sizes, compiled, runtime, settings, is_first=is_first)
    report_graph(record, parts, rules, runtime, settings)
    graph = CompiledGraph(
        record=record,
        rules=rules,
        partition=parts,
        sizes=sizes,
        compiled=compiled.by_name,
        traces=traces,
        arguments=traced.arguments,
        appended=traced.appended,
        code=nnmodules.compiled_code(),
        returns_flat=_returns_flat(traced.whole),
        side_effects=traced.side_effects,
    )
    made = GraphedCallable(graph, runtime, settings)
    if traced.identity is not None:
        saved, regions = SavedCallable.of(graph, aliases), list(compiled.by_name.values())
        runtime.owned(SavedGraphs).save(made, traced.identity, saved, regions, runtime, settings)
    return made


@dataclass(frozen=True, slots=True)
class SavedCallable:
    """What the file of a graph holds of a callable: all but what belongs to a process. See Note [Saved starts]."""

    graph: CompiledGraph
    aliases: Mapping[str, str]  #: {what the user calls an input: its name in the graph}

    @classmethod
    def of(cls, graph: CompiledGraph, aliases: Mapping[str, str]) -> SavedCallable:
        """The parts of a callable, without its runtime and settings."""
        unbound = replace(
            graph,
            partition=replace(graph.partition, stitched=_unbound, _outputs=None),
            compiled=dict(graph.compiled),
            traces=dict(graph.traces),
            side_effects=(),
        )
        return cls(unbound, dict(aliases))

    def bound(
        self, used: UsedKeys, runtime: GraphRuntime, settings: Settings, traced: Sequence[Any] = ()
    ) -> GraphedCallable:
        """The callable in this process.

        ``traced`` has the name, the appended inputs and the side effects of a trace. Without one the settings name
        inputs as the user does.
        """
        if not traced:
            traced = runtime.next_callable_name(), self.graph.appended, ()
            settings = settings.with_names(self.aliases)
        name, appended, side_effects = traced
        record = replace(self.graph.record, name=name, frame=dynamo.frame_id(), is_loaded=True)
        record = replace(record, artifacts=0, seconds=CompileSeconds())
        runtime.register(record)
        runtime.note("loaded from warm_start: nothing was partitioned or compiled", at=name)
        graph = replace(self.graph, record=record, appended=appended, side_effects=side_effects)
        for region in {id(tuned): tuned for one in graph.compiled.values() if (tuned := one.tuned)}.values():
            region.load(name, runtime.ledger)
        loaded = GraphedCallable(graph, runtime, settings)
        loaded.remember_keys(used)
        return loaded


def _unbound(*_: Any) -> Any:
    raise AssertionError("a saved graph is bound to its runtime when it is loaded")


def _compiled(
    name: str, parts: Partition, sizes: GraphSizes, trace: Any, runtime: GraphRuntime, settings: Settings
) -> CompiledRegions:
    """Compile the captured regions, so that they can be saved where ``warm_start`` asks for it.

    A graph of constant sizes may serve one call only, so it waits for its second one unless something needs the
    artifact.
    """
    is_alone = current_context() is None and runtime.scopes.current() is None
    keeps = settings.tune is not None or settings.warm_start is not None
    apart = sizes.compiled_apart(settings)
    with _compiling(settings)():
        return runtime.owned(RegionCompiler).compile(
            [region for region in parts.regions if region.kind == "captured"],
            settings.compiler,
            None if isinstance(apart, Reason) else apart,
            trace=trace,
            tuning=_tuning(name, parts, runtime, settings),
            waits=settings.dispatches_itself() and is_alone and not keeps,
        )


def _tuning(name: str, parts: Partition, runtime: GraphRuntime, settings: Settings) -> Tuning | None:
    """How the regions of a graph are tuned; None if they are not, with a warning where the options ask for it."""
    if settings.tune is None:
        return None
    reason, tunes = None, True
    if calls_collectives(parts):
        reason, tunes = Reason("its collectives wait for ranks that would have to run each variant, too"), False
    elif settings.compiler != "inductor":
        reason, tunes = Reason(f"{settings.compiler} has no variants", "set compiler='inductor'"), False
    elif not any(isinstance(given.value, torch.Tensor) and given.value.is_cuda for given in parts.inputs):
        reason = Reason("that needs a GPU", "leave tune out on a CPU")
    if reason is not None:
        is_silent = settings.on_fallback == "silent"
        runtime.warn(f"not tuned: {reason}", reason.remedy, at=name, is_silent=is_silent)
    if not tunes:  # guard: tuning_alone
        return None
    return Tuning(
        name,
        runtime.ledger,
        settings.tune_seconds,
        settings.progress,
        region_in_float64,
        compiling=_compiling(settings),
        chosen=runtime.owned(SavedGraphs).tuned,
    )


def _compiling(settings: Settings) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is entered to compile: artifacts that ``warm_start`` saves are compiled under settings of their own."""
    return contextlib.nullcontext if settings.warm_start is None else saving.serializable


@dataclass(frozen=True, slots=True)
class _Traced:
    whole: fx.GraphModule  #: the copy, without unused tensor inputs and with appended ones
    lists: ListEntries  #: Dynamo's arguments that are lists; all else counts their entries as arguments
    arguments: Arguments  #: the remaining inputs among Dynamo's, of which wrappers are the tensors in them
    has_floats: bool  #: whether Python floats are among them
    constants: FloatConstants  #: the floats that are constants in the graph
    appended: AppendedInputs | None  #: the inputs after the arguments; None if there are none
    ends_early: Reason | None  #: the graph break after it; None if the function ends there
    side_effects: tuple[sideeffects.SideEffect, ...]  #: that Dynamo's code makes after the graph has run
    key: TraceKey | None  #: equal for traces that one callable can serve; None if none can share the callable
    identity: GraphIdentity | Reason | None  #: of its file with ``warm_start``, or why it has none

    @classmethod
    def of(cls, graph_module: fx.GraphModule, settings: Settings) -> _Traced:
        ends_early = dynamo.graph_break_after(graph_module)
        # Dynamo later reads the placeholders of its own graph to choose the callable's arguments.
        whole = uncompiled_copy(graph_module)
        lists = lists_as_entries(whole.graph)
        floats, constants = floats_as_tensors(whole)
        arguments = unwrapped(whole.graph, floats)
        side_effects = sideeffects.side_effects_of_compilation()
        unify_sizes(whole.graph, settings)
        without_open_masks(whole.graph)
        key, identity = TraceKey.of(whole, settings, ends_early, side_effects), None
        if settings.warm_start is not None:
            identity = GraphIdentity.of(whole, ends_early, side_effects, settings)
        used = _drop_unread_inputs(whole)
        reads = [arguments.reads[position] for position in used]
        is_plain = not lists and all(get is floats.get(at) for at, get in arguments.reads)
        if is_plain and dynamo.pass_only(graph_module.graph, used):
            reads = list(enumerate(get for _, get in reads))
        arguments = replace(arguments, reads=tuple(reads))
        attributes = lift_attributes(whole, dynamo.attribute_sources(graph_module))  # guard: attributes_undone
        made = append_made(whole.graph) if settings.dispatches_itself() and key is not None else None
        if made is not None and identity is not None:
            identity = Reason("neither saved nor loaded: it makes tensors on the CPU before each call", SEE_SAVED)
        sizes = append_real_sizes(whole, settings)
        is_any = attributes or sizes is not None or made is not None
        appended = AppendedInputs(attributes, sizes, made) if is_any else None
        return cls(whole, lists, arguments, bool(floats), constants, appended, ends_early, side_effects, key, identity)


@dataclass(frozen=True, slots=True)
class TraceKey:
    """Identity of a trace: one callable can serve all traces with equal keys."""

    frame: int | None  #: the Python frame that was traced
    settings: Settings  #: which another ``torch.compile`` of the same function may set differently
    ends_early: Reason | None  #: why the graph ends before the function does
    inputs: tuple[tuple[str | None, bool, frozenset[int]], ...]  #: (name, whether static, marked dimensions) of each
    side_effects: tuple[sideeffects.SideEffect, ...]  #: that Dynamo's code makes after the graph has run
    structure: tuple[Any, ...]  #: of the whole graph, including all ambient settings that a compiler reads

    @classmethod
    def of(
        cls,
        graph_module: fx.GraphModule,
        settings: Settings,
        ends_early: Reason | None,
        side_effects: tuple[sideeffects.SideEffect, ...],
    ) -> TraceKey | None:
        """The key of a new trace before unused inputs are erased; None for another tracer's, without example values."""
        graph = graph_module.graph
        if any(
            value_of(node) is None
            for node in (*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes)
        ):
            return None
        inputs = graph_inputs(graph)
        return cls(
            frame=dynamo.frame_id(),
            settings=settings,
            ends_early=ends_early,
            inputs=tuple(
                (graph_input.source_name, graph_input.is_static, graph_input.marked_dims) for graph_input in inputs
            ),
            side_effects=side_effects,
            structure=structure_of(graph_module, settings.compiler).key,
        )

    def __hash__(self) -> int:
        return hash((self.frame, self.structure))  # options hold dicts


class CallableCache(weakref.WeakValueDictionary[TraceKey | None, GraphedCallable]):
    """The callables of one runtime by trace, weakly: Dynamo owns them.

    Dynamo's guards distinguish more calls than graphs do (inference tensors, a slice as long as its buffer). A second
    callable for an equal graph would have none of the captured keys.
    """


def _note_sizes(
    name: str,
    parts: Partition,
    sizes: GraphSizes,
    compiled: CompiledRegions,
    runtime: GraphRuntime,
    settings: Settings,
    *,
    is_first: bool,
) -> None:
    for unmatched in unmatched_names(parts.inputs, sizes.symbols, settings, is_first=is_first):
        runtime.warn(unmatched, "name the inputs as the graph does", at=name)
    apart, (field, _) = sizes.compiled_apart(settings), settings.size_ranges() or ("", ())
    if isinstance(apart, Reason):
        runtime.warn(apart.why, apart.remedy, at=name)
    num_ranges = len(apart[1]) if isinstance(apart, tuple) else 0
    for region, artifact in compiled.by_name.items():
        trace = compiled.traces.get(region)
        is_made = trace is not None and trace.problem is None and bool(trace.result.insertions)
        if is_made and artifact.sized is not None and len(artifact.sized) < num_ranges:
            why = f"not compiled apart by {field}: at such a size other padding would be made than at the others"
            runtime.warn(why, "leave the size out of compile_sizes and compile_ranges", at=f"{name}.{region}")
    for problem in sizes.excluded(settings):
        runtime.note(problem, at=name)


def _note_problems(name: str, constants: FloatConstants, runtime: GraphRuntime) -> None:
    rnn = dynamo.untraced_rnn()
    if rnn is not None and not any(
        record.ends for record in runtime.callables()
    ):  # else the remedy of the break says it
        runtime.warn(f"{rnn} runs in Python: Dynamo does not trace it", dynamo.ALLOW_RNN, at=name)
    for number, op, where in constants:
        if op.startswith("graphpass::"):  # the scale of a layer of a decoder, which differs from that of the last one
            continue
        text = f"the float {number} is a constant in the graph, and each value is compiled apart: {op} takes no tensor"
        runtime.warn(text + (f" at {where}" if where else ""), "pass few values of it", at=name)


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

    return _of_runtime(runtime, counted)


def _of_runtime(runtime: GraphRuntime, served: Any) -> Any:
    served.runtime = runtime
    return served


def _refuse_subclasses(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and is_opaque(value):
            raise DeviceError(
                "this tensor subclass cannot be captured",
                expected="a plain tensor, or one that wraps others (`__tensor_flatten__`) and is not nested",
                found=type(value).__name__,
                remedy="pass the tensors that it consists of, or compile it with another backend",
            )


def _returns_flat(graph_module: fx.GraphModule) -> bool:
    returned = graph_module.graph.output_node().args[0]
    return isinstance(returned, (tuple, list)) and not any(isinstance(v, (tuple, list, dict)) for v in returned)


def _drop_unread_inputs(graph_module: fx.GraphModule) -> list[int]:
    taken = []
    for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        if node.users or not isinstance(symbolic.example_value(node), torch.Tensor):
            taken.append(position)
        else:
            graph_module.graph.erase_node(node)
    return taken


def _dump(name: str, parts: Partition, settings: Settings) -> None:
    if settings.dump_dir is not None:
        settings.dump_dir.mkdir(parents=True, exist_ok=True)
        (settings.dump_dir / f"{name}.txt").write_text(parts.dump(), encoding="utf-8")
