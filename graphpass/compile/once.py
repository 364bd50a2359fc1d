"""Compiles each region structure once, for any number of regions that have it, into a callable that they share."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import configuration, dynamo, memory, operators, saving, symbolic
from graphpass.compile.compilers import (
    Compiler,
    RegionTrace,
    TraceFunction,
    TraceOf,
    TraceOnce,
    compiler_named,
    inputs_of,
    own_copy,
    trace_alone,
)
from graphpass.compile.structure import Structure, inputs_within, structure_of, symbols_of
from graphpass.compile.tuning import Measurement, SizedArtifact, TunedRegion, Tuning

SizeRanges = tuple[sympy.Symbol, Sequence[tuple[int, int]]]
"""A symbol, and the ranges of its sizes (ends included) that get separate artifacts; the first range that fits wins."""

_WRITES_TO_SHARED = "it writes to inputs that have gaps or share memory"


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """Finds calls for which a functionalizing compiler's artifact is wrong, for a region that writes to its inputs.

    Such a compiler resolves overlaps between inputs by their offsets at compile time; and at symbolic sizes views of an
    input with gaps (a block of columns) get other strides. So artifacts run only if no written input has gaps or
    overlaps another input; other calls run the traced graph.
    """

    tensors: tuple[int, ...]  #: positions of the tensor inputs
    written: frozenset[int]  #: positions of the inputs that are written to

    @classmethod
    def of(cls, examples: Sequence[Any], written: Sequence[int]) -> WrittenInputs | None:
        """The record for a region with inputs like ``examples``; None if it writes to no input."""
        tensors = tuple(p for p, value in enumerate(examples) if isinstance(value, torch.Tensor))
        return cls(tensors, frozenset(written)) if written else None

    def defeat_compilers(self, args: Sequence[Any]) -> bool:
        """Whether a written input has gaps or overlaps another input."""
        with symbolic.quiet_shapes(symbolic.fake_mode_of(args)):
            dense = all(memory.is_dense(args[position]) for position in self.written)
        return not dense or self.overlap(args)  # guard: written_inputs_with_gaps

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether a written input is in a storage in which inputs overlap."""
        groups: dict[int, list[int]] = {}
        for position in self.tensors:
            groups.setdefault(memory.memory_id(args[position]) or -position, []).append(position)
        return any(
            len(group) > 1
            and not self.written.isdisjoint(group)
            and _any_overlap([args[position] for position in group])
            for group in groups.values()
        )


def _any_overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of these tensors, all in one storage, may have an element in common.

    AOTAutograd acts on its own test, which takes rows of a strided matrix for disjoint.
    """
    with symbolic.quiet_shapes(symbolic.fake_mode_of(tensors)):
        # guard: rows_of_a_matrix
        return memory.any_overlap(tensors) or any(itertools.starmap(_may_meet, itertools.combinations(tensors, 2)))


def _may_meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """False if the byte ranges are disjoint, or if both are disjoint blocks of columns of one matrix."""
    if not one.numel() or not other.numel():
        return False
    (start, width, pitch), (other_start, other_width, other_pitch) = _columns(one), _columns(other)
    if start + _reach(one) <= other_start or other_start + _reach(other) <= start:
        return False
    if pitch != other_pitch or one.element_size() != other.element_size():
        return True
    apart = (other_start - start) % pitch
    return not (width <= apart and apart + other_width <= pitch)


def _columns(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """(first byte, width of a row in bytes, distance of rows in bytes), where the widest stride separates the rows."""
    size = tensor.element_size()
    pairs = sorted(((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1), reverse=True)
    inner = sum((s - 1) * d for d, s in pairs[1:])
    return tensor.storage_offset() * size, (inner + 1) * size, (pairs[0][0] if pairs else 1) * size or size


def _reach(tensor: torch.Tensor) -> Any:
    return (sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()


class WaitingFunction:
    """The artifact of a graph without symbolic sizes, which waits for :meth:`compile`; until then the graph runs."""

    _lock = threading.RLock()  # Inductor compiles one graph at a time

    def __init__(self, graph_module: fx.GraphModule, examples: Sequence[Any], compiler: Compiler) -> None:
        self._function: Callable[..., Any] = graph_module.forward
        self._graph: tuple[Any, ...] | None = graph_module, examples, compiler, configuration.saved_configuration()

    def __call__(self, *args: Any) -> Any:
        """Run the artifact, or the traced region."""
        return self._function(*args)

    def compile(self) -> bool:
        """Compile it under the configuration of the trace, unless another caller has; returns whether it did."""
        with self._lock:
            if self._graph is None:
                return False
            graph_module, examples, compiler, configured = self._graph
            # guard: configured_as_traced
            with dynamo.tracing_with(symbolic.fake_mode_of(examples)), configured():
                self._function = compiler.compile(own_copy(graph_module), examples)
            self._graph = None
            return True


def _may_wait(region: Any, structure: Structure, compiler: Compiler) -> bool:
    """Whether a region adds no guards, needs no compiler to run well, and keeps no state: its steps round alike."""
    is_constant = not structure.symbols and not region.mutated_inputs  # guard: constant_sizes_wait
    # guard: compiled_for_its_operators
    needs_compiler = any(operators.is_higher_order(node.target) for node in region.graph_module.graph.nodes)
    return is_constant and compiler.opaque and not needs_compiler


class PlainRegion:
    """The artifact of one region structure that contains no insertions. It must never run at a padded size.

    It runs inside :func:`chosen` alone, and only in that thread. ``compile_within(bounds, is_plain=...)`` makes it, or
    None. A saved one is None: its graph is not kept.
    """

    def __init__(self, examples: Sequence[Any], compile_within: Callable[..., SizedArtifact | None]) -> None:
        self._symbols = symbols_of(examples)
        self._compile_within, self._configured = compile_within, configuration.saved_configuration()
        self._artifact: SizedArtifact | None = None
        self.thread: int | None = None  #: in which the artifact runs at present

    def __reduce__(self) -> Any:
        return type(None), ()

    def compile(self) -> bool:
        """Compile the artifact, unless there is one; returns whether there is one now."""
        if self._artifact is None:
            with self._configured():
                self._artifact = self._compile_within(dict.fromkeys(self._symbols, (None, None)), is_plain=True)
        return self._artifact is not None

    def function_for(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """The artifact for these arguments; None where it is not chosen or not valid."""
        if self.thread != threading.get_ident() or self._artifact is None:  # guard: plain_in_its_thread
            return None
        return self._artifact.function if self._artifact.serves(args) else None


@contextlib.contextmanager
def chosen(regions: Iterable[PlainRegion]) -> Iterator[None]:
    """Run the plain artifacts in the body, in this thread. Only one thread captures at a time."""
    regions = tuple(regions)
    for region in regions:
        region.thread = threading.get_ident()
    try:
        yield
    finally:
        for region in regions:
            region.thread = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledRegion:
    """A region as a callable from flat arguments to a flat tuple. Structurally identical regions share it."""

    function: Callable[..., Any]  #: the artifact that serves every size
    opaque: bool  #: its kernels bypass torch's dispatcher, so a recorder must treat a call as one op
    #: the traced region, for inputs that no artifact serves; with the changes that the trace function made
    uncompiled: Callable[..., Any]
    trace: RegionTrace | None  #: the result of the trace function for the aten graph; None without a trace function
    written_inputs: WrittenInputs | None = None  #: the check that inputs must pass before an artifact runs
    #: the first that serves a size is used instead of ``function``; None if no input is that size
    sized: tuple[SizedArtifact, ...] | None = None
    guards: tuple[sympy.Basic, ...] = ()  #: what the compilation assumed, over the symbols of the structural key
    tuned: TunedRegion | None = None  #: chooses among variants of the artifacts; None if the region is not to be tuned
    #: without what makes padding neutral, for the graphs of sizes that are not padded; None if there is nothing such
    plain: PlainRegion | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the artifact for these arguments, or the traced region if no artifact is valid for them."""
        function = self._artifact_for(args)
        if self.tuned is not None and function is not self.uncompiled:
            function = self.tuned.choose(function, args)
        return function(*args)

    def tune_in_warm_up(self, args: Sequence[Any], measurement: Measurement) -> float:
        """Choose among the variants for arguments of these sizes; returns the seconds that it took."""
        function = self._artifact_for(args)
        if self.tuned is None or function is self.uncompiled:
            return 0.0
        return self.tuned.tune(function, args, measurement)

    def _artifact_for(self, args: Sequence[Any]) -> Callable[..., Any]:
        # guard: written_inputs_overlap
        if self.written_inputs is not None and self.written_inputs.defeat_compilers(args):
            return self.uncompiled
        plain = None if self.plain is None else self.plain.function_for(args)
        return plain or next((one.function for one in self.sized or () if one.serves(args)), self.function)


@dataclass(frozen=True, slots=True)
class CompiledRegions:
    """The compiled regions of one graph."""

    by_name: Mapping[str, CompiledRegion]
    traces: Mapping[str, RegionTrace]  #: region name -> the result of the trace function, if there is one
    num_new: int  #: number of artifacts that were compiled; all others were reused
    key_s: float  #: seconds spent on structural keys
    compile_s: float  #: seconds spent in the compiler


class RegionCompiler:
    """Compiles regions and caches the artifacts for as long as a callable uses them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], CompiledRegion] = weakref.WeakValueDictionary()

    def compile(
        self,
        regions: Sequence[Any],
        compiler: str,
        size_ranges: SizeRanges | None = None,
        *,
        trace: TraceOf | None = None,
        tuning: Tuning | None = None,
        waits: bool = False,
    ) -> CompiledRegions:
        """Compile ``regions`` of one graph, structurally identical ones once; ``tuning`` None: they are not tuned.

        ``waits``: what adds no guards becomes a :class:`WaitingFunction`, but for what writes state, and for
        higher-order operators, which take more memory without a compiler.
        """
        chosen = compiler_named(compiler)
        start_s = time.perf_counter()
        # Compute all keys before the first compilation, see Note [Guards of a compilation].
        structures = [structure_of(region.graph_module, compiler) for region in regions]
        known = [frozenset(symbolic.facts_of(structure.shape_env)) for structure in structures]
        keyed_s = time.perf_counter()
        by_name: dict[str, CompiledRegion] = {}
        traces: dict[str, RegionTrace] = {}
        num_new = 0
        for region, structure, facts in zip(regions, structures, known, strict=True):
            wanted: tuple[Any, ...] = ()  # (index of the symbol in the key, ranges)
            if size_ranges is not None and size_ranges[0] in structure.symbols:
                wanted = (structure.symbols.index(size_ranges[0]), tuple(size_ranges[1]))
            decided = None if trace is None else trace(region).key  # guard: made_artifacts_apart
            key = (structure.key, tuning is not None, decided, *wanted)
            artifact = self._known.get(key)
            if artifact is None or not _assume(structure, artifact):  # guard: artifact_guards
                late = waits and trace is None and _may_wait(region, structure, chosen)
                artifact = _compiled(region, structure, facts, wanted, chosen, trace, tuning, waits=late)
                self._known[key] = artifact
                num_new += 0 if isinstance(artifact.function, WaitingFunction) else 1 + len(artifact.sized or ())
            if trace is not None:
                if artifact.trace is None:
                    traced = _traced(region, structure, trace(region))
                    artifact = self._known[key] = replace(artifact, trace=traced)
                assert artifact.trace is not None
                traces[region.name] = artifact.trace.of_region(structure.symbols)
            by_name[region.name] = artifact
        seconds = (keyed_s - start_s, time.perf_counter() - keyed_s)
        return CompiledRegions(MappingProxyType(by_name), MappingProxyType(traces), num_new, *seconds)


def traced_regions(
    regions: Sequence[Any], trace: TraceFunction, ignores_numbers: Callable[[Any], bool] = lambda target: False
) -> dict[str, RegionTrace]:
    """Call ``trace`` with the aten graphs of regions that are not compiled, once for each structure.

    For ``ignores_numbers`` see :func:`graphpass.compile.structure.structure_of`.
    """
    results_of: dict[Any, RegionTrace] = {}
    traces = {}
    for region in regions:
        try:
            structure = structure_of(region.graph_module, "eager", ignores_numbers)
        except Exception as error:
            traces[region.name] = RegionTrace(None, f"its inputs or ops have no structure: {type(error).__name__}")
            continue
        if structure.key not in results_of:
            results_of[structure.key] = _traced(region, structure, trace)
        traces[region.name] = results_of[structure.key].of_region(structure.symbols)
    return traces


def _traced(region: Any, structure: Structure, trace: TraceFunction) -> RegionTrace:
    examples = inputs_of(region.graph_module)
    written = WrittenInputs.of(examples, region.mutated_inputs)
    if written is not None and written.overlap(examples):  # AOTAutograd merges them, or fails to
        return RegionTrace(None, _WRITES_TO_SHARED)
    return trace_alone(trace, region.graph_module, structure.symbols)


def _assume(structure: Structure, artifact: CompiledRegion) -> bool:
    return symbolic.guard_on(structure.shape_env, structure.own(artifact.guards))


def _prepared(
    region: Any, compiler: Compiler, *, waits: bool
) -> tuple[list[Any], WrittenInputs | None, CompiledRegion | None]:
    """The example inputs, the check of those that are written to, and the region if nothing is compiled now."""
    examples, problem, as_traced = inputs_of(region.graph_module), None, region.graph_module.forward
    written = WrittenInputs.of(examples, region.mutated_inputs) if compiler.functionalizes else None
    if compiler.functionalizes and any(map(memory.is_lazy, examples)):  # guard: lazy_inputs
        problem = "an input is a lazy conjugate or negative, whose memory compiled code reads as it is"
    elif written is not None and written.defeat_compilers(examples):
        problem = _WRITES_TO_SHARED
    made = None
    if problem is not None:
        made = CompiledRegion(as_traced, opaque=False, uncompiled=as_traced, trace=RegionTrace(None, problem))
    elif waits:
        late = WaitingFunction(region.graph_module, examples, compiler)
        made = CompiledRegion(late, compiler.opaque, as_traced, trace=None, written_inputs=written)
    return examples, written, made


def _compiled(
    region: Any,
    structure: Structure,
    known: frozenset[sympy.Basic],
    wanted: tuple[Any, ...],
    compiler: Compiler,
    trace: TraceOf | None,
    tuning: Tuning | None,
    *,
    waits: bool,
) -> CompiledRegion:
    """Compile one region. ``known`` are the facts when its key was computed; later facts become guards."""
    graph_module, (examples, written, made) = region.graph_module, _prepared(region, compiler, waits=waits)
    if made is not None:
        return made

    def within(
        bounds: Mapping[sympy.Symbol, tuple[int | None, int | None]],
        sizes: Mapping[sympy.Symbol, int] | None = None,
        is_plain: bool = False,
        **settings: Any,
    ) -> SizedArtifact | None:
        """An artifact for sizes within bounds, see :func:`inputs_within`; None if its inputs cannot be reproduced."""
        inputs = inputs_within(examples, bounds, sizes) if places.keys() >= bounds.keys() else None
        if inputs is None or (written is not None and written.defeat_compilers(inputs[0])):
            return None
        values, fake_mode, renamed = inputs
        # guard: made_in_variants
        again = trace(region) if trace and reader and reader.changed and not is_plain else None
        shown = [] if again is None else [TraceOnce(again, graph_module)]
        with dynamo.tracing_with(fake_mode):
            copy = own_copy(graph_module, keep_shapes=False)
            if saving.are_serializable():  # torch saves no graph with a method of what is not known to be a tensor
                symbolic.set_values(copy, values, fake_mode)  # guard: saved_method_calls
            function = compiler.compile(copy, values, *shown, **settings)
        if reader and again and again.decisions != reader.decisions:  # guard: made_variants_agree
            return None
        symbols, facts = tuple(map(renamed.__getitem__, bounds)), symbolic.facts_of(fake_mode.shape_env)
        return SizedArtifact(function, tuple(places[of] for of in bounds), tuple(bounds.values()), symbols, facts)

    places = symbolic.places_of(examples)
    reader = trace(region) if trace is not None and compiler.functionalizes else None
    show = None if reader is None else TraceOnce(reader, graph_module)
    with dynamo.floats_as_tensors(examples):
        function = compiler.compile(own_copy(graph_module), examples, *([] if show is None else [show]))
    added, sized = [guard for guard in symbolic.facts_of(structure.shape_env) if guard not in known], None
    if wanted and places.get(symbol := structure.symbols[wanted[0]], (0, 0))[1] is None:
        sized = tuple(filter(None, (within({symbol: bounds}) for bounds in wanted[1])))
    computed = replace(region, graph_module=reader.changed) if reader and reader.changed else region
    return CompiledRegion(
        function,
        opaque=compiler.opaque,
        uncompiled=computed.graph_module.forward,  # guard: made_reference
        trace=None if show is None else show.result(zip(structure.symbols, structure.symbols, strict=True)),
        written_inputs=written,
        sized=sized,
        guards=structure.canonical(added),
        tuned=None if tuning is None else TunedRegion(tuning, computed, examples, within),  # guard: tuned_with_made
        plain=PlainRegion(examples, within) if computed is not region and tuning is None else None,
    )
