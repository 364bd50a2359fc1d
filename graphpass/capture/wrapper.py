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

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphpass.capture.compare import compared
from graphpass.capture.recorder import Call, Recorder, Roles
from graphpass.capture.replay import (
    EntryTable,
    GraphEntry,
    KeyEntries,
    ReplayPlan,
    StaticSet,
    without_grad,
)
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CapturePolicy, Permission
from graphpass.compat import memory, operators, trees
from graphpass.context import ForwardContext, current_context
from graphpass.errors import AgreementError, CaptureError, OptionError, StaticInputError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Reason, Row
from graphpass.report.records import Counts, RegionId

MAX_STATIC_SETS = 4
_REFILL = "refill them in place (`tensor.copy_(new)`): each new address is one more capture"
_STAYS = "refill them in place (`tensor.copy_(new)`): a tensor that stays at its address is not copied"
_BY_ITSELF = Reason("captured without a context, because its size recurs")
_INDEX = (
    "pass the whole tensor and index it inside the model with a tensor of positions; a copy (`tensor.clone()`) serves "
    "where the model only reads it"
)
_UPDATE = "write into it in place (`tensor.copy_(new)` under torch.no_grad(), in the model's forward too)"


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
        static_inputs: Roles = (),
        mutated_inputs: Roles = (),
        module_inputs: Roles = (),
        layout_inputs: Roles = (),
        input_names: Sequence[str] = (),
        policy: CapturePolicy | None = None,
    ) -> None:
        #: the runtime mode at which this wrapper captures and replays
        self.mode = CUDAGraphMode.parse(mode)
        if self.mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
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
        self._call_of = functools.partial(
            Call.of,
            static=tuple(static_inputs),
            mutated=tuple(mutated_inputs),
            module_owned=tuple(module_inputs),
            layout=tuple(layout_inputs),
            names=tuple(input_names),
        )
        self._policy = policy or CapturePolicy()
        self._clones = self._policy.clones_outputs
        self.table = EntryTable(self.region, self.mode)  #: its graphs, by key
        self._recorder = Recorder(self.table, runnable, runtime, self._policy)
        self._flat_spec: Any = None
        runtime.adopt(self.table, shows_stale=self._policy.compare)

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
        if context.runtime_mode is not self.mode:
            return self._runnable(*args, **kwargs)
        if len(kwargs) > 1:  # calls that differ only in keyword order share a graph
            kwargs = dict(sorted(kwargs.items()))
        leaves, spec = trees.flatten((args, kwargs))
        return self._under_graph(context, leaves, spec, None, None)

    def call_flat(
        self,
        context: ForwardContext,
        args: Sequence[Any],
        *,
        clone: bool | None = None,
        is_outermost: bool | None = None,
    ) -> Any:
        """Capture or replay with flat positional arguments; faster than a call, which has to flatten them.

        The context's runtime mode must be this wrapper's. ``clone`` copies outputs out of the pool; None follows the
        policy. ``is_outermost`` is what ``PoolLease.acquire`` returned to a caller that holds the lease, else None.
        """
        return self._under_graph(context, list(args), self._spec_of(args), clone, is_outermost)

    def entry_for(self, descriptor: BatchDescriptor, args: list[Any]) -> GraphEntry | None:
        """The graph that replays a :meth:`call_flat` with these arguments; None if there is none yet."""
        return self.table.find(descriptor, args, self._spec_of(args))[0]

    def _spec_of(self, args: Sequence[Any]) -> Any:
        if self._flat_spec is None or self._flat_spec.num_leaves != len(args):
            self._flat_spec = trees.flatten((tuple(args), {}))[1]
        return self._flat_spec

    def _under_graph(
        self, context: ForwardContext, leaves: list[Any], spec: Any, clone: bool | None, is_outermost: bool | None
    ) -> Any:
        self._refuse_grad(leaves)  # guard: grad_mode
        operators.refuse_transform(self.name, operators.transform_over(leaves))  # guard: transforms_refused
        lease, is_leased = self._runtime.lease, is_outermost is not None
        if not is_leased:
            is_outermost = lease.acquire(context, leaves, self.name)
        try:
            descriptor, recorded = context.batch_descriptor, None
            assert descriptor is not None, "FULL and PIECEWISE come with a descriptor"
            entry, elsewhere = self.table.find(descriptor, leaves, spec)
            if entry is None:
                entry, recorded = self._missing(context, descriptor, leaves, spec, elsewhere)
                if entry is None:
                    args, kwargs = trees.unflatten(leaves, spec)
                    return self._runnable(*args, **kwargs)
            plan, outputs = entry.plan, entry.outputs
            plan.check(leaves, context)
            clones = self._clones if clone is None else clone
            if plan.inputs.written or entry.outputs.viewed_positions:  # guard: stale_arguments_in_views
                leaves = lease.without_stale(leaves, plan.dynamic_positions)
            compare = None
            if self._policy.compare:
                compare = compared(entry, self._runnable, leaves, context, lease.device_for(leaves).device)
            lease.forward_entries.append(entry)
            with without_grad():
                replayed = plan.run(leaves, lease) if recorded is None else self._first_replay(plan, leaves, descriptor)
                results = outputs.for_caller(replayed, clone=clones)
            if compare is not None:
                compare(results, leaves)
            if recorded is not None and not clones:
                results = outputs.owning(results, recorded)
            if is_outermost and self._policy.compare and not clones:
                results = lease.tracking_views(results, outputs.pool_storages, self.name)
        finally:
            if not is_leased:
                lease.release()
        return entry.build_result(results)

    def _first_replay(self, plan: ReplayPlan, leaves: list[Any], descriptor: BatchDescriptor) -> Any:
        start_s = time.perf_counter()
        replayed = plan.run(leaves, self._runtime.lease)
        row = self.replays(descriptor)
        row.least_s = min(row.least_s, time.perf_counter() - start_s)
        return replayed

    def _refuse_grad(self, leaves: Sequence[Any]) -> None:
        if operators.needs_grad(leaves):
            raise CaptureError(
                f"{self.name} cannot replay under autograd",
                expected="a call under torch.no_grad() or torch.inference_mode()",
                found="grad mode on and an input that requires grad",
                remedy="wrap the forward in `with torch.inference_mode():`",
            )

    # -- a key without a graph for these arguments --------------------------------------------------------------------

    def _missing(
        self,
        context: ForwardContext,
        descriptor: BatchDescriptor,
        leaves: list[Any],
        spec: Any,
        elsewhere: GraphEntry | None,
    ) -> tuple[GraphEntry | None, Sequence[Any] | None]:
        """Capture; returns the entry and its recorded outputs, or no entry if the call has to go on eagerly."""
        permission = self._runtime.scopes.permission(self._policy)
        if elsewhere is not None and permission is Permission.NEVER:
            # An earlier region was captured again, so its output moved. The checks refuse that input.
            return elsewhere, None
        args, kwargs = trees.unflatten(leaves, spec)
        try:
            return self._capture(context, descriptor, self._call_of(args, kwargs, spec=spec), permission)
        except Exception as error:
            is_alone = not isinstance(error, AgreementError)  # else the other ranks are elsewhere
            if permission is not Permission.AUTOMATIC or self.mode is CUDAGraphMode.FULL or not is_alone:
                raise
            # The step goes on eagerly: other regions have run, and the failed capture undid its own effects.
            self._runtime.scopes.failures.append(error)
            return None, None

    def _capture(
        self, context: ForwardContext, descriptor: BatchDescriptor, call: Call, permission: Permission
    ) -> tuple[GraphEntry, Sequence[Any]]:
        table = self.table
        key = table.keys.get(descriptor) or KeyEntries()
        baked = self._static_positions_for_new_graph(context, descriptor, key, call, permission)
        table.keys[descriptor] = key
        entry, recorded = self._recorder.record(context, call, baked)
        table.add(key, call.leaves, call.module_owned, entry)
        row = self.replays(descriptor)
        freed = functools.partial(_drop_freed, weakref.ref(self), weakref.ref(key), descriptor, id(entry), row, row.n)
        for position in call.module_owned.intersection(entry.plan.statics.positions):
            died = functools.partial(freed, position)
            entry.watches.append(memory.watch_storage(call.leaves[position], died))
        return entry, recorded

    def _static_positions_for_new_graph(
        self,
        context: ForwardContext,
        descriptor: BatchDescriptor,
        key: KeyEntries,
        call: Call,
        permission: Permission,
    ) -> frozenset[int]:
        """The positions of the inputs that the new graph of a key may bake in; an error if it may not be captured.

        Where a static input has moved, the key is captured for the new set; beyond :data:`MAX_STATIC_SETS` of one
        module instance, moving inputs are staged. 24 blocks that share a region have different parameters without any
        moving.
        """
        is_lazy, is_automatic = permission is Permission.LAZY, permission is Permission.AUTOMATIC
        inside, owner_ids = call.sharing(call.static) - call.static, call.owner_ids()
        peers = [
            statics
            for statics in (
                *(entry.plan.statics for entry in key),
                *(statics for statics in key.freed_sets if statics.owner_ids == owner_ids),
            )
            if statics.spec == call.spec and call.static | inside >= set(statics.positions)
        ]
        own = [statics for statics in peers if statics.owner_ids == owner_ids]
        moved = sorted({p for statics in own or peers for p in statics.moved(call.leaves)})
        # guard: moved_input_refused
        if moved and (permission is Permission.NEVER or (is_lazy and self._policy.on_moved_input == "error")):
            raise self._moved(peers[0], call, moved[0])
        if permission is Permission.NEVER:  # guard: capture_closed
            raise self._not_captured(descriptor)
        if is_lazy:
            self._refuse_lazy_capture_across_ranks(context)  # guard: lazy_capture_across_ranks
            self._runtime.warn(
                "captured while serving, as lazy_capture allows; a capture takes much longer than a replay",
                "capture the key inside `with runtime.capturing():`",
                at=f"{self.region} {descriptor}",
            )
        elif is_automatic and key.freed and not peers:
            return self._positions_after_freed(descriptor, key, call)
        elif is_automatic and not moved:
            self._runtime.ledger.note(_BY_ITSELF, at=f"{self.region} {descriptor}")
        if not moved:
            return call.static
        return self._positions_after_moves(descriptor, call, moved, len(peers), len(own), is_serving=is_automatic)

    def _positions_after_moves(
        self,
        descriptor: BatchDescriptor,
        call: Call,
        moved: list[int],
        num_peers: int,
        num_own: int,
        *,
        is_serving: bool,
    ) -> frozenset[int]:
        at = f"{self.region} {descriptor} ({', '.join(call.names[p] for p in moved[:3])})"
        inside = (call.sharing(call.static) - call.static).intersection(moved)
        if num_own < MAX_STATIC_SETS:  # guard: max_static_sets
            text = "static inputs moved, so their key was captured once more"
            if num_own and is_serving:
                self._runtime.warn(text, _INDEX if inside else _REFILL, at=at)
            else:  # another instance of the module, a lazy capture, or one that the caller asked for
                self._runtime.note(text, at=f"{at}, set {num_peers + 1}")
            return call.static
        if inside:  # guard: moves_inside_static
            raise StaticInputError(
                f"{call.names[min(inside)]!r} of {self.region} keeps moving inside a static input",
                expected=f"at most {MAX_STATIC_SETS} offsets in it: a copy would hide that the two share memory",
                found=f"{num_own} offsets captured, and another one now",
                remedy=_INDEX,
            )
        self._runtime.warn("static inputs keep moving, and are copied from now on", _STAYS, at=at)
        return call.static - set(moved)

    def _positions_after_freed(self, descriptor: BatchDescriptor, key: KeyEntries, call: Call) -> frozenset[int]:
        at = f"{self.region} {descriptor} ({', '.join(call.names[p] for p in sorted(key.freed)[:3])})"
        keeps_moving = {p for p, times in key.freed_soon.items() if times >= MAX_STATIC_SETS}
        if keeps_moving & key.freed:
            self._runtime.warn("a static input is replaced again and again, and copied from now on", _UPDATE, at=at)
        else:
            self._runtime.warn(
                "captured again while serving, because a static input was replaced, which dropped its graph",
                f"{_UPDATE}, or capture again before serving: capture() or precapture()",
                at=at,
            )
        return call.static - keeps_moving  # guard: replaced_inputs_copied

    def _moved(self, captured: StaticSet, call: Call, position: int) -> StaticInputError:
        return StaticInputError(
            f"static input {call.names[position]!r} of {self.region} moved",
            expected=f"address {captured.addresses[position] or 0:#x}, as captured",
            found=f"{call.leaves[position].data_ptr():#x}",
            remedy="refill it in place (`tensor.copy_(new)`), capture the key for the new address inside "
            "`with runtime.capturing():`, or set on_moved_input='copy' to capture it while serving (and "
            "lazy_capture=True, if you set the forward context)",
        )

    def _refuse_lazy_capture_across_ranks(self, context: ForwardContext) -> None:
        ranks = context.num_tokens_across_dp
        if ranks is not None and len(ranks) > 1:
            raise CaptureError(
                f"{self.region} would be captured lazily under data parallel",
                expected="a capture of every key before the first batch, on all ranks",
                found=f"lazy_capture with {len(ranks)} ranks",
                remedy="capture inside `with runtime.capturing():` on every rank",
            )

    def _not_captured(self, descriptor: BatchDescriptor) -> CaptureError:
        captured = ", ".join(sorted(str(key) for key in self.table.descriptors())) or "nothing"
        found = f"captured at {self.mode}: {captured}"
        if self.table.at(descriptor):
            found += "; this key with other arguments, or with inputs that share memory in another way"
        older = self._runtime.captured_before(self.region.callable).get((self.mode, descriptor))
        if older is not None:
            found += f"; {older} has this key, but torch.compile has compiled the function again since"
        return CaptureError(
            f"{self.region} has no graph for {self.mode} {descriptor}, and capture is closed",
            expected="a key that was captured",
            found=found,
            remedy="dispatch among captured keys, capture inside `with runtime.capturing():`, or set lazy_capture=True",
        )

    # -- its counts and graphs -----------------------------------------------------------------------------------------

    def counts(self) -> Mapping[BatchDescriptor, Counts]:
        """Warm-ups, captures, replays and copies so far, for each key."""
        return {use.key: use.counts for use in self.table.uses(self._runtime.ledger)}

    def replays(self, descriptor: BatchDescriptor) -> Row:
        """The counts of replays of a key."""
        return self._runtime.ledger.rows(self.region, "replayed")[self.mode, descriptor]

    def captured(self) -> list[BatchDescriptor]:
        """The descriptors that have a graph now."""
        return self.table.descriptors()


def _drop_freed(
    owner: weakref.ref[CUDAGraphWrapper],
    key: weakref.ref[KeyEntries],
    descriptor: BatchDescriptor,
    entry_id: int,
    replays: Row,
    replayed_before: int,
    position: int,
    _dead: Any,
) -> None:
    """Drop an entry, because the storage of its static input at ``position`` was freed; keeps nothing alive."""
    wrapper, entries = owner(), key()
    if wrapper is None or entries is None:
        return
    # guard: dead_parameters
    if entries.drop_freed(entry_id, position, replays.n - replayed_before):
        wrapper._runtime.lease.entries_dropped()
        wrapper._runtime.note("a parameter died, its graph was dropped", at=f"{wrapper.name} {descriptor}")
