"""Compile-once: each structure goes through the compiler a single time, however many regions have it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import sympy
from torch import fx

from graphpass.compat import compilers, dynamo, symbolic
from graphpass.compile.compilers import Compiler, compiler_named
from graphpass.compile.region import CompiledRegion, SizedArtifact, WrittenInputs
from graphpass.compile.specialize import inputs_within
from graphpass.compile.structure import Structure, structure_of
from graphpass.compile.traces import GraphTrace, RegionTrace, TraceFunction, TraceOnce, own_copy, trace_alone

__all__ = ["CompiledRegions", "RegionCompiler", "SizeRanges", "traced_regions"]

SizeRanges = tuple[sympy.Symbol, Sequence[tuple[int, int]]]
"""A symbol, and the ranges of its sizes, ends included, that get artifacts of their own; first come, first served."""


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
        by_name: region name -> what runs it.
        traces: region name -> what the trace function made of its aten graph; empty where there was none.
        num_new: artifacts that had to be compiled; the others were there.
        key_s: seconds spent on structural keys.
        compile_s: seconds spent in the compiler.
    """

    by_name: Mapping[str, CompiledRegion]
    traces: Mapping[str, RegionTrace]
    num_new: int
    key_s: float
    compile_s: float


class RegionCompiler:
    """Compiles regions and remembers what it compiled, for as long as some callable uses it."""

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
            size_ranges: sizes of one symbol that get artifacts of their own. A region without that symbol has none.
            trace: called with the aten graph of each structure, which it must not change, and which has the region's
                inputs and outputs; artifacts keep what it returns. What it raises is a reason to have no result. It is
                the same function whenever regions are compiled.

        Raises:
            OptionError: no such compiler.
        """
        chosen = compiler_named(compiler)
        start_s = time.perf_counter()
        # All keys before the first compilation: what compiling one region adds to the guards is no part of another key.
        # Regions that follow are compiled with it all the same, so that their artifacts assume it.
        structures = [structure_of(region.graph_module, compiler) for region in regions]
        known = [frozenset(symbolic.facts_of(structure.shape_env)) for structure in structures]
        keyed_s = time.perf_counter()
        found: dict[str, CompiledRegion] = {}
        traces: dict[str, RegionTrace] = {}
        num_new = 0
        for region, structure, facts in zip(regions, structures, known, strict=True):
            wanted = _ranges_of(structure, size_ranges)
            key = (structure.key, *wanted)
            artifact = self._known.get(key)
            if artifact is None or not _assume(structure, artifact):
                artifact = self._known[key] = _Compilation(region, structure, facts, wanted, chosen, trace).run()
                num_new += artifact.num_artifacts()
            if trace is not None:
                if artifact.trace is None:
                    made = trace_alone(trace, region.graph_module, structure.symbols)
                    artifact = self._known[key] = replace(artifact, trace=made)
                assert artifact.trace is not None
                traces[region.name] = artifact.trace.of_region(structure.symbols)
            found[region.name] = artifact
        seconds = (keyed_s - start_s, time.perf_counter() - keyed_s)
        return CompiledRegions(MappingProxyType(found), MappingProxyType(traces), num_new, *seconds)


def traced_regions(regions: Sequence[_Region], trace: TraceFunction) -> dict[str, RegionTrace]:
    """What ``trace`` makes of the aten graphs of regions that nothing compiles, once for each structure.

    Args:
        regions: regions whose nodes carry fake tensors and symbolic sizes, also what no compiler could take: the result
            says then why there is no aten graph.
        trace: as for :meth:`RegionCompiler.compile`.
    """
    made: dict[Any, GraphTrace] = {}
    found = {}
    for region in regions:
        try:
            structure = structure_of(region.graph_module, "eager")
        except Exception as error:
            found[region.name] = RegionTrace(None, f"its inputs or ops have no structure: {type(error).__name__}")
            continue
        if structure.key not in made:
            made[structure.key] = trace_alone(trace, region.graph_module, structure.symbols)
        found[region.name] = made[structure.key].of_region(structure.symbols)
    return found


def _ranges_of(structure: Structure, size_ranges: SizeRanges | None) -> tuple[Any, ...]:
    """(number of the symbol in the key, ranges); empty for a region without the symbol."""
    if size_ranges is None or size_ranges[0] not in structure.symbols:
        return ()
    return (structure.symbols.index(size_ranges[0]), tuple(size_ranges[1]))


def _assume(structure: Structure, artifact: CompiledRegion) -> bool:
    """Let the graph guard on what the artifact assumed of its symbols; False where that does not hold."""
    return symbolic.guard_on(structure.shape_env, structure.own(artifact.guards))


@dataclass(frozen=True, slots=True)
class _Compilation:
    """One region on its way to an artifact."""

    region: _Region
    structure: Structure
    known: frozenset[sympy.Basic]  # facts of the time when the key was made; what came later, the artifact assumes
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
        """The artifact for all sizes, and the trace of the graph that its compiler made."""
        graph_module = own_copy(self.region.graph_module)
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
            with compilers.tracing_with(inputs.fake_mode):
                function = self.compiler.compile(own_copy(self.region.graph_module, keep_shapes=False), inputs.values)
            artifacts.append(SizedArtifact(lowest, highest, function, inputs.symbols[symbol], inputs.guards()))
        return position, tuple(artifacts)
