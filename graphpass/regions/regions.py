"""Regions: one graph module for each group of nodes, with flat inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy
from torch import fx

from graphpass.regions.analysis import (
    FACTS,
    RECOMPUTED,
    Analysis,
    free_symbols,
    is_recomputed,
    symbol_placeholders,
)
from graphpass.regions.assign import NodeGroup
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.opnames import CALLED
from graphpass.regions.passes import is_rebuilt_output
from graphpass.regions.splitrules import SplitReason

__all__ = ["Region", "build_regions", "written_positions"]


@dataclass(frozen=True, slots=True)
class Region:
    """A run of nodes, in program order, that is captured or stays eager.

    Attributes:
        name: ``r0``, ``r1``, ... in program order, over both kinds.
        kind: ``captured`` or ``eager``.
        graph_module: placeholders in the order of ``inputs``; returns a flat tuple in the order of ``outputs``.
            Parameters, buffers and subgraphs are shared with the graph module that was partitioned.
        reasons: why the region is eager; empty if it is captured.
        inputs: names of the input values, the symbolic sizes of its tensors first.
        outputs: names of the values that later regions or the caller use.
        mutated_inputs: positions in ``inputs`` of tensors whose storage the region writes to, also through views.
    """

    name: str
    kind: Literal["captured", "eager"]
    graph_module: fx.GraphModule
    reasons: tuple[SplitReason, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutated_inputs: tuple[int, ...]

    @property
    def why(self) -> str | None:
        """The reasons as one line, for dumps and reports; None for captured regions."""
        return "; ".join(dict.fromkeys(map(str, self.reasons))) if self.kind == "eager" else None


def build_regions(gm: fx.GraphModule, groups: Sequence[NodeGroup], analysis: Analysis) -> tuple[Region, ...]:
    """One region for each group, in order, in time linear in the graph."""
    sizes = _Sizes(symbol_placeholders(gm.graph))
    return tuple(_region(f"r{i}", gm, group, analysis, sizes) for i, group in enumerate(groups))


class _Sizes:
    """The graph's symbolic sizes, in the order of its placeholders."""

    def __init__(self, placeholders: Mapping[sympy.Symbol, fx.Node]) -> None:
        self._placeholders = placeholders
        self._positions = {node: position for position, node in enumerate(placeholders.values())}

    def among(self, symbols: Iterable[sympy.Symbol], values: Iterable[fx.Node]) -> list[fx.Node]:
        """The placeholders of ``symbols`` and the sizes among ``values``, in the order of the graph's placeholders."""
        nodes = {self._placeholders[symbol] for symbol in symbols if symbol in self._placeholders}
        nodes.update(value for value in values if value in self._positions)
        return sorted(nodes, key=self._positions.__getitem__)


def _region(
    name: str,
    gm: fx.GraphModule,
    group: NodeGroup,
    analysis: Analysis,
    sizes: _Sizes,
) -> Region:
    inside = set(group.nodes)
    made_here = _with_recomputed(group.nodes, inside)
    inputs = _inputs(made_here, set(made_here), sizes)
    outputs = [node for node in group.nodes if any(_takes_over(user, inside, node) for user in node.users)]
    written = frozenset[int]().union(*(analysis.writes.get(node, frozenset()) for node in group.nodes))
    return Region(
        name=name,
        kind=group.kind,
        graph_module=_graph_module(name, gm, made_here, inputs, outputs),
        reasons=group.reasons if group.kind == "eager" else (),
        inputs=tuple(node.name for node in inputs),
        outputs=tuple(node.name for node in outputs),
        mutated_inputs=written_positions(inputs, written),
    )


def _takes_over(user: fx.Node, inside: set[fx.Node], node: fx.Node) -> bool:
    """Whether ``user`` needs ``node`` as an output of the region. Other regions compute recomputed numbers again."""
    return user.op == "output" or is_rebuilt_output(user) or (user not in inside and not is_recomputed(node))


def _with_recomputed(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """The nodes in order, each after the attributes and the recomputed numbers that it uses."""
    placed: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if (
                argument not in placed
                and argument not in inside
                and (argument.op == "get_attr" or is_recomputed(argument))
            ):
                place(argument)
        placed[node] = None

    for node in nodes:
        place(node)
    return list(placed)


def written_positions(inputs: Iterable[fx.Node], written: frozenset[int]) -> tuple[int, ...]:
    """Positions of the inputs whose storage is among ``written``."""
    return tuple(i for i, node in enumerate(inputs) if storages_of(value_of(node)) & written)


def _inputs(nodes: Sequence[fx.Node], inside: set[fx.Node], sizes: _Sizes) -> list[fx.Node]:
    """The region's inputs: the symbolic sizes of its tensors, then the other values in order of first use."""
    outer = dict.fromkeys(argument for node in nodes for argument in node.all_input_nodes if argument not in inside)
    used = free_symbols([value_of(node) for node in (*outer, *nodes)])
    return list(dict.fromkeys((*sizes.among(used, outer), *outer)))


def _graph_module(
    name: str, gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = _own_meta(node)
    for node in nodes:
        copies[node] = _copied(graph, node, copies)
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(gm, graph, class_name=name)


def _copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda argument: copies[argument])
    copy.meta = _own_meta(node)
    return copy


def _own_meta(node: fx.Node) -> dict[str, object]:
    return {key: value for key, value in node.meta.items() if key not in (FACTS, RECOMPUTED, CALLED)}
