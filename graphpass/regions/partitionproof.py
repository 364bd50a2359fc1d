"""The verdict for each padded size of a partition, and whether the entries along a size are independent.

The walk follows the stitched code region by region and maps value names to abstract values. Regions of one structure
share an aten graph, so 240 equal layers are interpreted once and looked up 239 times.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.compat.nnmodules import where_of
from graphpass.ledger import PaddingFinding
from graphpass.padding.interpreter import Interpretation, input_values, interpret
from graphpass.padding.program import size_of
from graphpass.padding.proof import PaddingProof, decided, findings_of_results
from graphpass.padding.sizes import Question, Sizes, as_size
from graphpass.padding.values import PaddedValue, Size, TensorShape
from graphpass.regions.assign import Region
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.names import display_name
from graphpass.regions.split import Partition

Abstract: TypeAlias = PaddedValue | Size | None

_NAMED_OPS = 3
_RANDOM = "random numbers"


RegionGraph: TypeAlias = Any
"""A :class:`graphpass.compile.RegionTrace` whose result is the aten graph of a region, which equal regions share."""


def prove_partition(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    declared: Mapping[int, float | int | bool | None] | None = None,
) -> PaddingProof:
    """Prove which sizes of a partitioned graph may be padded."""
    run = _PartitionRun(parts, graphs, declared or {})
    return decided(symbols, lambda candidates: run.with_findings(Sizes(candidates)))


def mixing_of(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    trusted: Collection[str] = (),
) -> tuple[PaddingFinding, ...]:
    """The operators through which an entry along a size depends on other entries along it, or on their number.

    Stricter than a proof of padding: any entries may be the real ones, so causal order, masks, windows and zero padding
    do not help. An output without that size may contain entries selected by data, such as each request's last logits.
    The index of an entry may only select that same entry. Random numbers, which depend on how many are drawn, do not
    count.
    """
    run = _PartitionRun(parts, graphs, {}, frozenset(trusted))
    independence = Sizes(symbols, Question.INDEPENDENCE)  # guard: manager_mixing_causal
    # Uses of the size as a number mix no entries, but depend on the number of entries.
    counted = (finding for finding in run.with_findings(Sizes(symbols))[1] if finding.target != _RANDOM)
    # guard: manager_mixing_counts
    findings = [*_mixed(run, independence), *(finding for finding in counted if not finding.is_by_contents)]
    first: dict[tuple[str, str], PaddingFinding] = {}
    for finding in findings:
        first.setdefault((finding.op, finding.where), finding)
    return tuple(first.values())


def _mixed(run: _PartitionRun, sizes: Sizes) -> list[PaddingFinding]:
    interpreted = run.interpretation(sizes)
    findings = [finding for finding in interpreted.findings if finding.target != _RANDOM]
    results = [(f"output {at}", value) for at, value in enumerate(interpreted.outputs)]
    results += [(run.targets[at], value) for at, value in interpreted.written.items()]
    for target, value in results:
        if not isinstance(value, PaddedValue):
            continue
        places = sizes.places(value)
        by_data = not places and not target.startswith("written")
        findings += [f.reaching(target) for f in value.findings if not (by_data and f.is_by_contents)]
        findings += [f.reaching(target) for f in value.by_position]  # guard: manager_mixing_positions
        if len(places) > 1:
            why = f"its entries stand along {[value.factors[dim][at] for dim, at in places]}"
            fields = dict.fromkeys(sizes.fields.values())
            findings += [PaddingFinding(why, field=field, op="result", target=target) for field in fields]
    return sorted(set(findings), key=str)


class _PartitionRun:
    """Interprets a partition for several sets of padded sizes; caches the results of each region by its inputs."""

    def __init__(
        self,
        parts: Partition,
        graphs: Mapping[str, RegionGraph],
        declared: Mapping[int, float | int | bool | None],
        trusted: frozenset[str] = frozenset(),
    ) -> None:
        self._parts, self._graphs, self._declared, self._trusted = parts, graphs, declared, trusted
        self._interpreted: dict[Any, Interpretation] = {}  # in the symbols of an aten graph
        self.targets = {at: f"written input '{given.shown}'" for at, given in enumerate(parts.inputs)}

    @functools.cached_property
    def _storages(self) -> dict[str, frozenset[int]]:
        found = {given.name: storages_of(given.value) for given in self._parts.inputs}
        for region in self._parts.regions:
            results: Any = region.graph_module.graph.output_node().args[0]
            found |= {name: storages_of(value_of(node)) for name, node in zip(region.outputs, results, strict=True)}
        return found

    def with_findings(self, sizes: Sizes) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        run = self.interpretation(sizes)
        return run, findings_of_results(run, sizes, self._inputs(sizes), self.targets)

    def interpretation(self, sizes: Sizes) -> Interpretation:
        """The interpretation of the whole graph; its outputs are the output leaves of the partition."""
        inputs = self._parts.inputs
        values = {given.name: value for given, value in zip(inputs, self._inputs(sizes), strict=True)}
        passed = [self._through(region, values, sizes) for region in self._parts.regions]
        outputs = tuple(values.get(name) for name, _ in self._parts.output_values)
        written = {position: values[inputs[position].name] for position in self._parts.mutated_inputs}
        return Interpretation(
            outputs,
            {position: value for position, value in written.items() if isinstance(value, PaddedValue)},
            frozenset[PaddingFinding]().union(*(of_region.findings for of_region in passed)),
            frozenset[str]().union(*(of_region.assumptions for of_region in passed)),
            any(of_region.needs_real_contents for of_region in passed),
        )

    def _inputs(self, sizes: Sizes) -> tuple[Abstract, ...]:
        return input_values([_shape_of(given.value) for given in self._parts.inputs], sizes, self._declared)

    def _through(self, region: Region, values: dict[str, Abstract], sizes: Sizes) -> Interpretation:
        inputs = tuple(values.get(name) for name in region.inputs)
        graph = self._graphs.get(region.name)
        problem = "it was not traced" if graph is None else graph.problem
        passed = None
        if graph is not None and problem is None:
            passed = self._traced(graph, inputs, sizes)
            problem = "its inputs have sizes that its aten graph lacks"
        if passed is None:
            passed = _opaque(region, inputs, problem or "", sizes)
        values.update((region.inputs[position], value) for position, value in passed.written.items())
        if region.mutated_inputs:
            self._follow_writes(region, values, sizes)
        values.update(zip(region.outputs, passed.outputs, strict=True))
        return passed

    def _traced(self, graph: RegionGraph, inputs: tuple[Abstract, ...], sizes: Sizes) -> Interpretation | None:
        """The results of a region that has an aten graph; None if that graph lacks a symbol of ``inputs``."""
        inside: dict[sympy.Basic, Any] = {}
        outside: dict[sympy.Basic, Any] = {}
        fields: dict[sympy.Symbol, str] = {}
        for of_graph, own in graph.symbols:
            shared: Any = sizes.renamed(own)  # all symbols of a key field are one symbol in the whole graph
            inside.setdefault(shared, of_graph)
            inside.setdefault(own, inside[shared])  # number inputs have the region's own symbol
            if isinstance(of_graph, sympy.Symbol):
                outside[of_graph] = shared
                fields.update({of_graph: sizes.fields[own]} if own in sizes.fields else {})
            elif own in sizes.fields:
                return None  # a symbol that tracing replaced by a number cannot be padded
        renamed = tuple(_renamed(value, inside) for value in inputs)
        if _lacks(inputs, renamed):
            return None
        key = (id(graph.result), renamed, tuple(fields.items()), sizes.question)
        if key not in self._interpreted:
            within = Sizes(fields, sizes.question)
            self._interpreted[key] = interpret(graph.result, renamed, within, self._trusted)
        run = self._interpreted[key]
        written = {position: _renamed(value, outside) for position, value in run.written.items()}
        outputs = tuple(_renamed(value, outside) for value in run.outputs)
        tensors = [value if isinstance(value, PaddedValue) else None for value in run.outputs]
        if _lacks(tensors, outputs) or _lacks(run.written.values(), written.values()):
            return None
        return replace(run, outputs=outputs, written=written)

    def _follow_writes(self, region: Region, values: dict[str, Abstract], sizes: Sizes) -> None:
        """Add findings to the values that share memory with an input that the region wrote to."""
        names = [region.inputs[position] for position in region.mutated_inputs]
        written = [values.get(name) for name in names]
        findings = {f for v in written if isinstance(v, PaddedValue) for f in v.findings | v.by_position}
        storages = frozenset[int]().union(*(self._storages.get(name, frozenset()) for name in names))
        for name in {name for name, own in self._storages.items() if own & storages} - set(region.inputs):
            value = values.get(name)
            if isinstance(value, PaddedValue):
                fields = {field for one in (value, *written) for field in _fields_of(one, sizes)}
                why, ops, place = "it writes to memory that other values share", _ops_of(region), _place_of(region)
                findings |= {PaddingFinding(why, where=place, field=f, op=ops) for f in sorted(fields)}
                values[name] = _unknown(value, findings)


def _lacks(values: Iterable[Abstract], renamed: Iterable[Abstract]) -> bool:
    """Whether a value has no name on the other side."""
    return any(other is None for value, other in zip(values, renamed, strict=True) if value is not None)


def _renamed(value: Abstract, names: Mapping[sympy.Basic, Any]) -> Any:
    """``value`` with other symbols; None if ``names`` lacks one of them."""
    if isinstance(value, PaddedValue):
        factors = tuple(tuple(_renamed(size, names) for size in of_dim) for of_dim in value.factors)
        missing = any(size is None for of_dim in factors for size in of_dim)
        return None if missing else replace(value, factors=factors)
    if value is None or isinstance(value, int):
        return value
    return as_size(value.xreplace(dict(names))) if value.free_symbols <= names.keys() else None


def _opaque(region: Region, inputs: Sequence[Abstract], problem: str, sizes: Sizes) -> Interpretation:
    results: Any = region.graph_module.graph.output_node().args[0]
    fresh = input_values([_shape_of(value_of(node)) for node in results], sizes)
    fields = {name for value in (*inputs, *fresh) for name in _fields_of(value, sizes)}
    findings = {f for value in inputs if isinstance(value, PaddedValue) for f in value.findings | value.by_position}
    ops, place = _ops_of(region), _place_of(region)
    findings |= {PaddingFinding(problem, where=place, field=name, op=ops) for name in sorted(fields)}
    outputs = tuple(v.with_findings(findings) if isinstance(v, PaddedValue) else v for v in fresh)
    written = {
        position: _unknown(value, findings)
        for position in region.mutated_inputs
        if isinstance(value := inputs[position], PaddedValue)
    }
    effects = frozenset(finding.reaching(f"what region {region.name} does") for finding in findings)
    return Interpretation(outputs, written, effects, frozenset(), needs_real_contents=True)


def _unknown(value: PaddedValue, findings: Iterable[PaddingFinding]) -> PaddedValue:
    """``value`` after a write of unknown contents: same sizes, more findings, nothing known of padding."""
    return replace(value.with_findings(findings), padding=(), index=None, constant=None, real=None)


def _shape_of(value: Any) -> TensorShape | Size | None:
    if isinstance(value, torch.Tensor):
        return TensorShape(tuple(map(size_of, value.shape)), value.dtype)
    return size_of(value)


def _fields_of(value: Abstract, sizes: Sizes) -> Iterator[str]:
    for of_dim in value.factors if isinstance(value, PaddedValue) else ((value,),):
        for size in of_dim:
            yield from sizes.fields_of(size)


def _ops_of(region: Region) -> str:
    calls = [node for node in region.graph_module.graph.nodes if node.op in ("call_function", "call_method")]
    names = list(dict.fromkeys(display_name(node) for node in calls))
    return ", ".join(names[:_NAMED_OPS]) + ("..." if len(names) > _NAMED_OPS else "") or f"region {region.name}"


def _place_of(region: Region) -> str:
    places = (where_of(node.meta.get("stack_trace")) for node in region.graph_module.graph.nodes)
    return next(filter(None, places), "")
