"""The proof of a whole graph from the aten graphs of its regions.

The walk follows the stitched code: region by region, abstract values by the names under which regions pass them on.
Regions of one structure share an aten graph, so 240 equal layers are interpreted once and looked up 239 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import sympy
import torch

from graphpass.compat import symbolic
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.opnames import display_name
from graphpass.regions.padding.interpreter import Interpretation, input_values, interpret
from graphpass.regions.padding.nodes import TensorShape
from graphpass.regions.padding.program import AtenGraph, where_of
from graphpass.regions.padding.proof import PaddingProof, decided, findings_of_results
from graphpass.regions.padding.sizes import Sizes, as_size
from graphpass.regions.padding.values import PaddedValue, PaddingFinding, Size
from graphpass.regions.regions import Region
from graphpass.regions.split import Partition

__all__ = ["PartitionRun", "RegionGraph", "prove_partition"]

Abstract: TypeAlias = PaddedValue | Size | None

_NAMED_OPS = 3


class RegionGraph(Protocol):
    """The aten graph of a region.

    Attributes:
        result: the :class:`AtenGraph`, shared by regions of one structure; None where there is none.
        problem: why there is none.
        symbols: (symbol of the aten graph, the region's own symbol).
    """

    @property
    def result(self) -> Any:
        """The graph."""

    @property
    def problem(self) -> str | None:
        """Why there is none."""

    @property
    def symbols(self) -> tuple[tuple[sympy.Expr, sympy.Symbol], ...]:
        """The pairs."""


def prove_partition(
    parts: Partition,
    graphs: Mapping[str, RegionGraph],
    symbols: Mapping[sympy.Symbol, str],
    declared: Mapping[int, float | int | bool | None] | None = None,
) -> PaddingProof:
    """Prove which sizes of a partitioned graph may be padded.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph, for captured and eager regions alike; what enters a region without one
            may not be padded.
        symbols: candidate symbol -> key field. The symbols of one field have one size in every call.
        declared: position of an input of the partition -> the constant that its padding holds, None for other
            contents than repeated real entries; all padding is finite.

    Returns:
        The verdict for each key field, and the size factors of each output leaf of the partition.
    """
    run = PartitionRun(parts, graphs, declared or {})
    targets = {p: f"written input '{given.source_name or given.name}'" for p, given in enumerate(parts.inputs)}

    def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        sizes = Sizes(candidates)
        made = run.interpretation(candidates)
        before = run.inputs(sizes)
        into = {p: value for p in made.written if isinstance(value := before[p], PaddedValue)}
        return made, findings_of_results(made, sizes, into, targets)

    return decided(symbols, attempt)


@dataclass(frozen=True, slots=True)
class _Passed:
    """What one region makes of its inputs, in the symbols of the whole graph.

    Attributes:
        outputs: in the order of the region's outputs.
        written: position of an input -> what it holds afterwards.
        findings: whatever becomes of the outputs.
        assumptions: what all of it rests on.
    """

    outputs: tuple[Abstract, ...]
    written: tuple[tuple[int, PaddedValue], ...]
    findings: frozenset[PaddingFinding]
    assumptions: frozenset[str]


@dataclass(slots=True)
class PartitionRun:
    """Interprets a partition, any number of times; remembers what regions make of what.

    Args:
        parts: the partition.
        graphs: region name -> its aten graph.
        declared: position of an input of the partition -> the constant that its padding holds, None for unknown ones.
        ordered: whether real entries come first, see :class:`Sizes`.
        trusted: operators that the caller vouches for, see :func:`interpret`.
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
        """What the whole graph does with padding, its outputs as flat leaves.

        Args:
            fields: padded symbol -> key field.
        """
        return _Walk(self, fields).run()

    def inputs(self, sizes: Sizes) -> tuple[Abstract, ...]:
        """The inputs of the partition before anything runs."""
        given = self.parts.inputs
        shapes = tuple(_shape_of(one.value) for one in given)
        return input_values(AtenGraph(shapes, tuple(one.name for one in given), (), (), ()), sizes, self.declared)

    def pass_through(self, region: Region, inputs: tuple[Abstract, ...], sizes: Sizes) -> _Passed | None:
        """What a region with an aten graph makes of ``inputs``; None if a size among them is unknown to the graph."""
        graph = self.graphs[region.name]
        key = (id(graph.result), graph.symbols, inputs, frozenset(sizes.fields.items()))
        found = self._passed.get(key)
        if found is not None:
            return found
        names = _Renaming(graph.symbols, sizes)
        renamed = tuple(names.inside(value) for value in inputs)
        if any(value is None for value, given in zip(renamed, inputs, strict=True) if given is not None):
            return None
        inner_key = (id(graph.result), renamed, tuple(names.fields.items()))
        made = self._interpreted.get(inner_key)
        if made is None:
            within = Sizes(names.fields, ordered=self.ordered)
            made = self._interpreted[inner_key] = interpret(graph.result, renamed, within, self.trusted)
        written = {position: names.outside(value) for position, value in made.written.items()}
        outputs = tuple(names.outside(value) for value in made.outputs)
        if None in written.values() or any(
            isinstance(one, PaddedValue) and other is None for one, other in zip(made.outputs, outputs, strict=True)
        ):
            return None
        found = _Passed(outputs, tuple(written.items()), made.findings, made.assumptions)  # type: ignore[arg-type]
        self._passed[key] = found
        return found

    def names_in(self, storages: frozenset[int]) -> set[str]:
        """The values that lie in one of these storages."""
        return {name for name, own in self._all_storages().items() if own & storages}

    def storages_of(self, names: Iterable[str]) -> frozenset[int]:
        """The storages that the values of these names lie in."""
        known = self._all_storages()
        return frozenset[int]().union(*(known.get(name, frozenset()) for name in names))

    def _all_storages(self) -> dict[str, frozenset[int]]:
        if not self._storages:
            self._storages.update((given.name, storages_of(given.value)) for given in self.parts.inputs)
            for region in self.parts.regions:
                results: Any = region.graph_module.graph.output_node().args[0]
                pairs = zip(region.outputs, results, strict=True)
                self._storages.update((name, storages_of(value_of(node))) for name, node in pairs)
        return self._storages


class _Renaming:
    """Between the symbols of the whole graph, one for each key field, and those of one aten graph."""

    def __init__(self, symbols: Sequence[tuple[sympy.Expr, sympy.Symbol]], sizes: Sizes) -> None:
        self.fields: dict[sympy.Symbol, str] = {}
        self._inside: dict[sympy.Basic, sympy.Basic] = {}
        self._outside: dict[sympy.Basic, sympy.Basic] = {}
        for of_graph, own in symbols:
            shared: Any = sizes.renamed(own)
            self._inside.setdefault(shared, of_graph)
            self._inside.setdefault(own, self._inside[shared])  # numbers come under their own symbol
            if isinstance(of_graph, sympy.Symbol):
                self._outside[of_graph] = shared
                if own in sizes.fields:
                    self.fields[of_graph] = sizes.fields[own]
        # A size that the aten graph has fixed cannot be padded in it.
        self._fixed = any(own in sizes.fields and not isinstance(of_graph, sympy.Symbol) for of_graph, own in symbols)

    def inside(self, value: Abstract) -> Abstract:
        """``value`` in the symbols of the aten graph; None where that has no name for one."""
        return None if self._fixed else _renamed(value, self._inside)

    def outside(self, value: Abstract) -> Abstract:
        """``value`` in the symbols of the whole graph; None where that has no name for one."""
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
    """One walk along the stitched code, with one set of padded sizes."""

    def __init__(self, run: PartitionRun, fields: Mapping[sympy.Symbol, str]) -> None:
        self._run = run
        self._parts = run.parts
        self._sizes = Sizes(fields, ordered=run.ordered)
        self._values: dict[str, Abstract] = {}
        self._findings: set[PaddingFinding] = set()
        self._assumptions: set[str] = set()

    def run(self) -> Interpretation:
        """Interpret every region in order."""
        inputs = self._parts.inputs
        self._values = {given.name: v for given, v in zip(inputs, self._run.inputs(self._sizes), strict=True)}
        for region in self._parts.regions:
            self._region(region)
        outputs = tuple(self._values.get(name) for name, _ in self._parts.output_values())
        written = {position: self._values[inputs[position].name] for position in self._parts.mutated_inputs}
        kept = {position: value for position, value in written.items() if isinstance(value, PaddedValue)}
        return Interpretation(outputs, kept, frozenset(self._findings), frozenset(self._assumptions))

    def _region(self, region: Region) -> None:
        inputs = tuple(self._values.get(name) for name in region.inputs)
        graph = self._run.graphs.get(region.name)
        problem = "nobody traced it" if graph is None else graph.problem
        passed = None
        if problem is None:
            passed = self._run.pass_through(region, inputs, self._sizes)
            problem = "it has sizes that its aten graph does not know" if passed is None else None
        if passed is None:
            passed = self._opaque(region, inputs, problem or "")
        self._findings |= passed.findings
        self._assumptions |= passed.assumptions
        for position, value in passed.written:
            self._values[region.inputs[position]] = value
        if region.mutated_inputs:
            self._follow_writes(region)
        self._values.update(zip(region.outputs, passed.outputs, strict=True))

    def _opaque(self, region: Region, inputs: Sequence[Abstract], problem: str) -> _Passed:
        """What comes out of a region that nothing is known of: all of it depends on whatever padding enters."""
        results: Any = region.graph_module.graph.output_node().args[0]
        fresh = [_fresh(value_of(node), self._sizes) for node in results]
        fields = {name for value in (*inputs, *fresh) for name in _fields_of(value, self._sizes)}
        findings = {f for value in inputs if isinstance(value, PaddedValue) for f in value.findings}
        findings |= {PaddingFinding(name, _ops_of(region), problem, _place_of(region)) for name in sorted(fields)}
        written = tuple(
            (position, _unknown(value, findings))
            for position in region.mutated_inputs
            if isinstance(value := inputs[position], PaddedValue)
        )
        outputs = tuple(v.with_findings(findings) if isinstance(v, PaddedValue) else v for v in fresh)
        effects = frozenset(finding.reaching(f"what region {region.name} does") for finding in findings)
        return _Passed(outputs, written, effects, frozenset())

    def _follow_writes(self, region: Region) -> None:
        """Values that share memory with what a region wrote: as right as what was written, where nothing is padded."""
        written = [self._values.get(region.inputs[position]) for position in region.mutated_inputs]
        findings = {f for value in written if isinstance(value, PaddedValue) for f in value.findings}
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
    """A value of the same sizes that something has written to."""
    return replace(value.with_findings(findings), padding=(), index=None, constant=None)


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
    """The key fields whose padding a value has."""
    if not isinstance(value, PaddedValue):
        yield from sizes.fields_of(value)
        return
    for of_dim in value.factors:
        for size in of_dim:
            yield from sizes.fields_of(size)


def _ops_of(region: Region) -> str:
    """The first ops of a region, as text."""
    calls = [node for node in region.graph_module.graph.nodes if node.op in ("call_function", "call_method")]
    names = list(dict.fromkeys(display_name(node) for node in calls))
    return ", ".join(names[:_NAMED_OPS]) + ("..." if len(names) > _NAMED_OPS else "") or f"region {region.name}"


def _place_of(region: Region) -> str:
    """The user's line of the first node that has one."""
    places = (where_of(node.meta.get("stack_trace")) for node in region.graph_module.graph.nodes)
    return next(filter(None, places), "")
