"""Compiles each region structure once, for any number of regions that have it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import sympy
from torch import fx

from graphpass.compat import dynamo, symbolic
from graphpass.compile.compilers import Compiler, compiler_named
from graphpass.compile.region import CompiledRegion, SizedArtifact, WrittenInputs
from graphpass.compile.specialize import inputs_within
from graphpass.compile.structure import Structure, structure_of
from graphpass.compile.traces import GraphTrace, RegionTrace, TraceFunction, TraceOnce, own_copy, trace_alone

__all__ = ["CompiledRegions", "RegionCompiler", "SizeRanges", "traced_regions"]

SizeRanges = tuple[sympy.Symbol, Sequence[tuple[int, int]]]
"""A symbol, and the ranges of its sizes (ends included) that get separate artifacts; the first range that fits wins."""


class _Region(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def graph_module(self) -> fx.GraphModule: ...
    @property
    def mutated_inputs(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class CompiledRegions:
    """The compiled regions of one graph.

    Attributes:
        by_name: region name -> its compiled callable.
        traces: region name -> the result of the trace function for its aten graph; empty without a trace function.
        num_new: number of artifacts that were compiled; all others were reused.
        key_s: seconds spent on structural keys.
        compile_s: seconds spent in the compiler.
    """

    by_name: Mapping[str, CompiledRegion]
    traces: Mapping[str, RegionTrace]
    num_new: int
    key_s: float
    compile_s: float


class RegionCompiler:
    """Compiles regions and caches the artifacts for as long as a callable uses them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], CompiledRegion] = weakref.WeakValueDictionary()

    def compile(
        self,
        regions: Sequence[_Region],
        compiler: str,
        size_ranges: SizeRanges | None = None,
        *,
        trace: TraceFunction | None = None,
    ) -> CompiledRegions:
        """Compile ``regions`` of one graph, structurally identical ones once.

        Args:
            regions: regions whose nodes carry fake tensors and symbolic sizes.
            compiler: one of :data:`graphpass.compile.COMPILERS`.
            size_ranges: sizes of one symbol that get separate artifacts, in regions with that symbol.
            trace: called with the aten graph of each structure, which has the region's inputs and outputs. It must not
                change the graph. Artifacts store its result; an exception becomes the ``problem`` of the trace. Pass
                the same function in every call.

        Raises:
            OptionError: no such compiler.
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
            wanted = _ranges_of(structure, size_ranges)
            key = (structure.key, *wanted)
            artifact = self._known.get(key)
            if artifact is None or not _assume(structure, artifact):  # guard: artifact_guards
                artifact = self._known[key] = _Compilation(region, structure, facts, wanted, chosen, trace).run()
                num_new += artifact.num_artifacts()
            if trace is not None:
                if artifact.trace is None:
                    traced = trace_alone(trace, region.graph_module, structure.symbols)
                    artifact = self._known[key] = replace(artifact, trace=traced)
                assert artifact.trace is not None
                traces[region.name] = artifact.trace.of_region(structure.symbols)
            by_name[region.name] = artifact
        seconds = (keyed_s - start_s, time.perf_counter() - keyed_s)
        return CompiledRegions(MappingProxyType(by_name), MappingProxyType(traces), num_new, *seconds)


def traced_regions(regions: Sequence[_Region], trace: TraceFunction) -> dict[str, RegionTrace]:
    """Call ``trace`` with the aten graphs of regions that are not compiled, once for each structure.

    Args:
        regions: regions whose nodes carry fake tensors and symbolic sizes. For a region that cannot be traced, the
            result has the problem instead.
        trace: as for :meth:`RegionCompiler.compile`.
    """
    results_of: dict[Any, GraphTrace] = {}
    traces = {}
    for region in regions:
        try:
            structure = structure_of(region.graph_module, "eager")
        except Exception as error:
            traces[region.name] = RegionTrace(None, f"its inputs or ops have no structure: {type(error).__name__}")
            continue
        if structure.key not in results_of:
            results_of[structure.key] = trace_alone(trace, region.graph_module, structure.symbols)
        traces[region.name] = results_of[structure.key].of_region(structure.symbols)
    return traces


def _ranges_of(structure: Structure, size_ranges: SizeRanges | None) -> tuple[Any, ...]:
    """(index of the symbol in the key, ranges); empty for a region without the symbol."""
    if size_ranges is None or size_ranges[0] not in structure.symbols:
        return ()
    return (structure.symbols.index(size_ranges[0]), tuple(size_ranges[1]))


def _assume(structure: Structure, artifact: CompiledRegion) -> bool:
    """Add the artifact's guards to the graph of ``structure``; False if one of them does not hold there."""
    return symbolic.guard_on(structure.shape_env, structure.own(artifact.guards))


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The compilation of one region."""

    region: _Region
    structure: Structure
    known: frozenset[sympy.Basic]  # facts when the key was computed; later facts become guards of the artifact
    wanted: tuple[Any, ...]
    compiler: Compiler
    trace: TraceFunction | None

    def run(self) -> CompiledRegion:
        graph_module = self.region.graph_module
        examples = [dynamo.example_value(node) for node in graph_module.graph.find_nodes(op="placeholder")]
        written = WrittenInputs.of(examples, self.region.mutated_inputs) if self.compiler.functionalizes else None
        if written is not None and written.defeat_compilers(examples):
            return CompiledRegion.as_traced(graph_module.forward)
        shape_env = self.structure.shape_env
        function, trace = self._compiled(examples)
        added = [guard for guard in symbolic.facts_of(shape_env) if guard not in self.known]
        position, sized = self._sized(examples, written)
        return CompiledRegion(
            function=function,
            opaque=self.compiler.opaque,
            uncompiled=graph_module.forward,
            written_inputs=written,
            size_position=position,
            sized=sized,
            guards=self.structure.canonical(added),
            trace=trace,
            _chosen={},
        )

    def _compiled(self, examples: Sequence[Any]) -> tuple[Callable[..., Any], GraphTrace | None]:
        """The artifact for all sizes, and the trace of its aten graph if the compiler produced one."""
        graph_module = own_copy(self.region.graph_module)
        with dynamo.floats_as_tensors(examples):
            if self.trace is None or not self.compiler.functionalizes:
                return self.compiler.compile(graph_module, examples), None
            show = TraceOnce(self.trace, self.region.graph_module)
            function = self.compiler.compile(graph_module, examples, show)
            return function, show.result(self.structure.symbols)

    def _sized(
        self, examples: Sequence[Any], written: WrittenInputs | None
    ) -> tuple[int | None, tuple[SizedArtifact, ...]]:
        if not self.wanted:
            return None, ()
        symbol = self.structure.symbols[self.wanted[0]]
        position = next((p for p, value in enumerate(examples) if symbolic.expression_of(value) == symbol), None)
        if position is None:
            return None, ()
        artifacts = []
        for lowest, highest in self.wanted[1]:
            inputs = inputs_within(examples, {symbol: (lowest, highest)})
            if inputs is None or (written is not None and written.defeat_compilers(inputs.values)):
                continue
            with dynamo.tracing_with(inputs.fake_mode):
                function = self.compiler.compile(own_copy(self.region.graph_module, keep_shapes=False), inputs.values)
            artifacts.append(SizedArtifact(lowest, highest, function, inputs.symbols[symbol], inputs.guards()))
        return position, tuple(artifacts)
