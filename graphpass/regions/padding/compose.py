"""The proof of a whole graph from the aten graphs of its regions.

The walk follows the stitched code region by region and maps value names to abstract values. Regions of one structure
share an aten graph, so 240 equal layers are interpreted once and looked up 239 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import sympy
import torch

from graphpass.compat import symbolic
from graphpass.compat.nnmodules import where_of
from graphpass.regions.assign import Region
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.names import display_name
from graphpass.regions.padding.interpreter import Interpretation, input_values, interpret
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.program import AtenGraph
from graphpass.regions.padding.proof import PaddingProof, decided, findings_of_results
from graphpass.regions.padding.sizes import Sizes, as_size
from graphpass.regions.padding.values import PaddedValue, PaddingFinding, Sign, Size
from graphpass.regions.split import Partition

__all__ = ["PartitionRun", "RegionGraph", "prove_partition"]

Abstract: TypeAlias = PaddedValue | Size | None

_NAMED_OPS = 3


class RegionGraph(Protocol):
    """The aten graph of a region.

    Attributes:
        result: the :class:`AtenGraph`, shared by regions of one structure; None if there is no graph.
        problem: why there is no graph; None if there is one.
        symbols: pairs (symbol of the aten graph, symbol of the region).
    """

    @property
    def result(self) -> Any:
        """The :class:`AtenGraph`, or None."""

    @property
    def problem(self) -> str | None:
        """Why there is no graph, or None."""

    @property
    def symbols(self) -> tuple[tuple[sympy.Expr, sympy.Symbol], ...]:
        """Pairs (symbol of the aten graph, symbol of the region)."""


def prove_partition(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    declared: Mapping[int, float | int | bool | None] | None = None,
) -> PaddingProof:
    """Prove which sizes of a partitioned graph may be padded.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph, for captured and eager regions. A size that enters a region without one
            is UNPROVED.
        symbols: candidate symbol -> key field. The symbols of one field have the same size in every call.
        declared: position of an input of the partition -> the constant in its padding; None for other contents. Inputs
            that are not in it repeat real entries. See Note [Contents of padding].

    Returns:
        The verdict for each key field, and the size factors of each output leaf of the partition.
    """
    run = PartitionRun(parts, graphs, declared or {})
    targets = {p: f"written input '{graph_input.shown}'" for p, graph_input in enumerate(parts.inputs)}

    def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        sizes = Sizes(candidates)
        interpreted = run.interpretation(candidates)
        before = run.inputs(sizes)
        into = {p: value for p in interpreted.written if isinstance(value := before[p], PaddedValue)}
        return interpreted, findings_of_results(interpreted, sizes, into, targets)

    return decided(symbols, attempt)


@dataclass(frozen=True, slots=True)
class _Passed:
    """The abstract results of one region for some inputs, in the symbols of the whole graph.

    Attributes:
        outputs: one value for each output of the region.
        written: (position of an input, its value after the region).
        findings: findings for the whole graph, even if nothing uses the outputs.
        assumptions: the conditions on which these values depend.
        needs_real_contents: see :class:`Interpretation`.
    """

    outputs: tuple[Abstract, ...]
    written: tuple[tuple[int, PaddedValue], ...]
    findings: frozenset[PaddingFinding]
    assumptions: frozenset[str]
    needs_real_contents: bool


@dataclass(slots=True)
class PartitionRun:
    """Interprets a partition for several sets of padded sizes; caches the results of each region by its inputs.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph.
        declared: position of an input of the partition -> the constant in its padding; None for unknown contents.
        ordered: whether real entries come first, see :class:`Sizes`.
        trusted: operators whose results the caller guarantees, see :func:`interpret`.
    """

    parts: Partition
    graphs: Mapping[str, RegionGraph]
    declared: Mapping[int, float | int | bool | None]
    ordered: bool = True
    trusted: frozenset[str] = frozenset()
    _interpreted: dict[Any, Interpretation] = field(default_factory=dict)
    _passed: dict[Any, _Passed] = field(default_factory=dict)
    _storages: dict[str, frozenset[int]] = field(default_factory=dict)

    def interpretation(self, fields: Mapping[sympy.Symbol, str]) -> Interpretation:
        """The interpretation of the whole graph; its outputs are the output leaves of the partition.

        Args:
            fields: padded symbol -> key field.
        """
        return _Walk(self, fields).run()

    def inputs(self, sizes: Sizes) -> tuple[Abstract, ...]:
        """The abstract inputs of the partition before the first region runs."""
        shapes = tuple(_shape_of(graph_input.value) for graph_input in self.parts.inputs)
        names = tuple(graph_input.name for graph_input in self.parts.inputs)
        values = input_values(AtenGraph(shapes, names, (), (), ()), sizes, self.declared)
        return tuple(
            replace(value, sign=Sign.REAL_SIZE) if given.is_real_size and isinstance(value, PaddedValue) else value
            for given, value in zip(self.parts.inputs, values, strict=True)
        )

    def pass_through(self, region: Region, inputs: tuple[Abstract, ...], sizes: Sizes) -> _Passed | None:
        """The results of a region that has an aten graph; None if that graph lacks a symbol of ``inputs``."""
        graph = self.graphs[region.name]
        key = (id(graph.result), graph.symbols, inputs, frozenset(sizes.fields.items()))
        passed = self._passed.get(key)
        if passed is not None:
            return passed
        names = _Renaming(graph.symbols, sizes)
        renamed = tuple(names.inside(value) for value in inputs)
        if any(value is None for value, original in zip(renamed, inputs, strict=True) if original is not None):
            return None
        inner_key = (id(graph.result), renamed, tuple(names.fields.items()))
        run = self._interpreted.get(inner_key)
        if run is None:
            within = Sizes(names.fields, ordered=self.ordered)
            run = self._interpreted[inner_key] = interpret(graph.result, renamed, within, self.trusted)
        written = {position: names.outside(value) for position, value in run.written.items()}
        outputs = tuple(names.outside(value) for value in run.outputs)
        if None in written.values() or any(
            isinstance(one, PaddedValue) and other is None for one, other in zip(run.outputs, outputs, strict=True)
        ):
            return None
        tensors = {position: value for position, value in written.items() if isinstance(value, PaddedValue)}
        passed = _Passed(outputs, tuple(tensors.items()), run.findings, run.assumptions, run.needs_real_contents)
        self._passed[key] = passed
        return passed

    def names_in(self, storages: frozenset[int]) -> set[str]:
        """The names of the values whose storage is among ``storages``."""
        return {name for name, own in self._all_storages().items() if own & storages}

    def storages_of(self, names: Iterable[str]) -> frozenset[int]:
        """The storages of the values with these names."""
        known = self._all_storages()
        return frozenset[int]().union(*(known.get(name, frozenset()) for name in names))

    def _all_storages(self) -> dict[str, frozenset[int]]:
        if not self._storages:
            self._storages.update(
                (graph_input.name, storages_of(graph_input.value)) for graph_input in self.parts.inputs
            )
            for region in self.parts.regions:
                results: Any = region.graph_module.graph.output_node().args[0]
                pairs = zip(region.outputs, results, strict=True)
                self._storages.update((name, storages_of(value_of(node))) for name, node in pairs)
        return self._storages


class _Renaming:
    """Translates between the symbols of the whole graph (one for each key field) and those of one aten graph."""

    def __init__(self, symbols: Sequence[tuple[sympy.Expr, sympy.Symbol]], sizes: Sizes) -> None:
        self.fields: dict[sympy.Symbol, str] = {}
        self._inside: dict[sympy.Basic, sympy.Basic] = {}
        self._outside: dict[sympy.Basic, sympy.Basic] = {}
        for of_graph, own in symbols:
            shared: Any = sizes.renamed(own)
            self._inside.setdefault(shared, of_graph)
            self._inside.setdefault(own, self._inside[shared])  # number inputs have the region's own symbol
            if isinstance(of_graph, sympy.Symbol):
                self._outside[of_graph] = shared
                if own in sizes.fields:
                    self.fields[of_graph] = sizes.fields[own]
        # A symbol that tracing replaced by a number cannot be padded.
        self._fixed = any(own in sizes.fields and not isinstance(of_graph, sympy.Symbol) for of_graph, own in symbols)

    def inside(self, value: Abstract) -> Abstract:
        """``value`` in the symbols of the aten graph; None if the graph lacks one of them."""
        return None if self._fixed else _renamed(value, self._inside)

    def outside(self, value: Abstract) -> Abstract:
        """``value`` in the symbols of the whole graph; None if one of them has no name there."""
        return _renamed(value, self._outside)


def _renamed(value: Abstract, names: Mapping[sympy.Basic, sympy.Basic]) -> Abstract:
    if isinstance(value, PaddedValue):
        factors = tuple(tuple(_renamed_size(size, names) for size in of_dim) for of_dim in value.factors)
        if any(size is None for of_dim in factors for size in of_dim):
            return None
        return replace(value, factors=factors)
    return value if value is None else _renamed_size(value, names)


def _renamed_size(size: Size, names: Mapping[sympy.Basic, sympy.Basic]) -> Size | None:
    if isinstance(size, int):
        return size
    if not size.free_symbols <= names.keys():
        return None
    return as_size(size.xreplace(dict(names)))


class _Walk:
    """One walk over the regions of a partition, for one set of padded sizes."""

    def __init__(self, run: PartitionRun, fields: Mapping[sympy.Symbol, str]) -> None:
        self._run = run
        self._parts = run.parts
        self._sizes = Sizes(fields, ordered=run.ordered)
        self._values: dict[str, Abstract] = {}
        self._findings: set[PaddingFinding] = set()
        self._assumptions: set[str] = set()
        self._needs_real_contents = False

    def run(self) -> Interpretation:
        """Interpret the regions in order."""
        inputs = self._parts.inputs
        self._values = {
            graph_input.name: v for graph_input, v in zip(inputs, self._run.inputs(self._sizes), strict=True)
        }
        for region in self._parts.regions:
            self._region(region)
        outputs = tuple(self._values.get(name) for name, _ in self._parts.output_values())
        written = {position: self._values[inputs[position].name] for position in self._parts.mutated_inputs}
        tensors = {position: value for position, value in written.items() if isinstance(value, PaddedValue)}
        findings, assumptions = frozenset(self._findings), frozenset(self._assumptions)
        return Interpretation(outputs, tensors, findings, assumptions, self._needs_real_contents)

    def _region(self, region: Region) -> None:
        inputs = tuple(self._values.get(name) for name in region.inputs)
        graph = self._run.graphs.get(region.name)
        problem = "it was not traced" if graph is None else graph.problem
        passed = None
        if problem is None:
            passed = self._run.pass_through(region, inputs, self._sizes)
            problem = "its inputs have sizes that its aten graph lacks" if passed is None else None
        if passed is None:
            passed = self._opaque(region, inputs, problem or "")
        self._needs_real_contents |= passed.needs_real_contents
        self._findings |= passed.findings
        self._assumptions |= passed.assumptions
        for position, value in passed.written:
            self._values[region.inputs[position]] = value
        if region.mutated_inputs:
            self._follow_writes(region)
        self._values.update(zip(region.outputs, passed.outputs, strict=True))

    def _opaque(self, region: Region, inputs: Sequence[Abstract], problem: str) -> _Passed:
        """The results of a region without an aten graph: all of them depend on the padding of its inputs."""
        results: Any = region.graph_module.graph.output_node().args[0]
        fresh = [_fresh(value_of(node), self._sizes) for node in results]
        fields = {name for value in (*inputs, *fresh) for name in _fields_of(value, self._sizes)}
        findings = {f for value in inputs if isinstance(value, PaddedValue) for f in value.findings | value.by_position}
        findings |= {PaddingFinding(name, _ops_of(region), problem, _place_of(region)) for name in sorted(fields)}
        written = tuple(
            (position, _unknown(value, findings))
            for position in region.mutated_inputs
            if isinstance(value := inputs[position], PaddedValue)
        )
        outputs = tuple(v.with_findings(findings) if isinstance(v, PaddedValue) else v for v in fresh)
        effects = frozenset(finding.reaching(f"what region {region.name} does") for finding in findings)
        return _Passed(outputs, written, effects, frozenset(), needs_real_contents=True)

    def _follow_writes(self, region: Region) -> None:
        """Add findings to the values that share memory with an input that the region wrote to."""
        written = [self._values.get(region.inputs[position]) for position in region.mutated_inputs]
        findings = {f for v in written if isinstance(v, PaddedValue) for f in v.findings | v.by_position}
        storages = self._run.storages_of(region.inputs[position] for position in region.mutated_inputs)
        for name in self._run.names_in(storages) - set(region.inputs):
            value = self._values.get(name)
            if not isinstance(value, PaddedValue):
                continue
            fields = {field for one in (value, *written) for field in _fields_of(one, self._sizes)}
            why = "it writes to memory that other values share"
            findings |= {PaddingFinding(f, _ops_of(region), why, _place_of(region)) for f in sorted(fields)}
            self._values[name] = _unknown(value, findings)


def _unknown(value: PaddedValue, findings: Iterable[PaddingFinding]) -> PaddedValue:
    """``value`` after a write of unknown contents: same sizes, more findings, nothing known of padding."""
    return replace(value.with_findings(findings), padding=(), index=None, constant=None, sign=Sign.UNKNOWN)


def _shape_of(value: Any) -> TensorShape | Size | None:
    if isinstance(value, torch.Tensor):
        return TensorShape(tuple(as_size(symbolic.expression_of(size)) for size in value.shape), value.dtype)
    expression = symbolic.expression_of(value)
    return None if expression is None else as_size(expression)


def _fresh(value: Any, sizes: Sizes) -> Abstract:
    shape = _shape_of(value)
    if isinstance(shape, TensorShape):
        return PaddedValue(sizes.one_each(shape.sizes), dtype=shape.dtype)
    return shape if shape is None else sizes.renamed(shape)


def _fields_of(value: Abstract, sizes: Sizes) -> Iterator[str]:
    """The key fields that are padded in ``value``."""
    if not isinstance(value, PaddedValue):
        yield from sizes.fields_of(value)
        return
    for of_dim in value.factors:
        for size in of_dim:
            yield from sizes.fields_of(size)


def _ops_of(region: Region) -> str:
    """The names of the first ops of a region, as text."""
    calls = [node for node in region.graph_module.graph.nodes if node.op in ("call_function", "call_method")]
    names = list(dict.fromkeys(display_name(node) for node in calls))
    return ", ".join(names[:_NAMED_OPS]) + ("..." if len(names) > _NAMED_OPS else "") or f"region {region.name}"


def _place_of(region: Region) -> str:
    """The line of the user's code from the first node that has one."""
    places = (where_of(node.meta.get("stack_trace")) for node in region.graph_module.graph.nodes)
    return next(filter(None, places), "")
