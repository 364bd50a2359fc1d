"""The callable that Dynamo gets: compiled regions in stitched code, with FULL and PIECEWISE wrappers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass.appended import AppendedInputs
from cgpass.auto import AutoDispatcher
from cgpass.callees import wrapped_regions
from cgpass.calls import AutoRules
from cgpass.graphsizes import GraphSizes
from cgpass.keyshape import KeyShape
from cgpass.plans import ReplayPlans
from graphpass.capture.checks import refuse_transforms
from graphpass.capture.outputs import clone_pool_tensors, own_objects
from graphpass.capture.replayplan import ReplayPlan
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import EnteredCallable, ReachedCall
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.compat import dynamo, operators, trees
from graphpass.compile import CompiledRegion, RegionTrace
from graphpass.context import ForwardContext, current_context, entered, without_context
from graphpass.errors import CaptureError, ContextError, ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings
from graphpass.regions.split import Partition
from graphpass.report.records import RegionId

__all__ = ["CompiledGraph", "GraphedCallable"]

_RUNS_BEFORE_ADVICE = 8


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was partitioned and compiled.

    Attributes:
        name: the callable's name in its runtime.
        partition: regions and stitched code.
        compiled: region name -> compiled region, for the captured ones.
        traces: region name -> its aten graph, for proofs.
        taken: positions of Dynamo's arguments that the graph reads, in the order of the partition's inputs.
        appended: the inputs after those, which Dynamo does not pass; None if there are none.
        ends_early: why the graph ends before the model does (a graph break), or None.
        returns_flat: whether the graph returns a tuple or list of values that are not containers.
        side_effects: changes of Python state that Dynamo's code makes after the graph has run.
    """

    name: str
    partition: Partition
    compiled: Mapping[str, CompiledRegion]
    traces: Mapping[str, RegionTrace]
    taken: Sequence[int]
    appended: AppendedInputs | None
    ends_early: str | None
    returns_flat: bool
    side_effects: tuple[dynamo.SideEffect, ...]


class GraphedCallable:
    """One graph of a model: ``g0``, ``g1``, ...

    A FULL wrapper surrounds the stitched code, and a PIECEWISE wrapper surrounds each captured region in it. The kind
    of wrapper that the context's runtime mode names captures or replays; the other kind calls through.

    Args:
        graph: the graph.
        runtime: owner of graphs and statistics.
        settings: the backend's options.
        auto: sizes and rules of the graph's own dispatcher; None if only a forward context dispatches.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        runtime: GraphRuntime,
        settings: Settings,
        auto: tuple[GraphSizes, AutoRules] | None,
    ) -> None:
        self.name = name = graph.name
        self.side_effects = graph.side_effects
        self.traces = graph.traces
        self.ends_early = graph.ends_early
        self.returns_flat = graph.returns_flat
        self.partition = partition = graph.partition
        self.runtime = runtime
        self._taken, self._appended = tuple(graph.taken), graph.appended
        self._modes = settings.runtime_modes()
        self._policy = settings.policy
        self._compiled = dict(graph.compiled)
        self._callees = wrapped_regions(name, partition, graph.compiled, runtime, settings.policy)
        self._stitched = partition.bind(self._callees)
        self.static = tuple(p for p, given in enumerate(partition.inputs) if given.is_static)
        self._staged = tuple(
            p
            for p, given in enumerate(partition.inputs)
            if isinstance(given.value, torch.Tensor) and not given.is_static
        )
        self._full = CUDAGraphWrapper(
            self._stitched,
            CUDAGraphMode.FULL,
            runtime=runtime,
            name=RegionId(name, "full"),
            static_inputs=self.static,
            module_inputs=[p for p in self.static if partition.inputs[p].source_name is None],
            mutated_inputs=partition.mutated_inputs,
            layout_inputs=partition.layout_inputs,
            input_names=[given.shown for given in partition.inputs],
            policy=settings.policy,
        )
        self._plans = ReplayPlans(name, partition, self._callees, runtime, self.static)
        self._key_shape = KeyShape.of(partition.inputs, settings, is_first=len(runtime.callables()) == 1)
        self._runs_without_graph = 0
        self.never_full = partition.never_full()
        self._seen = (
            ()
            if auto is not None
            else tuple(
                (runtime.ledger.sizes[field], position, dim) for field, position, dim in self._key_shape.fields()
            )
        )
        # A proxy avoids a reference cycle: the callable is freed as soon as Dynamo drops it.
        self._auto = None if auto is None else AutoDispatcher(weakref.proxy(self), *auto)

    def runs(self, compiled: Mapping[str, CompiledRegion]) -> bool:
        """Whether the callable's regions are exactly the compiled objects in ``compiled``."""
        return self._compiled.keys() == compiled.keys() and all(
            region is compiled[name] for name, region in self._compiled.items()
        )

    def __call__(self, *given: Any) -> Any:
        """Run with Dynamo's arguments."""
        args = given if len(given) == len(self._taken) else tuple([given[position] for position in self._taken])
        if self._appended is None:
            return self.call(args)
        changed = self._appended.changed()  # guard: attributes_layout
        args = self._appended.after(args)
        return self.call(args) if changed is None else self._changed(changed, args)

    def call(self, args: tuple[Any, ...]) -> Any:
        """Run with one argument for each of the partition's inputs.

        Raises:
            CaptureError: runtime mode FULL, and the graph cannot be captured as a whole; or a wrapper's error.
            ContextError: the callable was not built for the context's runtime mode.
            ShapeError: the arguments do not have the sizes of the context's key.
        """
        context = current_context()
        self.runtime.num_entered += 1
        if operators.transform_over(args) is not None:
            return self._transformed(context, args)
        if context is None or context.capture is not None or context.owner is not None:
            return self._undirected(context, args)
        scope = self.runtime.scopes.current()
        if scope is not None and scope.stops_at_entry:
            raise EnteredCallable(self, args)
        if context.observer is not None:
            context.observer.entering(self, args)
        if not context.runtime_mode:
            return self._told_scope(args, self._stitched(*args))
        if context.runtime_mode not in self._modes:
            raise ContextError(
                f"{self.name} was not built for runtime mode {context.runtime_mode}",
                expected=" or ".join(sorted(map(str, self._modes))) or "NONE",
                found=str(context.runtime_mode),
                remedy=f"compile with options mode={str(context.runtime_mode)!r}, or a pair that contains it",
            )
        for position in self._staged:
            if not args[position].numel():
                return self._stitched(*args)
        full = context.runtime_mode is CUDAGraphMode.FULL
        if full and self.never_full is not None:
            raise CaptureError(
                f"{self.name} cannot be captured as a whole",
                expected="runtime mode PIECEWISE, or a model without such an op",
                found=str(self.never_full),
                remedy="dispatch with mode PIECEWISE: the region stays eager and costs one split",
            )
        assert context.batch_descriptor is not None, "PIECEWISE and FULL come with a descriptor"
        self._key_shape.check(context.batch_descriptor, args)
        outputs, plan = self._as_a_whole(context, args) if full else self._piecewise(context, args)
        return self._told_scope(args, outputs, plan)

    def _transformed(self, context: ForwardContext | None, args: tuple[Any, ...]) -> Any:
        """Run a call under ``vmap`` or forward-mode AD on the traced graph: compiled kernels would drop the tangents.

        Raises:
            CaptureError: the user's context asks for a graph.
        """
        if context is not None and context.runtime_mode and context.capture is None and context.owner is None:
            refuse_transforms(self.name, args)
        self.runtime.warn(
            "a call under vmap or forward-mode AD runs without compiled code and graphs",
            "transform the model itself, or compile a function that has the transform inside",
            at=self.name,
        )
        return self._as_traced(args)

    def _changed(self, how: str, args: tuple[Any, ...]) -> Any:
        """Run a call on the traced graph, because compiled code would read an attribute in its old layout.

        Raises:
            ShapeError: the user's context asks for a graph.
        """
        context, text = current_context(), "a tensor that compiled code reads has another layout than in its trace"
        remedy = "call torch.compiler.reset() after `tensor.data = other` of another layout"
        if context is not None and context.runtime_mode and context.capture is None and context.owner is None:
            raise ShapeError(f"{self.name}: {text}", expected="the layout of the trace", found=how, remedy=remedy)
        self.runtime.warn(f"{text}: its calls run without compiled code and graphs", remedy, at=f"{self.name} ({how})")
        return self._as_traced(args)

    def _as_traced(self, args: tuple[Any, ...]) -> Any:
        return self.partition.bind({r.name: r.graph_module.forward for r in self.partition.regions})(*args)

    def _told_scope(self, args: tuple[Any, ...], outputs: Any, plan: ReplayPlan | None = None) -> Any:
        scope, context = self.runtime.scopes.current(), current_context()
        observer = None if context is None else context.observer
        if scope is not None or observer is not None:
            reached = ReachedCall(self, args, tuple(trees.flatten(outputs)[0]), plan)
            if scope is not None:
                scope.reached.append(reached)
            if observer is not None:
                observer.returned(reached)
        return outputs

    def _undirected(self, context: ForwardContext | None, args: tuple[Any, ...]) -> Any:
        """Run a call without a user's context: in a capture, by the callable's own dispatcher, or without graphs."""
        if context is not None and context.capture is not None:
            return self._stitched(*args)
        if context is not None:  # set by the dispatcher of an enclosing callable, which holds the pool lease
            with without_context():
                return self._undirected(None, args)
        scope = self.runtime.scopes.current()
        if scope is not None and scope.reaches:
            return self._told_scope(args, self._stitched(*args))
        if self._auto is not None:
            return self._auto(args)
        for seen, position, dim in self._seen:
            seen[args[position].shape[dim]] += 1
        self._runs_without_graph += 1
        if self._runs_without_graph == _RUNS_BEFORE_ADVICE:
            self.runtime.warn(
                f"ran {_RUNS_BEFORE_ADVICE} times without a forward context and therefore without graphs",
                "set dispatch='auto', which chooses the keys by itself; or call it in `with "
                "graphpass.set_forward_context(runtime_mode=..., batch_descriptor=...):`, each key for the first time "
                "inside `with runtime.capturing():`",
                at=self.name,
            )
        return self._stitched(*args)

    # -- for the auto dispatcher --------------------------------------------------------------------------------------

    def run_plain(self, args: Sequence[Any]) -> Any:
        """Run the compiled regions, without graphs."""
        return self._stitched(*args)

    def run_key(self, context: ForwardContext, args: Sequence[Any], *, clone: bool | None) -> Any:
        """Capture or replay the key of ``context``.

        Args:
            context: forward context with the key and the runtime mode.
            args: the graph's arguments at the key's sizes.
            clone: whether outputs are copied out of the pool; None: as the capture policy says.

        Raises:
            CaptureError: FULL has no graph for these arguments and capture is not permitted; nothing has run.
            StaticInputError: the same, because a static input is at another address than at capture.
        """
        is_full = context.runtime_mode is CUDAGraphMode.FULL
        if is_full and not self._policy.debug:
            return self._full.call_flat(context, args, clone=clone)
        with entered(context):
            if is_full:  # an eager run reads the context that a graph has baked in
                return self._full.call_flat(context, args, clone=clone)
            return self._piecewise(context, tuple(args), clone=clone)[0]

    def can_replay(self, context: ForwardContext, args: Sequence[Any]) -> bool:
        """Whether :meth:`run_key` without permission to capture either replays or raises before anything runs."""
        if context.runtime_mode is CUDAGraphMode.FULL:
            return True
        assert context.batch_descriptor is not None
        return self._plans.serving(context.batch_descriptor, args) is not None

    @contextlib.contextmanager
    def uncounted(self, descriptor: BatchDescriptor) -> Iterator[None]:
        """Leave replays of this key inside the ``with`` block out of the counts."""
        with contextlib.ExitStack() as stack:
            for wrapper in (self._full, *self._callees.values()):
                if isinstance(wrapper, CUDAGraphWrapper):
                    stack.enter_context(wrapper.uncounted(descriptor))
            yield

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone."""
        return [] if self._auto is None else self._auto.ladder(args)

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`.

        Args:
            descriptor: the key.
            args: example arguments; their entries are repeated to the sizes of the key.

        Raises:
            CaptureError: the key cannot be captured.
        """
        assert self._auto is not None, "only a callable that dispatches by itself has a ladder"
        with torch.no_grad():  # as in the call: the step of an optimizer turns autograd off by itself
            self._auto.capture_key(descriptor, args)

    def _as_a_whole(self, context: ForwardContext, args: tuple[Any, ...]) -> tuple[Any, ReplayPlan | None]:
        """Capture or replay the FULL graph; returns the outputs and, inside a capture scope, its plan."""
        if self.runtime.scopes.current() is None:
            return self._full.call_flat(context, args), None
        lease = self.runtime.lease
        # Under one lease: after its release, another thread's forward changes `forward_entries`.
        lease.acquire(context, args, self.name)
        try:
            return self._full.call_flat(context, args), lease.forward_entries[-1].plan
        finally:
            lease.release()

    def _piecewise(
        self, context: ForwardContext, args: tuple[Any, ...], *, clone: bool | None = None
    ) -> tuple[Any, ReplayPlan | None]:
        """Capture or replay the PIECEWISE graphs; returns the outputs and the plan, None if a region has no graph."""
        lease, descriptor = self.runtime.lease, context.batch_descriptor
        assert descriptor is not None
        clones = self._policy.clones_outputs if clone is None else clone
        is_outermost = lease.acquire(context, args, self.name)
        try:
            if not clones:  # inputs may be outputs of the last forward
                args = tuple(lease.without_stale(args, self._staged))
            plan = self._plans.serving(descriptor, args)
            if plan is not None:
                plan.check(args, context)
                outputs = plan.run(args, lease)
            else:
                first = len(lease.forward_entries)
                outputs = self._stitched(*args)
                if not self._policy.compare:  # comparison with eager runs region by region, without a plan
                    plan = self._plans.add(descriptor, args, lease.forward_entries[first:])
            flat = outputs if self.returns_flat else trees.flatten(outputs)[0]
            pool = lease.forward_storages
            # guard: piecewise_outputs_cloned
            leaves = clone_pool_tensors(flat, pool) if clones else own_objects(flat, pool)
            if is_outermost and self._policy.debug and not clones:
                leaves = lease.watched(leaves, pool, self.name)
            return type(outputs)(leaves) if self.returns_flat else _rebuilt(outputs, leaves), plan
        finally:
            lease.release()


def _rebuilt(outputs: Any, flat: list[Any]) -> Any:
    return trees.unflatten(flat, trees.flatten(outputs)[1])
