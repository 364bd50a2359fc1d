"""One callable for all traces of a function that give the same graph.

Dynamo's guards are finer than graphs are. It traces a function anew when an input is an inference tensor and was an
ordinary one before, or when a slice is as long as its buffer and was shorter before, and gets the same graph. A second
callable would have none of the keys that were captured for the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from cgpass.callable import GraphedCallable
from graphpass.compat import dynamo, sideeffects
from graphpass.compile import CompiledRegion
from graphpass.compile.structure import StructuralKey, structure_of
from graphpass.options import Settings
from graphpass.regions.execute import value_of
from graphpass.regions.symbols import graph_inputs

__all__ = ["Retraces", "TraceKey"]


@dataclass(frozen=True, slots=True)
class TraceKey:
    """What two traces have in common when one callable serves both.

    Attributes:
        frame: the Python frame that was traced.
        settings: the backend's options: another ``torch.compile`` of the same function may have other ones.
        ends_early: why the graph ends before the function does, or None.
        inputs: name, whether its address may be baked in, and marked dimensions of each input.
        side_effects: what Dynamo's code does to Python state after the graph has run.
        structure: of the whole graph, with every ambient setting that a compiler reads.
    """

    frame: int | None
    settings: Settings
    ends_early: str | None
    inputs: tuple[tuple[str | None, bool, frozenset[int]], ...]
    side_effects: tuple[sideeffects.SideEffect, ...]
    structure: StructuralKey

    @classmethod
    def of(
        cls,
        graph_module: fx.GraphModule,
        settings: Settings,
        ends_early: str | None,
        side_effects: tuple[sideeffects.SideEffect, ...],
    ) -> TraceKey | None:
        """The key of the graph that Dynamo has just traced, with all its inputs and its numbers in place.

        None for a graph that something else has traced: its values are not known yet, and nothing traces it again.
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
            inputs=tuple((given.source_name, given.is_static, given.marked_dims) for given in inputs),
            side_effects=side_effects,
            structure=structure_of(graph_module, settings.compiler).key,
        )

    def __hash__(self) -> int:
        return hash((self.frame, self.structure))  # options hold dicts


class Retraces:
    """The callables of one runtime, by what they were traced from; each for as long as Dynamo holds it."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[TraceKey, GraphedCallable] = weakref.WeakValueDictionary()

    def serving(self, key: TraceKey | None, compiled: Mapping[str, CompiledRegion]) -> GraphedCallable | None:
        """The callable that an earlier trace of the same graph made; None where there is none.

        Args:
            key: of the new trace, None for one that is not repeated.
            compiled: the regions of the new trace: what their artifacts assume is guarded in it, too.
        """
        known = None if key is None else self._known.get(key)
        return known if known is not None and known.runs(compiled) else None

    def add(self, key: TraceKey | None, made: GraphedCallable) -> None:
        """Let ``made`` serve later traces of its graph."""
        if key is not None:
            self._known[key] = made
