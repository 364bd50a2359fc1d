"""The graphs of one callable: a FULL wrapper around the stitched code, and a PIECEWISE wrapper around each region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass.extrainputs import AppendedInputs
from cgpass.keyrules import AutoRules
from cgpass.namedsizes import GraphSizes
from cgpass.plans import ReplayPlans, wrapped_regions
from graphpass.capture.outputs import clone_pool_tensors, own_objects
from graphpass.capture.pool import device_of
from graphpass.capture.replay import GraphEntry, ReplayPlan
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.compat import sideeffects, trees
from graphpass.compile import CompiledRegion, RegionTrace
from graphpass.context import ForwardContext, entered
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Row
from graphpass.options import Settings
from graphpass.regions.holders import Arguments
from graphpass.regions.split import Partition
from graphpass.report.records import CallableRecord, RegionId


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was partitioned and compiled."""

    record: CallableRecord  #: for reports: its name in the runtime, the graph break after it, what it cost
    rules: AutoRules | None  #: how it chooses graphs itself; None if a forward context does
    partition: Partition  #: regions and stitched code
    sizes: GraphSizes  #: the sizes that keys of a context have
    compiled: Mapping[str, CompiledRegion]  #: region name -> compiled region, for the captured ones
    traces: Mapping[str, RegionTrace]  #: region name -> its aten graph, for proofs
    arguments: Arguments  #: what reads the partition's inputs from Dynamo's, and makes its results
    appended: AppendedInputs | None  #: the inputs after those, which Dynamo does not pass; None if there are none
    code: str  #: file and name of the function whose code the graph is: ``model.py:forward``
    returns_flat: bool  #: whether the graph returns a tuple or list of values that are not containers
    #: changes of Python state that Dynamo's code makes after the graph has run
    side_effects: tuple[sideeffects.SideEffect, ...]


class CallableGraphs:
    """Captures and replays the graphs of one callable under a given forward context."""

    def __init__(self, graph: CompiledGraph, runtime: GraphRuntime, settings: Settings) -> None:
        self.name, self.appended, self.runtime, self.settings = graph.record.name, graph.appended, runtime, settings
        name, partition, policy = self.name, graph.partition, settings.policy
        self._policy, self._returns_flat = policy, graph.returns_flat
        compiled = graph.compiled
        #: the regions without what makes padding neutral, for the graphs of sizes that are not padded
        self.plain = tuple(dict.fromkeys(region.plain for region in compiled.values() if region.plain is not None))
        self._callees = wrapped_regions(name, partition, compiled, runtime, policy)
        self.stitched = partition.bind(self._callees)  #: the regions in order, each by its wrapper
        self.device = device_of([given.value for given in partition.inputs])
        self.static = tuple(p for p, given in enumerate(partition.inputs) if given.is_static)
        self.staged = tuple(
            p
            for p, given in enumerate(partition.inputs)
            if isinstance(given.value, torch.Tensor) and not given.is_static
        )
        self.full = CUDAGraphWrapper(
            self.stitched,
            CUDAGraphMode.FULL,
            runtime=runtime,
            name=RegionId(name, "full"),
            static_inputs=self.static,
            module_inputs=[p for p in self.static if partition.inputs[p].source_name is None],
            mutated_inputs=partition.mutated_inputs,
            layout_inputs=partition.layout_inputs,
            input_names=[given.shown for given in partition.inputs],
            policy=policy,
        )
        #: of the PIECEWISE graphs
        self.plans = ReplayPlans(name, partition, self._callees, runtime, self.static)

    def wrappers(self, mode: CUDAGraphMode) -> Sequence[CUDAGraphWrapper]:
        """The wrappers that have the graphs of a key of this mode."""
        if mode is CUDAGraphMode.FULL:
            return (self.full,)
        return [callee for callee in self._callees.values() if isinstance(callee, CUDAGraphWrapper)]

    def entries_at(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> list[Sequence[GraphEntry]]:
        """The graphs of a key, for each wrapper."""
        return [wrapper.table.at(descriptor) for wrapper in self.wrappers(mode)]

    def replays(self, descriptor: BatchDescriptor) -> list[Row]:
        """The counts of a key's replays, for each wrapper."""
        return [wrapper.replays(descriptor) for wrapper in (self.full, *self.wrappers(CUDAGraphMode.PIECEWISE))]

    def run_key(
        self, context: ForwardContext, args: Sequence[Any], *, is_cut: bool, plan: ReplayPlan | None = None
    ) -> Any:
        """Capture or replay the key of ``context``; ``plan`` serves a PIECEWISE call, if it is known.

        The caller holds the pool until it has cut outputs that ``is_cut`` says are cut, and which are not cloned.
        """
        clone = is_outermost = False if is_cut else None
        if context.runtime_mode is CUDAGraphMode.FULL:
            return self.full.call_flat(context, args, clone=clone, is_outermost=is_outermost)
        with entered(context):
            return self.piecewise(context, tuple(args), clone=clone, plan=plan)[0]

    def whole(self, context: ForwardContext, args: tuple[Any, ...]) -> tuple[Any, ReplayPlan]:
        """Capture or replay the FULL graph; returns the outputs and its plan."""
        lease = self.runtime.lease
        # Under one lease: after its release, another thread's forward changes `forward_entries`.
        lease.acquire(context, args, self.name)
        try:
            return self.full.call_flat(context, args, is_outermost=False), lease.forward_entries[-1].plan
        finally:
            lease.release()

    def piecewise(
        self,
        context: ForwardContext,
        args: tuple[Any, ...],
        *,
        clone: bool | None = None,
        plan: ReplayPlan | None = None,
    ) -> tuple[Any, ReplayPlan | None]:
        """Capture or replay the PIECEWISE graphs; returns the outputs and the plan, None if a region has no graph."""
        lease, descriptor = self.runtime.lease, context.batch_descriptor
        assert descriptor is not None
        clones = self._policy.clones_outputs if clone is None else clone
        is_outermost = lease.acquire(context, args, self.name)
        try:
            if not clones:  # inputs may be outputs of the last forward
                args = tuple(lease.without_stale(args, self.staged))
            plan = plan or self.plans.serving(descriptor, args)
            if plan is not None:
                plan.check(args, context)
                outputs = plan.run(args, lease)
            else:
                first = len(lease.forward_entries)
                outputs = self.stitched(*args)
                if not self._policy.compare:  # comparison with eager runs region by region, without a plan
                    plan = self.plans.add(descriptor, args, lease.forward_entries[first:])
            flat = self.flat(outputs)
            pool = lease.forward_storages
            # guard: piecewise_outputs_cloned
            leaves = clone_pool_tensors(flat, pool) if clones else own_objects(flat, pool)
            if is_outermost and self._policy.compare and not clones:
                leaves = lease.tracking_views(leaves, pool, self.name)
            return self.rebuilt(outputs, leaves), plan
        finally:
            lease.release()

    def flat(self, returned: Any) -> Sequence[Any]:
        """The flat outputs of what the graph has returned."""
        return returned if self._returns_flat else trees.flatten(returned)[0]

    def rebuilt(self, returned: Any, flat: Sequence[Any]) -> Any:
        """``flat`` in the structure of what the graph has returned."""
        if self._returns_flat:
            return type(returned)(flat)
        return trees.unflatten(flat, trees.flatten(returned)[1])
