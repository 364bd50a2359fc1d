"""One callable for all traces of a function that produce the same graph.

Dynamo's guards distinguish more calls than graphs do. For example, Dynamo traces a function again if an input becomes
an inference tensor, or if a slice becomes as long as its buffer, and produces the same graph. A second callable would
have none of the keys that were captured for the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from cgpass.callable import GraphedCallable
from graphpass.compat import dynamo
from graphpass.compile import CompiledRegion
from graphpass.compile.structure import StructuralKey, structure_of
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.regions.execute import value_of
from graphpass.regions.symbols import graph_inputs

__all__ = ["Retraces", "TraceKey"]


@dataclass(frozen=True, slots=True)
class TraceKey:
    """Identity of a trace: one callable can serve all traces with equal keys.

    Attributes:
        frame: the Python frame that was traced.
        settings: the backend's options, which another ``torch.compile`` of the same function may set differently.
        ends_early: why the graph ends before the function does, or None.
        inputs: (name, whether the address is static, marked dimensions) of each input.
        side_effects: changes of Python state that Dynamo's code makes after the graph has run.
        structure: structural key of the whole graph, including all ambient settings that a compiler reads.
    """

    frame: int | None
    settings: Settings
    ends_early: Reason | None
    inputs: tuple[tuple[str | None, bool, frozenset[int]], ...]
    side_effects: tuple[dynamo.SideEffect, ...]
    structure: StructuralKey

    @classmethod
    def of(
        cls,
        graph_module: fx.GraphModule,
        settings: Settings,
        ends_early: Reason | None,
        side_effects: tuple[dynamo.SideEffect, ...],
    ) -> TraceKey | None:
        """The key of the graph that Dynamo has just traced, before unused inputs are erased.

        None for a graph from another tracer: its nodes have no example values, and it is not traced again.
        """
        graph = graph_module.graph
        if any(
            value_of(node) is None
            for node in (*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes)
        ):
            return None
        inputs = graph_inputs(graph)
        return cls(
            frame=dynamo.frame_id(),
            settings=settings,
            ends_early=ends_early,
            inputs=tuple(
                (graph_input.source_name, graph_input.is_static, graph_input.marked_dims) for graph_input in inputs
            ),
            side_effects=side_effects,
            structure=structure_of(graph_module, settings.compiler).key,
        )

    def __hash__(self) -> int:
        return hash((self.frame, self.structure))  # options hold dicts


class Retraces:
    """The callables of one runtime by :class:`TraceKey`. References are weak: Dynamo owns the callables."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[TraceKey, GraphedCallable] = weakref.WeakValueDictionary()

    def serving(self, key: TraceKey | None, compiled: Mapping[str, CompiledRegion]) -> GraphedCallable | None:
        """The callable of an earlier trace of the same graph; None if there is none.

        Args:
            key: of the new trace; None for a trace that is never repeated.
            compiled: the compiled regions of the new trace. The callable must use the same ones, because the new trace
                has guards for their assumptions only.
        """
        known = None if key is None else self._known.get(key)
        return known if known is not None and known.runs(compiled) else None

    def knows(self, key: TraceKey | None) -> bool:
        """Whether an earlier trace gave the same graph."""
        return key is not None and key in self._known

    def add(self, key: TraceKey | None, graphed: GraphedCallable) -> None:
        """Let ``graphed`` serve later traces of its graph."""
        if key is not None:
            self._known[key] = graphed
