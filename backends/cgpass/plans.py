"""The replay plans of one callable: created once all its regions have replayed, looked up by key and static inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from graphpass.capture import CapturePolicy
from graphpass.capture.replay import ContextReads, GraphEntry, InputPlan, ReplayPlan, StaticSet, without_grad
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.staging import alias_pattern, storage_id
from graphpass.capture.wrapper import MAX_STATIC_SETS, CUDAGraphWrapper
from graphpass.compat import nnmodules, operators
from graphpass.compile import CompiledRegion
from graphpass.context import current_context
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.regions.assign import Region
from graphpass.regions.eagerrules import reshapes_in_place
from graphpass.regions.split import Partition
from graphpass.regions.symbols import layout_inputs
from graphpass.report.records import RegionId


@dataclass(frozen=True, slots=True)
class PlannedReplay:
    """One captured region of a callable's plan."""

    entry: GraphEntry  #: its graph
    #: position of a region input -> position of the callable's argument that it is, unchanged
    arguments: Mapping[int, int]
    replayed: Collection[int]  #: positions of region inputs that are outputs of earlier replays of the same plan

    def unsettled(self) -> InputPlan:
        """How the region's inputs that the callable's plan has not checked and copied are checked and copied."""
        plan = self.entry.plan
        # A replay may return a view of an input, in the caller's memory: such an output still has to be staged.
        settled = {*self.arguments, *set(self.replayed).difference(plan.dynamic_positions)}
        return plan.inputs.at({p: p for p in plan.inputs.names if p not in settled})

    def is_fixed(self) -> bool:
        """Whether the replay needs no argument and always returns the same objects."""
        # guard: replays_without_arguments
        return not (self.unsettled() or self.entry.outputs.viewed_positions or self.entry.plan.inputs.written)

    def callee(self) -> Callable[..., Any]:
        """The function that the stitched code calls: checks and copies what the plan did not, and replays."""
        plan, outputs, inputs = self.entry.plan, self.entry.outputs, self.unsettled()

        def replay(*leaves: Any) -> list[Any]:
            inputs.check(leaves)
            with without_grad():
                inputs.copy_in(leaves)
                return outputs.for_caller(plan.launch(leaves), clone=False)

        return replay


_Bind: TypeAlias = Callable[[Mapping[str, Callable[..., Any]], Mapping[str, Sequence[Any]]], Callable[..., Any]]


class ReplayPlans:
    """Creates and owns the plans of one callable: up to ``MAX_STATIC_SETS`` for each key."""

    def __init__(
        self,
        name: str,
        partition: Partition,
        callees: Mapping[str, Callable[..., Any]],
        runtime: GraphRuntime,
        static: Sequence[int],
    ) -> None:
        self.name, self._partition, self._runtime, self.static = name, partition, runtime, frozenset(static)
        # With the generation of the lease: after a graph is dropped, no plan that may contain it is valid.
        self._plans: dict[BatchDescriptor, list[tuple[int, ReplayPlan]]] = {}
        eager = [region for region in partition.regions if region.kind == "eager"]
        #: {region: its code} of the eager regions
        self.eager = {region.name: region.graph_module.forward for region in eager}
        unplanned = {**callees, **self.eager}
        #: binds callees to the stitched code, in place of the wrappers, and fixed outputs to regions
        self.bind: _Bind = lambda planned, fixed: partition.bind({**unplanned, **planned}, fixed)
        #: no eager region reshapes an output of a replay in place, so that it may be the same object
        self.reuses_outputs = not any(reshapes_in_place(node) for r in eager for node in r.graph_module.graph.nodes)
        #: {region: path of its module}, for profiles
        self.places = {region.name: nnmodules.path_of_graph(region.graph_module) for region in partition.regions}

    def plan(self, replays: Mapping[str, PlannedReplay], args: Sequence[Any], key: str) -> ReplayPlan:
        """The plan of the callable for calls like ``args``."""
        plans = [planned.entry.plan for planned in replays.values()]
        baked = {storage for plan in plans for storage in plan.statics.storages}
        tensors = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
        fixed = [position for position in tensors if position in self.static or storage_id(args[position]) in baked]
        dynamic = tuple(position for position in tensors if position not in set(fixed))
        pattern = alias_pattern(args, dynamic)
        if pattern:  # inputs that share memory are copied together, region by region
            replays = {region: replace(planned, arguments={}) for region, planned in replays.items()}
        inputs = [planned.entry.plan.inputs.at(planned.arguments) for planned in replays.values()]
        unchanging = {
            region: planned.entry.outputs.build(())
            for region, planned in replays.items()
            if self.reuses_outputs and planned.is_fixed()
        }
        callees = {
            region: planned.entry.graph.replay if region in unchanging else planned.callee()
            for region, planned in replays.items()
        }
        stitched = self.bind(callees, unchanging)

        # A plan that held this object would keep it alive.
        name, bind, eager, places = self.name, self.bind, self.eager, self.places

        @functools.cache
        def ranged() -> Callable[[Sequence[Any]], Any]:
            labels = {region: f"{name}.{region} replay {places.get(region, '')}" for region in callees}
            labels |= {region: f"{name}.{region} eager {places.get(region, '')}" for region in eager}
            called = {**eager, **callees}
            named = {region: operators.ranged(label.rstrip(), called[region]) for region, label in labels.items()}
            stitched = bind(named, unchanging)
            return operators.ranged(f"{name} {key}", lambda args: stitched(*args))

        return ReplayPlan(
            name=self.name,
            statics=StaticSet.of(args, fixed),
            dynamic_positions=dynamic,
            pattern=pattern,
            reads=ContextReads.of(value for plan in plans for value in plan.reads.values),
            inputs=InputPlan.joined(inputs, self.name),
            rows=tuple(row for plan in plans for row in plan.rows),
            pool_storages=frozenset[int]().union(*(plan.pool_storages for plan in plans)),
            pool_outputs=tuple(output for plan in plans for output in plan.pool_outputs),
            launch=lambda args: stitched(*args),
            ranged=ranged,
        )

    def serving(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> ReplayPlan | None:
        """The plan of a key that is valid for these arguments; None if there is none."""
        leaves, now = list(args), self._runtime.lease.generation
        plans = self._plans.get(descriptor, ())
        # guard: plans_of_dead_graphs
        return next((plan for generation, plan in plans if generation == now and plan.serves(leaves)), None)

    def add(
        self, descriptor: BatchDescriptor, args: Sequence[Any], replayed: Sequence[GraphEntry]
    ) -> ReplayPlan | None:
        """Create the plan for calls like the one that has just run; None if one of its regions had no graph."""
        entries = {entry.region.region: entry for entry in replayed if entry.region.callable == self.name}
        captured = [region for region in self._partition.regions if region.kind == "captured"]
        if any(region.name not in entries for region in captured):
            return None
        key = f"{CUDAGraphMode.PIECEWISE} {descriptor}"
        plan = self.plan(self._planned(captured, entries), args, key)
        generation = self._runtime.lease.generation
        valid = [pair for pair in self._plans.get(descriptor, []) if pair[0] == generation]
        self._plans[descriptor] = [*valid[1 - MAX_STATIC_SETS :], (generation, plan)]
        return plan

    def _planned(self, captured: Sequence[Region], entries: Mapping[str, GraphEntry]) -> dict[str, PlannedReplay]:
        """The regions that always replay the same entry, and the sources of their inputs: arguments, earlier replays.

        Outputs of an eager region may share memory in another way in the next call. Where the entry depends on this, a
        region calls its wrapper, and so does each that reads its outputs.
        """
        written = set(self._partition.mutated_inputs)
        arguments = {value.name: p for p, value in enumerate(self._partition.inputs) if p not in written}
        replayed: set[str] = set()
        looked_up: set[str] = set()
        planned = {}
        for region in captured:
            entry = entries[region.name]
            plan, staged = entry.plan, entry.plan.dynamic_positions
            is_handed = any(region.inputs[position] not in arguments for position in staged)
            depends = is_handed and (bool(plan.pattern) or (plan.inputs.written and len(staged) > 1))
            if depends or not looked_up.isdisjoint(region.inputs):  # guard: plan_shares_written
                looked_up.update(region.outputs)
                continue
            planned[region.name] = PlannedReplay(
                entry=entry,
                arguments={p: arguments[value] for p, value in enumerate(region.inputs) if value in arguments},
                replayed=frozenset(p for p, value in enumerate(region.inputs) if value in replayed),
            )
            replayed.update(region.outputs)
        return planned


def _eager_region(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs an eager region; during a FULL capture, through the capture's record of region calls."""

    def call(*args: Any) -> Any:
        context = current_context()
        if context is None or context.capture is None:
            return run(*args)
        return context.capture.call(name, run, args, {})

    return call


def wrapped_regions(
    name: str,
    partition: Partition,
    compiled: Mapping[str, CompiledRegion],
    runtime: GraphRuntime,
    policy: CapturePolicy,
) -> dict[str, Callable[..., Any]]:
    """Region name -> callable for the stitched code: a PIECEWISE wrapper, or the eager region itself."""
    # Results stay in the pool between regions; the callable clones those that it returns.
    inner = replace(policy, outputs="view")
    given = {graph_input.name: graph_input for graph_input in partition.inputs}
    callees: dict[str, Callable[..., Any]] = {}
    for region in partition.regions:
        if region.kind == "eager":
            callees[region.name] = _eager_region(f"{name}.{region.name}", region.graph_module.forward)
            continue
        static = [p for p, value in enumerate(region.inputs) if value in given and given[value].is_static]
        callees[region.name] = CUDAGraphWrapper(
            compiled[region.name],
            CUDAGraphMode.PIECEWISE,
            runtime=runtime,
            name=RegionId(name, region.name),
            static_inputs=static,
            module_inputs=[p for p in static if given[region.inputs[p]].source_name is None],
            mutated_inputs=region.mutated_inputs,
            layout_inputs=layout_inputs(region.graph_module.graph),
            input_names=region.inputs,
            policy=inner,
        )
    return callees
