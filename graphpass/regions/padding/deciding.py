"""Decides which sizes of a graph are padded with repairs, and whether it needs any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from graphpass.compat import operators
from graphpass.ledger import PaddingFinding, Verdict
from graphpass.regions.padding.interpreter import Interpretation, Walk
from graphpass.regions.padding.making import Made, Making
from graphpass.regions.padding.program import AtenGraph
from graphpass.regions.padding.proof import InputsOf, PaddingProof, decided, findings_of_results
from graphpass.regions.padding.repairs import REPAIRS, ZERO_PADDING
from graphpass.regions.padding.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of one graph."""

    fields: Mapping[sympy.Symbol, str]  #: candidate symbol -> key field, each symbol with a field of its own
    inputs: InputsOf  #: the abstract inputs for a set of padded sizes
    is_whole: bool  #: whether the graph's results are those of the callable, which cuts them by prefix

    def answer(self, run: Walk, sizes: Sizes, graph: AtenGraph) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        """A run for some padded sizes, and the findings of its results."""
        inputs, targets = self.inputs(sizes), dict(enumerate(graph.input_names))
        result = run.run(inputs)
        return result, findings_of_results(result, sizes, inputs, targets, are_cut=self.is_whole)

    def is_proved(self, graph: AtenGraph, fields: Collection[str]) -> bool:
        """Whether these key fields can be padded together in the graph as it is, and nothing else is asked for."""
        if any(node.op.startswith(ZERO_PADDING) for node in graph.nodes):
            return False
        sizes = Sizes({symbol: field for symbol, field in self.fields.items() if field in fields})
        return not self.answer(Walk(graph, sizes, frozenset()), sizes, graph)[1]

    def num_proved(self, graph: AtenGraph) -> int:
        """How many key fields can be padded together in the graph as it is."""

        def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
            sizes = Sizes(candidates)
            return self.answer(Walk(graph, sizes, frozenset()), sizes, graph)

        return _num_proved(decided(self.fields, attempt))


def _num_proved(proof: PaddingProof) -> int:
    return sum(verdict is Verdict.PROVED for verdict in proof.verdicts.values())


def _is_recorded_whole(node: fx.Node, op: str) -> bool:
    """Whether the record of a node is of its own operator, so that its operands are the node's."""
    return isinstance(node.target, operators.OpOverload) and node.target.name() == op


def made(graph: AtenGraph, asked: Asked, recorded: Mapping[int, fx.Node]) -> Made | None:
    """The graph with repairs, for as many of the key fields as can be padded together; None if repairs let no more be.

    A graph that is proved as it is should not be asked about.

    Args:
        graph: the graph as the compiler decomposed it.
        asked: which sizes may be padded, and what its inputs hold.
        recorded: {position of a node in the record: the graph's node}.
    """
    if len(set(asked.fields.values())) != len(asked.fields):  # guard: made_sizes_are_apart
        return None
    can_change = [at for at, node in recorded.items() if _is_recorded_whole(node, graph.nodes[at].op)]
    last: list[Making] = []

    def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        sizes = Sizes(candidates)
        last[:] = [Making(graph, sizes, can_change, REPAIRS)]
        return asked.answer(last[0], sizes, graph)

    proof = decided(asked.fields, attempt)
    fields = [field for field, verdict in proof.verdicts.items() if verdict is Verdict.PROVED]
    is_all = len(fields) == len(asked.fields)
    helps = is_all or len(fields) > asked.num_proved(graph)  # guard: made_where_it_helps
    return last[0].result() if last[0].insertions and helps else None
