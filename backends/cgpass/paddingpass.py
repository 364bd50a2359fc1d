"""What reads the aten graph of each captured region, and makes its padding neutral before it is compiled.

The one region of a graph knows what its inputs hold. Of several, each takes what others made for anything, so equal
layers share a decision and an artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from cgpass.keyrules import declared_constants
from cgpass.namedsizes import GraphSizes
from graphpass.compat import dynamo, symbolic
from graphpass.options import Settings
from graphpass.padding import Asked, AtenGraph, PaddedValue, Sizes, fills, input_values, made, write
from graphpass.padding.values import Approximate
from graphpass.regions.assign import Region
from graphpass.regions.split import Partition
from graphpass.regions.symbols import REAL_SIZES


def padding_passes(
    parts: Partition, sizes: GraphSizes, settings: Settings, entries: Mapping[sympy.Symbol, int]
) -> Callable[[Region], RegionPadding]:
    """The passes over the regions of a graph; ``entries`` are those of the appended real sizes, by symbol."""
    fields = {size.symbol: size.name for size in sizes.sizes if size.is_of_calls and size.symbol in entries}
    constants = declared_constants(parts, sizes, settings)
    declared = {parts.inputs[position].name: constant for position, constant in constants.items()}
    free = {given.name for given in parts.inputs if not given.is_static and given.shown not in settings.padding}
    entries = {} if parts.never_padded() is not None else entries
    return partial(RegionPadding, parts, fields, declared, entries, free, settings.compiler)


class RegionPadding:
    """The pass over one region: see :class:`graphpass.compile.compilers.RegionPass`.

    Args:
        parts: the graph.
        fields: {candidate symbol: key field}.
        declared: {input: what the user says that its padding holds}.
        entries: {symbol: its entry in the real sizes}; empty if no padding is made.
        free: the inputs whose padding nobody has decided.
        compiler: its name.
        region: the region.
    """

    def __init__(
        self,
        parts: Partition,
        fields: Mapping[sympy.Symbol, str],
        declared: Mapping[str, float | int | bool | None],
        entries: Mapping[sympy.Symbol, int],
        free: Collection[str],
        compiler: str,
        region: Region,
    ) -> None:
        placeholders = list(region.graph_module.graph.find_nodes(op="placeholder"))
        self._inputs = list(map(symbolic.example_value, placeholders))
        self._real_sizes = [position for position, node in enumerate(placeholders) if REAL_SIZES in node.meta]
        # What a region writes to may overlap another input, if a caller passes it: then no artifact runs.
        given = {graph_input.name for graph_input in parts.inputs}
        written = {region.inputs[position] for position in region.mutated_inputs}
        can_make = bool(self._real_sizes) and given.isdisjoint(written)  # guard: made_without_writes
        self._fields, self._entries = fields, entries if can_make else {}
        self._is_only = len(parts.regions) == 1
        named = list(enumerate(region.inputs)) if self._is_only else []
        #: what the padding of inputs holds, by position; those of which nobody has decided it
        self._declared = {position: declared[name] for position, name in named if name in declared}
        self._free = frozenset(position for position, name in named if name in free)
        self._compiler = compiler
        self.changed: fx.GraphModule | None = None
        self.decisions: tuple[tuple[str, str, str], ...] = ()
        self.key = self._key()

    def _key(self) -> tuple[Any, ...]:
        if not self._entries:
            return ()
        symbols = list(dict.fromkeys(s for value in self._inputs for s in _symbols_of(value)))
        candidates = tuple((self._entries.get(symbol), symbol in self._fields) for symbol in symbols)
        return candidates, tuple(sorted(self._declared.items())), self._is_only, tuple(sorted(self._free))

    def __call__(self, aten: fx.GraphModule) -> AtenGraph:
        """The record of the graph, whose padding is made where that lets more of its sizes be padded."""
        with symbolic.without_modes():
            return self._read(aten)

    def _read(self, aten: fx.GraphModule) -> AtenGraph:
        graph = AtenGraph.of(aten)
        placeholders = aten.graph.find_nodes(op="placeholder")
        inside = _names_inside(self._inputs, [node.meta.get("val") for node in placeholders])
        fields = {inside[symbol]: field for symbol, field in self._fields.items() if symbol in inside}
        if not self._entries or not fields:
            return graph
        entries = {inside[symbol]: entry for symbol, entry in self._entries.items() if symbol in inside}
        asked = Asked(fields, self._inputs_of(graph, {}), self._is_only)
        if asked.is_proved(graph, fields.values()):
            return graph
        decomposed, recorded = AtenGraph.as_decomposed(aten, dynamo.decompositions(self._compiler))
        found = made(decomposed, asked, recorded)
        if found is None:
            return graph
        filled = fills(graph, found.fields, lambda more: Asked(fields, self._inputs_of(graph, more), True), self._free)
        if filled:  # guard: made_fills
            return replace(graph, fills=tuple(filled.items()))
        copy, copies = _copied(aten.graph)
        self.changed = fx.GraphModule(aten, copy)
        vector = list(copy.find_nodes(op="placeholder"))[self._real_sizes[0]]
        write(self.changed, decomposed, {at: copies[node] for at, node in recorded.items()}, found, (vector, entries))
        aten.graph, _ = _copied(self.changed.graph)
        self.decisions = tuple((one.op, one.where, one.what) for one in found.graph.insertions)
        return found.graph

    def _inputs_of(self, graph: AtenGraph, more: Mapping[int, float | int | bool]) -> Callable[[Sizes], Sequence[Any]]:
        def inputs(sizes: Sizes) -> list[Any]:
            values = input_values(graph.inputs, sizes, {**self._declared, **more})
            if self._is_only:
                return list(values)
            return [_anything(value, sizes) if isinstance(value, PaddedValue) else value for value in values]

        return inputs


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copies))
    return copy, copies


def _anything(value: PaddedValue, sizes: Sizes) -> PaddedValue:
    """A value of which nothing is known in padding."""
    places = sizes.places(value)
    fields = frozenset(field for dim, at in places for field in sizes.fields_of(value.factors[dim][at]))
    unknown = dict.fromkeys(places, Approximate.NOT_FINITE)
    return replace(value, new_fields=fields).with_pads(unknown)


def _symbols_of(value: Any) -> list[sympy.Symbol]:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    found = [symbolic.expression_of(size) for size in sizes]
    return [s for size in found if isinstance(size, sympy.Basic) for s in sorted(size.free_symbols, key=str)]


def _names_inside(region: Sequence[Any], aten: Sequence[Any]) -> dict[Any, sympy.Symbol]:
    """Symbol of the region -> symbol of its aten graph, which has the same inputs."""
    names: dict[Any, sympy.Symbol] = {}
    for ours, theirs in zip(region, aten, strict=True):
        sizes = zip(ours.shape, theirs.shape, strict=True) if isinstance(ours, torch.Tensor) else [(ours, theirs)]
        for one, other in sizes:
            outside, inside = symbolic.expression_of(one), symbolic.expression_of(other)
            if isinstance(outside, sympy.Symbol) and isinstance(inside, sympy.Symbol):
                names.setdefault(outside, inside)
    return names
