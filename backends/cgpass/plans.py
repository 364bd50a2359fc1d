"""The replay plans of one callable: created once all its regions have replayed, looked up by key and static inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphpass.capture.capturepermit import MAX_STATIC_SETS
from graphpass.capture.entry import GraphEntry
from graphpass.capture.replayplan import PlannedReplay, ReplayPlan
from graphpass.capture.runtime import GraphRuntime
from graphpass.keys import BatchDescriptor
from graphpass.regions.regions import Region
from graphpass.regions.split import Partition
from graphpass.regions.splitrules import reshapes_in_place

__all__ = ["ReplayPlans"]


class ReplayPlans:
    """Creates and owns the plans of one callable: up to ``MAX_STATIC_SETS`` for each key.

    Args:
        name: the callable.
        partition: regions and stitched code.
        callees: region name -> the callable that the stitched code uses without a plan.
        runtime: owner of the graphs.
        static: positions of the callable's static arguments.
    """

    def __init__(
        self,
        name: str,
        partition: Partition,
        callees: Mapping[str, Callable[..., Any]],
        runtime: GraphRuntime,
        static: Sequence[int],
    ) -> None:
        self._name = name
        self._partition = partition
        self._callees = callees
        self._runtime = runtime
        self._static = static
        self._plans: dict[BatchDescriptor, list[ReplayPlan]] = {}
        self._reuses_outputs = not any(
            reshapes_in_place(node)
            for region in partition.regions
            if region.kind == "eager"
            for node in region.graph_module.graph.nodes
        )

    def serving(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> ReplayPlan | None:
        """The plan of a key that is valid for these arguments; None if there is none."""
        generation = self._runtime.lease.generation
        return next((plan for plan in self._plans.get(descriptor, ()) if plan.serves(args, generation)), None)

    def add(
        self, descriptor: BatchDescriptor, args: Sequence[Any], replayed: Sequence[GraphEntry]
    ) -> ReplayPlan | None:
        """Create the plan for calls like the one that has just run; None if one of its regions had no graph.

        Args:
            descriptor: the key's padded shape.
            args: the call's flat arguments.
            replayed: the entries that replayed in the call.
        """
        entries = {entry.region.region: entry for entry in replayed if entry.region.callable == self._name}
        captured = [region for region in self._partition.regions if region.kind == "captured"]
        if any(region.name not in entries for region in captured):
            return None
        eager = {r.name: r.graph_module.forward for r in self._partition.regions if r.kind == "eager"}
        plan = ReplayPlan.of(
            self._name,
            descriptor,
            [(r.name, "replay" if r.kind == "captured" else "eager") for r in self._partition.regions],
            lambda callees: self._partition.bind({**self._callees, **eager, **callees}),
            self._planned(captured, entries),
            args=args,
            static=self._static,
            generation=self._runtime.lease.generation,
            reuses_outputs=self._reuses_outputs,
        )
        alive = [p for p in self._plans.get(descriptor, []) if p.generation == plan.generation]
        self._plans[descriptor] = [*alive[1 - MAX_STATIC_SETS :], plan]
        return plan

    def of_whole(self, descriptor: BatchDescriptor, args: Sequence[Any], entry: GraphEntry) -> ReplayPlan:
        """A plan with the replay of one FULL graph, for a caller that always passes ``args``; it is not stored here."""
        written = set(self._partition.mutated_inputs)
        settled = {position: position for position in range(len(args)) if position not in written}
        return ReplayPlan.of(
            self._name,
            descriptor,
            [("full", "replay")],
            operator.itemgetter("full"),
            {"full": PlannedReplay(entry, settled, frozenset())},
            args=args,
            static=self._static,
            generation=self._runtime.lease.generation,
            reuses_outputs=True,
        )

    def _planned(self, captured: Sequence[Region], entries: Mapping[str, GraphEntry]) -> dict[str, PlannedReplay]:
        """The regions that always replay the same entry, and the sources of their inputs: arguments, earlier replays.

        Outputs of an eager region may share memory differently in the next call, which may need another entry. A region
        that depends on this calls its wrapper instead, and so does each region that reads an output of such a region.
        """
        written = set(self._partition.mutated_inputs)
        arguments = {given.name: p for p, given in enumerate(self._partition.inputs) if p not in written}
        replayed: set[str] = set()
        looked_up: set[str] = set()
        planned = {}
        for region in captured:
            entry = entries[region.name]
            staged = entry.staging.positions
            is_handed = any(region.inputs[position] not in arguments for position in staged)
            depends = is_handed and (bool(entry.staging.pattern) or (entry.staging.mutates and len(staged) > 1))
            if depends or not looked_up.isdisjoint(region.inputs):
                looked_up.update(region.outputs)
                continue
            planned[region.name] = PlannedReplay(
                entry=entry,
                arguments={p: arguments[value] for p, value in enumerate(region.inputs) if value in arguments},
                replayed=frozenset(p for p, value in enumerate(region.inputs) if value in replayed),
            )
            replayed.update(region.outputs)
        return planned
