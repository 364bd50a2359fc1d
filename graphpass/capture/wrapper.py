"""The CUDA-graph wrapper: obeys the forward context, captures when asked to, replays when it can.

========================  ==================  ==========================================================
context                   entry               the wrapper
========================  ==================  ==========================================================
none, NONE, another mode  --                  calls the runnable
this mode                 absent, open        warms up, captures, replays once
this mode                 absent, closed      refuses: :class:`~graphpass.errors.CaptureError`
this mode                 present             replays
========================  ==================  ==========================================================

The wrapper does not choose keys: the dispatcher chooses one, and the forward context carries it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.capture.arguments import Call, InputRoles
from graphpass.capture.capturepermit import CapturePermit, FreedInputs
from graphpass.capture.checks import refuse_transforms
from graphpass.capture.compare import EagerRun
from graphpass.capture.entry import EntryTable, GraphEntry
from graphpass.capture.policy import CapturePolicy
from graphpass.capture.recorder import Recorder
from graphpass.capture.replayplan import ReplayPlan, without_grad
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.staging import BufferArena
from graphpass.compat import memory, trees
from graphpass.context import ForwardContext, current_context
from graphpass.errors import CaptureError, OptionError
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Row
from graphpass.modes import CUDAGraphMode
from graphpass.report.records import Counts, RegionId, RegionUse

__all__ = ["CUDAGraphWrapper"]

_log = logging.getLogger("graphpass")


@dataclass(frozen=True, slots=True)
class _Captured:
    """All capture state of a wrapper in one object, so that :meth:`CUDAGraphWrapper.hidden` can swap it."""

    entries: EntryTable = field(default_factory=EntryTable)
    death_watch: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    freed: dict[BatchDescriptor, FreedInputs] = field(default_factory=dict)
    arena: BufferArena = field(default_factory=BufferArena)


class CUDAGraphWrapper:
    """Captures ``runnable`` once per batch descriptor at one runtime mode, and replays the graphs.

    A call has the results and side effects of one eager call, also the call that captures: tensors that the region
    mutates and random number generators are saved before the warm-up and restored after it.

    Args:
        runnable: the region; takes and returns tensors, in any nesting of tuples, lists and dicts.
        mode: PIECEWISE or FULL: the runtime mode at which this wrapper captures and replays.
        runtime: owner of the pool, the capture stream and the statistics.
        name: the region's name in counts, errors and reports; compilers pass a :class:`RegionId`.
        static_inputs: arguments (a position, or a keyword's name) whose address graphs may bake in. Parameters and
            tensors under ``mark_static_address`` are static without being listed. Every other input is copied.
        mutated_inputs: arguments that ``runnable`` writes to.
        module_inputs: static arguments that a module owns. A graph keeps a weak reference to their storages and is
            dropped when one of them dies, as with parameters. It keeps every other static input alive.
        layout_inputs: number arguments that only describe the memory layout of the tensors. They may differ from
            call to call: graphs read copies, which have the layout of the capture.
        input_names: a name for each positional argument, for errors.
        policy: whether outputs are cloned, when capture is allowed, and how moved inputs are handled.

    Raises:
        OptionError: ``mode`` is NONE or a pair.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode | str,
        *,
        runtime: GraphRuntime,
        name: str | RegionId,
        static_inputs: Collection[int | str] = (),
        mutated_inputs: Collection[int | str] = (),
        module_inputs: Collection[int | str] = (),
        layout_inputs: Collection[int | str] = (),
        input_names: Sequence[str] = (),
        policy: CapturePolicy | None = None,
    ) -> None:
        self._mode = CUDAGraphMode.parse(mode)
        if self._mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise OptionError(
                f"wrapper {name} captures at one runtime mode",
                expected="PIECEWISE or FULL",
                found=str(mode),
                remedy="wrap each level by itself: FULL around the whole, PIECEWISE around the regions",
            )
        self._runnable = runnable
        self._runtime = runtime
        self.region = name if isinstance(name, RegionId) else RegionId(name)
        self.name = str(self.region)
        self._roles = InputRoles(
            static=frozenset(static_inputs),
            mutated=frozenset(mutated_inputs),
            module_owned=frozenset(module_inputs),
            layout=frozenset(layout_inputs),
            names=tuple(input_names),
        )
        self._policy = policy or CapturePolicy()
        self._captured = _Captured()
        self._flat_spec: Any = None
        runtime.adopt(self, shows_stale=self._policy.debug)

    @property
    def mode(self) -> CUDAGraphMode:
        """The runtime mode at which this wrapper captures and replays."""
        return self._mode

    def unwrap(self) -> Callable[..., Any]:
        """The innermost runnable, where wrappers are nested."""
        inner = self._runnable
        while isinstance(inner, CUDAGraphWrapper):
            inner = inner._runnable
        return inner

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # during unpickling or copying, before __init__ has run
            raise AttributeError(attribute)
        return getattr(self._runnable, attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run eagerly, capture or replay, according to the current forward context; see the module's table.

        Raises:
            CaptureError: this key has no graph and capture is closed, the capture failed, or autograd is on.
            ShapeError: an input differs in shape, dtype or device from the capture.
            StaticInputError: an input is not at the address that the graph reads, and capture is closed.
            PoolBusyError: another forward of this thread is using the pool.
        """
        context = current_context()
        if context is None:
            return self._runnable(*args, **kwargs)
        if context.capture is not None:
            return context.capture.call(self.name, self._runnable, args, kwargs)
        if context.runtime_mode is not self._mode:
            return self._runnable(*args, **kwargs)
        if len(kwargs) > 1:  # calls that differ only in keyword order share a graph
            kwargs = dict(sorted(kwargs.items()))
        leaves, spec = trees.flatten((args, kwargs))
        return self._under_graph(context, leaves, spec)

    def call_flat(self, context: ForwardContext, args: Sequence[Any], *, clone: bool | None = None) -> Any:
        """Capture or replay with flat positional arguments; faster than a call, which has to flatten them.

        Args:
            context: the forward context to use; its runtime mode must be this wrapper's.
            args: tensors and numbers, not nested.
            clone: copy outputs out of the pool; None follows the policy.
        """
        if self._flat_spec is None or self._flat_spec.num_leaves != len(args):
            self._flat_spec = trees.flatten((tuple(args), {}))[1]
        return self._under_graph(context, list(args), self._flat_spec, clone=clone)

    def counts(self) -> Mapping[BatchDescriptor, Counts]:
        """Warm-ups, captures, replays and copies so far, for each key."""
        return {use.key: use.counts for use in self.uses()}

    def uses(self) -> Iterator[RegionUse]:
        """Counts and costs so far, for each key."""
        warmed, captured, replayed = (
            self._runtime.ledger.rows(self.region, event) for event in ("warmed", "captured", "replayed")
        )
        for (mode, key), row in warmed.items():
            if mode is self._mode:
                made, run = captured.get((mode, key), Row()), replayed.get((mode, key), Row())
                counts = Counts(row.n, made.n, run.n, run.items, self._static_sets(key))
                yield RegionUse(self.region, mode, key, counts, made.seconds, made.least_s, run.least_s)

    @contextlib.contextmanager
    def uncounted(self, descriptor: BatchDescriptor) -> Iterator[None]:
        """Do not count replays of a key in the body of the ``with``: they test the graph and serve no call."""
        row = self._replays(descriptor)
        before = row.n, row.items
        try:
            yield
        finally:
            row.n, row.items = before

    def captured(self) -> list[BatchDescriptor]:
        """The descriptors that have a graph now."""
        return self._captured.entries.descriptors()

    def buffer_bytes(self) -> int:
        """Bytes of the static buffers."""
        return self._captured.arena.num_bytes()

    def close(self) -> None:
        """Drop all graphs and buffers; the wrapper can capture again."""
        for entry in self._captured.entries.clear():
            entry.graph.reset()
        self._captured.death_watch.clear()
        self._captured.freed.clear()
        self._captured.arena.clear()

    def hidden(self) -> Callable[[], None]:
        """Hide all entries, counters and buffers.

        Returns a function that drops everything captured in the meantime and restores them.
        """
        held, self._captured = self._captured, _Captured()  # guard: throwaway_graphs_kept

        def put_back() -> None:
            self.close()
            self._captured = held

        return put_back

    def _under_graph(self, context: ForwardContext, leaves: list[Any], spec: Any, *, clone: bool | None = None) -> Any:
        self._refuse_grad(leaves)  # guard: grad_mode
        refuse_transforms(self.name, leaves)  # guard: transforms_refused
        descriptor = context.batch_descriptor
        assert descriptor is not None
        lease = self._runtime.lease
        is_outermost = lease.acquire(context, leaves, self.name)
        try:
            entry = self._entry_for(descriptor, leaves, spec)
            recorded: Sequence[Any] | None = None
            if entry is None:
                args, kwargs = trees.unflatten(leaves, spec)
                scope = self._runtime.scopes.current()
                try:
                    entry, recorded = self._capture(context, descriptor, Call.of(args, kwargs, self._roles, spec=spec))
                except Exception as error:
                    if scope is None or not scope.is_automatic or self._mode is CUDAGraphMode.FULL:
                        raise
                    # The step goes on eagerly: other regions have run, and the failed capture undid its own effects.
                    scope.failures.append(error)
                    return self._runnable(*args, **kwargs)
            plan = entry.plan
            plan.check(leaves, context)
            clones = self._policy.clones_outputs if clone is None else clone
            if plan.staging.mutates or entry.outputs.viewed_positions:  # guard: stale_arguments_in_views
                leaves = lease.without_stale(leaves, plan.staging.positions)
            expected = self._run_eagerly(context, entry, leaves) if self._policy.compare else None
            lease.forward_entries.append(entry)
            with without_grad():
                replayed = plan.run(leaves, lease) if recorded is None else self._first_replay(plan, leaves, descriptor)
                outputs = entry.outputs.for_caller(replayed, clone=clones)
            if expected is not None:
                expected.compare(outputs, leaves, entry.observed)
            if recorded is not None and not clones:
                outputs = entry.outputs.owning(outputs, recorded)
            if is_outermost and self._policy.debug and not clones:
                outputs = lease.watched(outputs, entry.outputs.pool_storages, self.name)
        finally:
            lease.release()
        return entry.build_result(outputs)

    def _first_replay(self, plan: ReplayPlan, leaves: list[Any], descriptor: BatchDescriptor) -> Any:
        """Replay a graph right after its capture, and keep the host time, for the estimate of the time saved."""
        start_s = time.perf_counter()
        replayed = plan.run(leaves, self._runtime.lease)
        row = self._replays(descriptor)
        row.least_s = min(row.least_s, time.perf_counter() - start_s)
        return replayed

    def _run_eagerly(self, context: ForwardContext, entry: GraphEntry, leaves: Sequence[Any]) -> EagerRun:
        device = self._runtime.lease.device_for(leaves).device
        return EagerRun.of(entry, self._runnable, leaves, context, device)

    def _entry_for(self, descriptor: BatchDescriptor, leaves: list[Any], spec: Any) -> GraphEntry | None:
        """The entry that serves these arguments; None if one must be captured."""
        elsewhere: GraphEntry | None = None
        for entry in self._captured.entries.candidates(descriptor, leaves):
            if entry.serves(leaves, spec):
                if entry.reads_pool_at(leaves):
                    return entry
                elsewhere = elsewhere or entry
        # An earlier region was captured again, so its output moved. If capture is closed, check() refuses that input.
        is_open = self._runtime.scopes.is_mine() or self._policy.lazy_capture
        return None if is_open else elsewhere

    def _refuse_grad(self, leaves: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves):
            raise CaptureError(
                f"{self.name} cannot replay under autograd",
                expected="a call under torch.no_grad() or torch.inference_mode()",
                found="grad mode on and an input that requires grad",
                remedy="wrap the forward in `with torch.inference_mode():`",
            )

    def _capture(
        self, context: ForwardContext, descriptor: BatchDescriptor, call: Call
    ) -> tuple[GraphEntry, Sequence[Any]]:
        freed = self._captured.freed.setdefault(descriptor, FreedInputs())
        permit = CapturePermit(self.region, self._mode, self._runtime, self._policy, self._captured.entries, freed)
        baked = permit.baked(context, descriptor, call)
        entry, recorded = Recorder(
            region=self.region,
            mode=self._mode,
            runnable=self._runnable,
            runtime=self._runtime,
            arena=self._captured.arena,
            policy=self._policy,
            call=call,
            baked=baked,
        ).record(context)
        self._captured.entries.add(descriptor, call, entry)
        freed.latest.clear()
        replays = self._replays(descriptor)
        watched = _Watched(weakref.ref(self), weakref.ref(self._captured.entries), descriptor, id(entry), replays)
        owned = [p for p in entry.plan.statics.positions if p in call.module_owned]
        self._captured.death_watch[id(entry)] = tuple(
            memory.watch_storage(call.leaves[p], functools.partial(watched.drop, p)) for p in owned
        )
        return entry, recorded

    def _replays(self, descriptor: BatchDescriptor) -> Row:
        return self._runtime.ledger.rows(self.region, "replayed")[self._mode, descriptor]

    def _static_sets(self, descriptor: BatchDescriptor) -> int:
        return len({tuple(entry.plan.statics.addresses) for entry in self._captured.entries.at(descriptor)})


class _Watched:
    """An entry whose graph is dropped when the storage of a parameter or buffer is freed. Keeps nothing alive.

    Args:
        owner: the wrapper.
        table: the table that the entry was added to, which :meth:`CUDAGraphWrapper.hidden` may hide.
        descriptor: its key.
        entry_id: its ``id()``.
        replays: the replays of the key.
    """

    def __init__(
        self,
        owner: weakref.ref[CUDAGraphWrapper],
        table: weakref.ref[EntryTable],
        descriptor: BatchDescriptor,
        entry_id: int,
        replays: Row,
    ) -> None:
        self._owner, self._table, self._descriptor, self._entry_id = owner, table, descriptor, entry_id
        self._replays, self._replayed_before = replays, replays.n

    def drop(self, position: int, _dead: Any) -> None:
        """Drop the entry, because the storage of the input at ``position`` was freed."""
        wrapper, entries = self._owner(), self._table()
        # guard: dead_parameters
        entry = entries.drop(self._descriptor, self._entry_id) if wrapper is not None and entries is not None else None
        if wrapper is None or entry is None:
            return
        wrapper._captured.death_watch.pop(self._entry_id, None)
        freed = wrapper._captured.freed.setdefault(self._descriptor, FreedInputs())
        freed.add(position, entry, self._replays.n - self._replayed_before)
        entry.graph.reset()
        wrapper._runtime.lease.entries_dropped()
        wrapper._runtime.note("a parameter died, its graph was dropped", at=f"{wrapper.name} {self._descriptor}")
