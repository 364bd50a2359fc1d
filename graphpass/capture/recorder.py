"""Captures one region for one call: the caller's arguments in, a finished entry out."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphpass.capture.arguments import Call
from graphpass.capture.checks import InputChecks
from graphpass.capture.contextreads import ContextReads, ReadLog
from graphpass.capture.debug import EagerGraph
from graphpass.capture.device import Graph, GraphDevice
from graphpass.capture.entry import GraphEntry
from graphpass.capture.layout import storage_id
from graphpass.capture.outputs import OutputPlan
from graphpass.capture.policy import CapturePolicy
from graphpass.capture.regioncalls import Observed, RegionCalls
from graphpass.capture.replayplan import ReplayPlan, StaticSet, launch_of
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.snapshot import restoring
from graphpass.capture.staging import BufferArena, Staging
from graphpass.capture.torchsettings import without_cached_casts, without_collections
from graphpass.compat import dynamo, memory, nnmodules, operators, trees
from graphpass.context import ForwardContext, current_context, entered
from graphpass.errors import CaptureError, DeviceError, GraphpassError
from graphpass.ledger import Row
from graphpass.modes import CUDAGraphMode
from graphpass.report.records import RegionId

__all__ = ["Recorder"]

_log = logging.getLogger("graphpass")

_OUT_OF_MEMORY = "capture fewer or smaller sizes (capture_sizes, max_graphs; a manager: capture(max_bytes=...))"
_SPLIT = "run it eagerly to see whether the region itself fails; list an op that cannot be captured in splitting_ops"
_FULL_HOLDS_IT = (
    "set mode='PIECEWISE', which leaves it out of the graphs: a FULL graph holds the operations of splitting_ops, too"
)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the graph reads each argument: baked in place, from the pool, from a buffer, or as a constant."""

    static: tuple[int, ...]
    pool: tuple[tuple[int, int], ...]
    staged: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded graph, and what its replays need.

    Attributes:
        graph: the graph.
        staging: buffers of its inputs.
        outputs: how to build its outputs.
        reads: the values that it read from the forward context.
        observed: under ``compare``, the results of the regions inside.
        returned_spec: structure of the region's result.
    """

    graph: Graph
    staging: Staging
    outputs: OutputPlan
    reads: ContextReads
    observed: tuple[Observed, ...]
    returned_spec: Any


@dataclass(frozen=True, slots=True)
class Recorder:
    """Captures one region for one call.

    Attributes:
        policy: ``debug`` runs eagerly and records no graph; ``compare`` keeps copies of the inner regions' outputs.
        baked: flat positions of the arguments whose address the graph may bake in; a subset of ``call.static``.
    """

    region: RegionId
    mode: CUDAGraphMode
    runnable: Callable[..., Any]
    runtime: GraphRuntime
    arena: BufferArena
    policy: CapturePolicy
    call: Call
    baked: frozenset[int]

    @property
    def name(self) -> str:
        """The region's name in errors, for example ``g0.r3``."""
        return str(self.region)

    def record(self, context: ForwardContext) -> tuple[GraphEntry, Sequence[Any]]:
        """Copy inputs into buffers, warm up and record; mutated tensors and generators are restored after each run.

        Returns the entry and the flat outputs of the recording. The outputs own their pool memory, the entry does not.

        Raises:
            CaptureError: the region writes to an input outside ``mutated_inputs``, or one of its ops failed.
            DeviceError: an argument is on another device.
        """
        self._row(context, "warmed")  # the counts list the key, whatever comes of it
        device = self.runtime.lease.device_for(self.call.leaves)
        inside = RegionCalls(device.call, observed=[] if self.policy.compare else None)
        held = self.arena.held()
        try:
            return self._recorded(device, inside, context)
        except BaseException as error:
            try:
                self._explain(error, inside, context)  # guard: failed_capture_is_typed
                raise
            finally:
                self.arena.restore(held)  # guard: failed_capture_bytes

    def _recorded(
        self, device: GraphDevice, inside: RegionCalls, context: ForwardContext
    ) -> tuple[GraphEntry, Sequence[Any]]:
        start_s = time.perf_counter()
        sources = self._sources(device.device)
        leaves, mutated_positions = self.call.leaves, self.call.mutated
        staging = Staging.for_inputs(
            leaves, sources.staged, mutated=mutated_positions, names=self.call.names, arena=self.arena
        )
        # keep_results and prepare apply to FULL graphs only: the outputs of a region go to the next region.
        scope = self.runtime.scopes.current() if self.mode is CUDAGraphMode.FULL else None
        keep_results = None if scope is None else scope.keep_results
        body = _Body(self.name, self.runnable, self.call.spec, inside, self._graph_inputs(staging), keep_results)
        log = ReadLog()
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        mutated = [body.inputs[position] for position in sorted(mutated_positions)]
        surroundings = partial(_surroundings, self.mode, inside, log)
        with without_collections(), surroundings(context):
            staging.copy_in(leaves)
            versions = _versions(body.inputs)
            with restoring(mutated, generators, device.device):
                device.warm_up(body)
                self._row(context, "warmed").n += 1
                self._refuse_undeclared_mutation(versions, _versions(body.inputs))
                existed = _storages(body.returned)  # guard: memory_reached_by_itself
            if scope is not None and scope.prepare is not None:
                scope.prepare()
            with restoring(mutated, generators, device.device):
                log.is_open = not self.policy.debug
                graph, recorded = (
                    # guard: debug_runs_eagerly
                    _eager(self.name, body, surroundings) if self.policy.debug else device.record(body, generators)
                )
                log.is_open = False
            outputs = recorded[: len(body.returned)]
            # Warm-up and recording use different pools: a storage that both returned existed before them.
            built = OutputPlan.of(outputs, body.inputs, device.without_ownership, existed & _storages(outputs))
            if not self.policy.debug:  # guard: tape_frozen_results
                device.refuse_frozen(built.pool_outputs)
            observed = [replace(o, tensor=device.without_ownership(o.tensor)) for o in inside.observed or ()]
        self.runtime.lease.make_stale(built.pool_outputs)  # guard: recorded_result_is_stale
        row = self._row(context, "captured")
        row.n, row.seconds = row.n + 1, row.seconds + time.perf_counter() - start_s
        row.least_s = min(row.least_s, body.launch_s)
        _log.debug("%s %s %s recorded", self.name, self.mode, context.batch_descriptor)
        dynamo.trace_json(f"graphpass_graph_{self.name}", lambda: self._traced(context, staging, built))
        recording = _Recording(graph, staging, built, log.reads(), tuple(observed), body.returned_spec)
        return self._entry(recording, sources, context), outputs

    def _row(self, context: ForwardContext, event: str) -> Row:
        return self.runtime.ledger.rows(self.region, event)[self.mode, context.batch_descriptor]

    def _traced(self, context: ForwardContext, staging: Staging, outputs: OutputPlan) -> dict[str, object]:
        """One captured graph, for the trace."""
        return {
            "region": self.name,
            "mode": str(self.mode),
            "key": str(context.batch_descriptor),
            "inputs": len(self.call.leaves),
            "copied_inputs": [self.call.names[position] for position in staging.positions],
            "written_inputs": [self.call.names[position] for position in sorted(self.call.mutated)],
            "outputs": len(outputs.pool_outputs),
            "pool_bytes": self.runtime.pool_bytes(),
        }

    def _entry(self, recording: _Recording, sources: _Sources, context: ForwardContext) -> GraphEntry:
        staging, outputs = recording.staging, recording.outputs
        launch = launch_of(recording.graph, staging, outputs)
        label = f"{self.name} {self.mode} {context.batch_descriptor}"
        plan = ReplayPlan(
            name=self.name,
            steps=((self.region.region, "replay"),),
            statics=StaticSet.of(self.call.leaves, sources.static),
            dynamic_positions=staging.positions,
            pattern=staging.pattern,
            reads=recording.reads,
            checks=self._checks(context, sources, outputs),
            staging=staging,
            rows=((self._row(context, "replayed"), len(staging.positions)),),
            pool_storages=outputs.pool_storages,
            pool_outputs=outputs.pool_outputs,
            launch=launch,
            ranged=partial(operators.ranged, label, launch),
        )
        return GraphEntry(
            region=self.region,
            spec=self.call.spec,
            build_result=trees.builder_of(recording.returned_spec),
            graph=recording.graph,
            plan=plan,
            outputs=outputs,
            observed=recording.observed,
            written=tuple(sorted(self.call.mutated)),
            owner_ids=self.call.owner_ids(),
        )

    def _checks(self, context: ForwardContext, sources: _Sources, outputs: OutputPlan) -> InputChecks:
        """The checks that later calls must pass: constants, layouts of static inputs, addresses of pool inputs."""
        leaves = self.call.leaves
        return InputChecks(
            name=self.name,
            key=context.batch_descriptor,
            names=dict(enumerate(self.call.names)),
            constants=sources.constants,
            layouts=tuple(self._layouts(sources.static)),
            viewed_strides=tuple((p, leaves[p].stride()) for p in sources.staged if p in outputs.viewed_positions),
            pool_inputs=sources.pool,
        )

    def _layouts(self, static: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """An alias of each static input; for tensors of modules, only if Dynamo does not guard their layouts."""
        lent = self.call.in_modules()
        for position in static:
            leaf = self.call.leaves[position]
            if position not in lent:
                yield position, leaf.detach()
            elif position not in self.call.module_owned or not dynamo.guards_module_layouts():  # guard: module_layouts
                yield position, torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def _graph_inputs(self, staging: Staging) -> list[Any]:
        """The arguments to record with: buffers for staged inputs, the caller's tensors for the others.

        A tape, and an EagerGraph (``debug``), keep these. They must not keep the memory of modules.
        """
        lent, leaves = self.call.in_modules(), enumerate(self.call.leaves)
        inputs = [memory.without_ownership(leaf) if position in lent else leaf for position, leaf in leaves]
        for position, buffer in zip(staging.positions, staging.buffers, strict=True):
            inputs[position] = buffer
        return inputs

    def _explain(self, error: BaseException, inside: RegionCalls, context: ForwardContext) -> None:
        """Raise a CaptureError from ``error`` that names region, op, key and memory in use.

        Returns, so that the caller re-raises ``error`` itself, for interrupts and for graphpass's own errors.
        """
        refused = error if isinstance(error, CaptureError) and inside.failed is not None else None
        if not isinstance(error, Exception) or (isinstance(error, GraphpassError) and refused is None):
            return
        region, runnable = inside.failed or (self.name, self.runnable)
        place = nnmodules.place_of_failure(error, getattr(runnable, "uncompiled", None))
        where = [f"in {region}"] if region != self.name else []
        problem = [f"capture of {self.name} failed at {self.mode} {context.batch_descriptor}", *where]
        num_bytes = f"(pool {self.runtime.pool_bytes()} bytes, buffers {self.runtime.buffer_bytes()} bytes)"
        found = f"{refused.problem}: {refused.found}" if refused else f"{type(error).__name__}: {error}"
        raise CaptureError(
            ", ".join([*problem, place] if place else problem),  # guard: failure_names_the_op
            expected=refused.expected if refused else "a region that can be captured",
            found=f"{found} {num_bytes}",
            remedy=self._remedy(
                error, refused, is_eager_inside=region != self.name and not hasattr(runnable, "uncompiled")
            ),
            where=" ".join([*where, f"at {place}"] if place else where or [f"in {self.name}"]),
        ) from error

    def _remedy(self, error: Exception, refused: CaptureError | None, *, is_eager_inside: bool) -> str:
        """What works here: an operation that splits already cannot be listed once more, and FULL graphs hold it."""
        if isinstance(error, torch.OutOfMemoryError):
            return _OUT_OF_MEMORY
        if self.mode is CUDAGraphMode.FULL and is_eager_inside:
            return _FULL_HOLDS_IT
        remedy = _SPLIT if refused is None else refused.remedy
        return (
            f"{remedy}, and set mode='PIECEWISE'" if self.mode is CUDAGraphMode.FULL and self.region.region else remedy
        )

    def _sources(self, device: torch.device) -> _Sources:
        leaves = self.call.leaves
        baked_storages = {storage_id(leaves[p]) for p in self.baked} - {0}
        pool_storages = self.runtime.lease.forward_storages
        static, pool, staged, constants = set(self.baked), [], [], []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                # Layout numbers may change from call to call: the graph reads buffers in the layout of the capture.
                if position not in self.call.layout:
                    constants.append((position, leaf))
                continue
            if leaf.device != device:
                raise DeviceError(
                    f"argument {self.call.names[position]} of {self.name} lies on another device",
                    expected=f"every tensor on {device}",
                    found=f"{tuple(leaf.shape)} on {leaf.device}",
                    remedy="move it there first, or keep it out of the captured region",
                )
            if position in static:
                continue
            if storage_id(leaf) in baked_storages:  # guard: inside_static_at_capture
                # It aliases a static input: a copy would not see writes to that input.
                static.add(position)
            elif storage_id(leaf) in pool_storages:  # guard: fresh_eager_results
                pool.append((position, leaf.data_ptr()))
            else:
                staged.append(position)
        return _Sources(tuple(sorted(static)), tuple(pool), tuple(staged), tuple(constants))

    def _refuse_undeclared_mutation(self, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        leaves, mutated = self.call.leaves, self.call.mutated
        declared = {storage_id(leaves[p]) for p in mutated}
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new and storage_id(leaves[position]) not in declared:  # guard: undeclared_mutation
                raise CaptureError(
                    f"{self.name} writes to its input {self.call.names[position]!r}",
                    expected="every input that the region writes to, listed in mutated_inputs",
                    found=f"mutated_inputs={[self.call.names[p] for p in sorted(mutated)]}",
                    remedy=f"add {self.call.names[position]!r} to mutated_inputs",
                )


class _Body:
    """A function without arguments that runs the region on ``inputs``; the device warms it up and records it."""

    def __init__(
        self,
        name: str,
        runnable: Callable[..., Any],
        spec: Any,
        inside: RegionCalls,
        inputs: list[Any],
        keep_results: Callable[[list[Any]], list[Any]] | None,
    ) -> None:
        self._name, self._runnable, self._spec, self._inside = name, runnable, spec, inside
        self._keep_results = keep_results
        self.inputs = inputs
        self.returned: list[Any] = []
        self.returned_spec: Any = None
        self.launch_s = math.inf  # host seconds of the fastest run

    def __call__(self) -> list[Any]:
        """Run the region; the flat outputs, followed by the observed outputs of inner regions."""
        observed = self._inside.observed
        if observed is not None:
            observed.clear()
        args, kwargs = trees.unflatten(self.inputs, self._spec)
        start_s = time.perf_counter()
        result = self._inside.call(self._name, self._runnable, args, kwargs)
        self.launch_s = min(self.launch_s, time.perf_counter() - start_s)
        self.returned, self.returned_spec = trees.flatten(result)
        if self._keep_results is not None:
            self.returned = self._keep_results(self.returned)
        return [*self.returned, *(seen.tensor for seen in observed or ())]


@contextlib.contextmanager
def _surroundings(mode: CUDAGraphMode, inside: RegionCalls, log: ReadLog, context: ForwardContext) -> Iterator[None]:
    """Enter the forward context and torch settings under which a region is warmed up and recorded.

    The region sees ``context`` with the key's padded token count; in PIECEWISE mode without attention metadata.
    """
    descriptor = context.batch_descriptor
    assert descriptor is not None
    # A graph must not bake in the real token count of one step, nor the metadata that eager attention reads.
    seen = replace(
        context,
        attn_metadata=None if mode is CUDAGraphMode.PIECEWISE else context.attn_metadata,
        num_tokens=None if context.num_tokens is None else descriptor.num_tokens,  # guard: count_of_the_key
        capture=inside,
    )
    with entered(log.watched(seen, of=context)), torch.no_grad(), without_cached_casts():
        yield


def _eager(
    name: str, body: _Body, surroundings: Callable[[ForwardContext], contextlib.AbstractContextManager[None]]
) -> tuple[EagerGraph, Sequence[Any]]:
    """An :class:`EagerGraph` over ``body``, and its flat outputs; ``debug`` uses it in place of a recording."""

    def surrounded() -> contextlib.AbstractContextManager[None]:
        context = current_context()
        assert context is not None, "graphs are replayed under a context"
        return surroundings(context)

    graph = EagerGraph(name, body, surrounded, body.inputs)
    return graph, graph.outputs


def _storages(values: Sequence[Any]) -> set[int]:
    """Addresses of the storages that the tensors among ``values`` lie in."""
    return {storage_id(value) for value in values if isinstance(value, torch.Tensor)} - {0}


def _versions(leaves: Sequence[Any]) -> list[int | None]:
    return [memory.version_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
