"""Decides which sizes of a graph are padded with repairs, and whether it needs any."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from graphpass.compat import operators
from graphpass.ledger import PaddingFinding, Verdict
from graphpass.padding.interpreter import Interpretation, Walk
from graphpass.padding.making import Made, Making
from graphpass.padding.pointwise import ZERO_PADDING
from graphpass.padding.program import AtenGraph, references
from graphpass.padding.proof import InputsOf, decided, findings_of_results
from graphpass.padding.repairs import repairs_of
from graphpass.padding.sizes import Sizes
from graphpass.padding.values import TensorShape


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
        return not self._findings(graph, fields)

    def are_proved(self, graph: AtenGraph, count: int) -> bool:
        """Whether so many key fields can be padded together in the graph as it is, earlier ones first."""
        accepted, left = list[str](), list(self.fields.values())
        while left and len(accepted) + len(left) >= count:
            tried = [*accepted, left.pop(0)]
            accepted = accepted if self._findings(graph, tried) else tried
        return len(accepted) >= count

    def _findings(self, graph: AtenGraph, fields: Collection[str]) -> tuple[PaddingFinding, ...]:
        sizes = Sizes({symbol: field for symbol, field in self.fields.items() if field in fields})
        return self.answer(Walk(graph, sizes, frozenset()), sizes, graph)[1]


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
    # Of a node that the record does without, as the offsets of bags of equal lengths, the graph needs what it returned.
    read = {index for node in graph.nodes for index in references(node.arguments)} | set(references(graph.outputs))
    can_change = {
        at: node.target.name()
        for at, node in recorded.items()
        if isinstance(node.target, operators.OpOverload) and at + len(graph.inputs) in read  # guard: made_where_read
    }
    accepted: list[Making] = []

    def attempt(candidates: Mapping[sympy.Symbol, str]) -> tuple[Interpretation, tuple[PaddingFinding, ...]]:
        sizes = Sizes(candidates)
        run = Making(graph, sizes, can_change, repairs_of)
        result, findings = asked.answer(run, sizes, graph)
        if not findings:
            accepted[:] = [run]
        return result, findings

    proof = decided(asked.fields, attempt)
    fields = [field for field, verdict in proof.verdicts.items() if verdict is Verdict.PROVED]
    is_all = len(fields) == len(asked.fields)
    helps = is_all or not asked.are_proved(graph, len(fields))  # guard: made_where_it_helps
    return accepted[0].result(tuple(fields)) if fields and accepted[0].insertions and helps else None


_MOST_FILLED = 6
"""The most inputs for which fills are tried: each costs a walk."""


def fills(
    graph: AtenGraph,
    fields: Collection[str],
    asked: Callable[[Mapping[int, int | bool]], Asked],
    can_fill: Collection[int],
) -> Mapping[int, int | bool]:
    """What the padding of inputs gets so that a graph needs no repairs; nothing if no such fills are found.

    A fill costs nothing: the buffer of an input is filled anyway. Tried are the padded inputs, one by one and then
    together. Padding of floats repeats real entries, which may be infinite, and zero times infinity is NaN: beside such
    inputs repairs are better.

    Args:
        graph: the graph as it is.
        fields: the key fields that can be padded with repairs.
        asked: the question, with what the padding of some inputs holds.
        can_fill: positions of the inputs whose padding is not yet decided.
    """
    sizes = Sizes(asked({}).fields)
    free = {at: graph.inputs[at] for at in can_fill}
    padded = {at: s.dtype for at, s in free.items() if isinstance(s, TensorShape) and any(map(sizes.padded, s.sizes))}
    tried: dict[int, list[int | bool]] = {
        position: [False, True] if padded[position] is torch.bool else [0] for position in sorted(padded)
    }
    # guard: made_fills_beside_floats
    if len(tried) > _MOST_FILLED or any(dtype.is_floating_point for dtype in padded.values()):
        return {}
    alone = [{position: fill} for position, numbers in tried.items() for fill in numbers]
    together = [{position: numbers[0] for position, numbers in tried.items()}] if len(tried) > 1 else []
    for one in (*alone, *together):
        if asked(one).is_proved(graph, fields):
            return one
    return {}
