"""The callable that Dynamo gets: compiled regions in stitched code, with FULL and PIECEWISE wrappers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass.appended import AppendedInputs
from cgpass.auto import AutoCall, AutoDispatcher, KnownReplay
from cgpass.keyrules import AutoRules
from cgpass.nograph import BUSY, CHECKED, NOT_PADDED, OTHER_INPUTS, NoGraphNowError
from cgpass.paddingcheck import PaddedCall, fault_of_padding
from cgpass.plans import ReplayPlans, wrapped_regions
from cgpass.sizes import NamedSizes
from graphpass.capture.outputs import clone_pool_tensors, own_objects
from graphpass.capture.pool import device_of
from graphpass.capture.replay import ReplayPlan, refuse_transforms
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CaptureScope, EnteredCallable, ReachedCall
from graphpass.capture.settings import restoring
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.compat import dynamo, memory, operators, saving, trees
from graphpass.compile import CompiledRegion, RegionTrace, Tuner, WaitingFunction
from graphpass.context import ForwardContext, current_context, entered, without_context
from graphpass.dispatch.recurring import RecurringKey
from graphpass.errors import CaptureError, ContextError, MismatchError, ShapeError, StaticInputError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.regions.split import Partition
from graphpass.report.records import CallableRecord, RegionId
from graphpass.saved.files import UsedKeys

_RUNS_BEFORE_ADVICE = 8
_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was partitioned and compiled."""

    record: CallableRecord  #: for reports: its name in the runtime, the graph break after it, what it cost
    rules: AutoRules | None  #: how it chooses graphs itself; None if a forward context does
    partition: Partition  #: regions and stitched code
    sizes: NamedSizes  #: the sizes that keys of a context have
    compiled: Mapping[str, CompiledRegion]  #: region name -> compiled region, for the captured ones
    traces: Mapping[str, RegionTrace]  #: region name -> its aten graph, for proofs
    used_argument_positions: Sequence[int]  #: of a call's arguments, in the order of the partition's inputs
    appended: AppendedInputs | None  #: the inputs after those, which Dynamo does not pass; None if there are none
    code: str  #: file and name of the function whose code the graph is: ``model.py:forward``
    returns_flat: bool  #: whether the graph returns a tuple or list of values that are not containers
    #: changes of Python state that Dynamo's code makes after the graph has run
    side_effects: tuple[dynamo.SideEffect, ...]


@saving.runs_compiled_ahead
class GraphedCallable:
    """One graph of a model: ``g0``, ``g1``, ...

    A FULL wrapper surrounds the stitched code, and a PIECEWISE wrapper surrounds each captured region in it. The kind
    of wrapper that the context's runtime mode names captures or replays; the other kind calls through.
    """

    def __init__(self, graph: CompiledGraph, runtime: GraphRuntime, settings: Settings) -> None:
        self.name, rules = graph.record.name, graph.rules
        name, ends = self.name, graph.record.ends
        self.side_effects = graph.side_effects
        self.traces = graph.traces
        self.code, self.ends_early = graph.code, None if ends is None else f"graph break: {ends}"
        self.returns_flat = graph.returns_flat
        self.partition = partition = graph.partition
        self.runtime = runtime
        self._used, self._appended = tuple(graph.used_argument_positions), graph.appended
        self._modes = settings.runtime_modes()
        self._policy = settings.policy
        self._compiled = dict(graph.compiled)
        functions = [region.function for region in graph.compiled.values()]
        self._waiting = [function for function in functions if isinstance(function, WaitingFunction)]
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
        self._sizes = graph.sizes
        self._runs_without_graph = 0
        self.never_full = partition.never_full()
        is_full = rules is not None and rules.mode is CUDAGraphMode.FULL
        self._knows_replays = is_full and not settings.policy.compare
        inner = [callee for callee in self._callees.values() if isinstance(callee, CUDAGraphWrapper)]
        wrappers = (self._full,) if is_full else tuple(inner)
        self._device = device_of([given.value for given in partition.inputs])
        self._auto = None if rules is None else AutoDispatcher(name, runtime, rules, settings, wrappers, self._device)
        places = graph.sizes.places() if rules is None else ()
        self._seen = tuple((runtime.ledger.sizes[field], position, dim) for field, position, dim in places)

    def runs(self, compiled: Mapping[str, CompiledRegion]) -> bool:
        """Whether the callable's regions are exactly the compiled objects in ``compiled``."""
        return self._compiled.keys() == compiled.keys() and all(
            region is compiled[name] for name, region in self._compiled.items()
        )

    def __call__(self, *given: Any) -> Any:
        """Run with Dynamo's arguments."""
        args = given if len(given) == len(self._used) else tuple([given[position] for position in self._used])
        if self._appended is None:
            return self.call(args)
        changed = self._appended.changed()  # guard: attributes_layout
        args = self._appended.after(args)
        return self.call(args) if changed is None else self._changed(changed, args)

    @classmethod
    def serialize_compile_artifacts(cls, _: Any) -> bytes:
        """Refuse to be saved by ``aot_compile``: graphs cannot leave their process."""
        raise CaptureError(
            "a callable with graphs cannot be saved by aot_compile",
            expected="a function that runs in this process",
            found=cls.__name__,
            remedy="leave out save_compiled_function(); warm_start=DIR saves what torch.compile compiled",
        )

    deserialize_compile_artifacts = serialize_compile_artifacts

    def call(self, args: tuple[Any, ...]) -> Any:
        """Run with one argument for each of the partition's inputs."""
        context = current_context()
        self.runtime.given_up.entered[self.name] += 1
        if operators.transform_over(args) is not None:
            return self._transformed(context, args)
        if self._waiting:
            self._compile_waiting(context)
        if context is None or context.capture is not None or context.owner is not None:
            return self._without_user_context(context, args)
        scope = self.runtime.scopes.current()
        if scope is not None and scope.stops_at_entry:
            raise EnteredCallable(self, args)
        if context.observer is not None:
            context.observer.entering(self, args)
        if not context.runtime_mode:
            return self._record_call(scope, context, args, self._stitched(*args))
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
        self._sizes.check(context.batch_descriptor, args)
        outputs, plan = self._as_a_whole(context, args, scope) if full else self._piecewise(context, args)
        return self._record_call(scope, context, args, outputs, plan)

    def _compile_waiting(self, context: ForwardContext | None) -> None:
        """Compile what has waited for a second call, or for a call that needs it now."""
        is_first = self.runtime.given_up.entered[self.name] == 1
        if is_first and context is None and self.runtime.scopes.current() is None:  # guard: compiled_when_needed
            return
        if memory.is_capturing_stream(self._device):  # guard: no_compilation_inside_a_capture
            return
        start_s = time.perf_counter()
        with restoring((), (), self._device), dynamo.errors_of_backend("cgpass"):
            compiled = [function.compile() for function in self._waiting]
        self._waiting = []
        self.runtime.compiled_later(self.name, sum(compiled), time.perf_counter() - start_s)

    def _transformed(self, context: ForwardContext | None, args: tuple[Any, ...]) -> Any:
        """Run a call under ``vmap`` or forward-mode AD as it was traced: compiled kernels would drop the tangents."""
        if context is not None and context.runtime_mode and context.capture is None and context.owner is None:
            refuse_transforms(self.name, args)
        self.runtime.warn(
            "a call under vmap or forward-mode AD runs without compiled code and graphs",
            "transform the model itself, or compile a function that has the transform inside",
            at=self.name,
        )
        return self._as_traced(args)

    def _changed(self, how: str, args: tuple[Any, ...]) -> Any:
        """Run a call on the traced graph, because compiled code would read an attribute in its old layout."""
        context, text = current_context(), "a tensor that compiled code reads has another layout than in its trace"
        remedy = "call torch.compiler.reset() after `tensor.data = other` of another layout"
        if context is not None and context.runtime_mode and context.capture is None and context.owner is None:
            raise ShapeError(f"{self.name}: {text}", expected="the layout of the trace", found=how, remedy=remedy)
        self.runtime.warn(f"{text}: its calls run without compiled code and graphs", remedy, at=f"{self.name} ({how})")
        return self._as_traced(args)

    def _as_traced(self, args: tuple[Any, ...]) -> Any:
        return self.partition.bind({r.name: r.graph_module.forward for r in self.partition.regions})(*args)

    def _record_call(
        self,
        scope: CaptureScope | None,
        context: ForwardContext | None,
        args: tuple[Any, ...],
        outputs: Any,
        plan: ReplayPlan | None = None,
    ) -> Any:
        """Tell the scope and the context's observer of a call that has run; returns its outputs."""
        observer = None if context is None else context.observer
        if scope is not None or observer is not None:
            reached = ReachedCall(self, args, tuple(trees.flatten(outputs)[0]), plan)
            if scope is not None:
                scope.reached.append(reached)
            if observer is not None:
                observer.returned(reached)
        return outputs

    def _without_user_context(self, context: ForwardContext | None, args: tuple[Any, ...]) -> Any:
        """Run a call without a user's context: in a capture, by the callable's own dispatcher, or without graphs."""
        if context is not None and context.capture is not None:
            return self._stitched(*args)
        if context is not None:  # set by the dispatcher of an enclosing callable, which holds the pool lease
            with without_context():
                return self._without_user_context(None, args)
        scope = self.runtime.scopes.current()
        if scope is not None and scope.reaches:
            return self._record_call(scope, None, args, self._stitched(*args))
        if self._auto is not None:
            return self._dispatched(self._auto, args, scope)
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

    # -- calls that the callable's own dispatcher decides about --------------------------------------------------------

    def _dispatched(self, auto: AutoDispatcher, args: Sequence[Any], scope: CaptureScope | None) -> Any:
        """Run a call as the dispatcher decides: replay, capture, or run the compiled regions without graphs."""
        call = auto.decide(args, scope)
        while not isinstance(call, Reason):
            try:
                if scope is not None or not call.key.is_captured:
                    return self._captured(auto, call, args, scope)
                returned = self._known_replay(call, args)
                if returned is not None:
                    return returned
                return self._run(auto, call, args, may_capture=False)
            except NoGraphNowError as error:
                call = auto.instead(call, args, error.reason)
        auto.without_graph(call)
        return self._stitched(*args)

    def _known_replay(self, call: AutoCall, args: Sequence[Any]) -> Any:
        """What a call returns that a known FULL graph serves; None for any other call."""
        # guard: known_replay_is_checked
        if not self._knows_replays or call.needs_check or torch.is_grad_enabled():
            return None
        lease = self.runtime.lease
        anchor, generation = args[self.static[0]].data_ptr() if self.static else 0, lease.generation
        known = call.known.get(anchor)
        if known is None or known.generation != generation:
            entry = self._full.entry_for(call.key.descriptor, call.placed(args))
            if entry is None:
                return None
            if len(call.known) >= _MAX_KNOWN:
                call.known.clear()
            known = call.known[anchor] = KnownReplay.of(entry, generation, call)
        if not known.is_direct:
            return None
        returned = known.run(call, args, lease, self.name, clones_outputs=self._policy.clones_outputs)
        if returned is not None:
            call.count()
        return returned

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone."""
        return [] if self._auto is None else [key.descriptor for key in self._auto.ladder(args)]

    def remember_keys(self, used: UsedKeys) -> None:
        """Add the keys that an earlier process used to the ladder; ``close()`` writes those of this process."""
        if self._auto is not None:
            self._auto.used = used

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`; afterwards, restore all tensors that the graph writes."""
        auto = self._auto
        assert auto is not None, "only a callable that dispatches by itself has a ladder"
        key = next(key for key in auto.ladder(args) if key.descriptor == descriptor)
        with torch.no_grad():  # as in the call: the step of an optimizer turns autograd off by itself
            call, example = auto.example_of(key, args)
            if self._appended is not None:
                example = self._appended.at_sizes_of(example)  # guard: real_sizes_of_examples
            written = [example[position] for position in auto.rules.written]
            generators = [value for value in example if isinstance(value, torch.Generator)]
            with restoring(written, generators, self.runtime.lease.device_for(example).device):
                self._captured(auto, call, example, self.runtime.scopes.current())
        if not key.is_captured:
            raise CaptureError(
                f"{self.name} could not be captured at {descriptor}",
                expected="a graph that can be captured at each of its capture sizes",
                found=str(key.refusal or "inputs that share memory, or another capture in progress"),
                remedy="leave the size out of capture_sizes, or fix the cause that the report names",
            )

    def _captured(self, auto: AutoDispatcher, call: AutoCall, args: Sequence[Any], scope: CaptureScope | None) -> Any:
        """Run, and capture each missing graph."""
        start_s = self._clock_s()
        if scope is not None:  # explicit capture: errors go to the caller who opened the scope
            is_new = not call.key.is_captured
            outputs = self._run(auto, call, args, may_capture=True)
            if is_new:
                auto.captured(call.key)
        else:
            with self._permission(auto, call.key):
                is_new = not call.key.is_captured  # guard: capture_timed_once
                outputs = self._run(auto, call, args, may_capture=True)
            device = self.runtime.lease.device
            if call.key.is_captured and device is not None and device.type == "cuda":
                torch.cuda.empty_cache()  # replays do not use blocks that earlier eager calls left in the cache
        if is_new and call.key.is_captured:
            auto.first_captured(call, self._clock_s() - start_s)
        return outputs

    def _clock_s(self) -> float:
        """Seconds on a clock that stands still while regions are tuned."""
        return time.perf_counter() - self.runtime.owned(Tuner).spent_s  # guard: tuning_is_no_capture

    @contextlib.contextmanager
    def _permission(self, auto: AutoDispatcher, key: RecurringKey) -> Iterator[None]:
        """Permit the capture of a key inside the ``with`` block; afterwards, record whether it succeeded."""
        with self.runtime.scopes.opened_automatically() as scope:
            if scope is None:
                raise NoGraphNowError(BUSY)
            try:
                yield
            except (NoGraphNowError, MismatchError):
                raise
            except Exception as error:
                if auto.rules.mode is not CUDAGraphMode.FULL:  # some regions may have run
                    raise
                raise NoGraphNowError(auto.failed(key, error)) from error
            if scope.failures:
                auto.failed_in_parts(key, scope.failures[0])
            else:
                auto.captured(key)

    def _run(self, auto: AutoDispatcher, call: AutoCall, args: Sequence[Any], *, may_capture: bool) -> Any:
        """Fill the buffers, replay and cut the outputs while holding the pool lease; capture if permitted."""
        context = ForwardContext(
            None, auto.rules.mode, call.key.descriptor, None, None, None, None, None, owner=self.name
        )
        if call.cuts is None:
            outputs = self._key_outputs(auto, call, context, args, may_capture=may_capture)
            call.count()
            return outputs
        lease = self.runtime.lease
        lease.acquire(context, args, self.name)
        try:
            if call.cuts.views or call.written:  # this replay overwrites views that an earlier call returned
                args = lease.without_stale(args, tuple(auto.rules.padded))
            if call.needs_check:  # guard: padding_checked_at_run_time
                self._check(auto, call, context, args, may_capture=may_capture)
            filled = call.filled(args)
            returned = self._key_outputs(auto, call, context, filled, may_capture=may_capture)
            cut = call.cuts.apply(self._flat(returned), args, lease.forward_storages)
            for padded in call.written:
                args[padded.position].copy_(padded.real)  # guard: padded_copy_back
        finally:
            lease.release()
        call.count()
        return type(returned)(cut) if self.returns_flat else _rebuilt(returned, cut)

    def _key_outputs(
        self, auto: AutoDispatcher, call: AutoCall, context: ForwardContext, args: Sequence[Any], *, may_capture: bool
    ) -> Any:
        """The outputs of a key. A key that has a graph, but not for these static inputs, may be captured once more."""
        key, is_cut = call.key, call.cuts is not None
        if may_capture:
            return self._run_key(context, args, is_cut=is_cut)
        # PIECEWISE without permission must replay as a whole: else some regions would have run before one is refused.
        is_full = auto.rules.mode is CUDAGraphMode.FULL
        plan = None if is_full else self._plans.serving(key.descriptor, args)
        if is_full or plan is not None:
            try:
                return self._run_key(context, args, is_cut=is_cut, plan=plan)
            except StaticInputError:
                if self._policy.on_moved_input != "copy":
                    raise
            except CaptureError:
                pass
        keys = auto.rules.keys
        if key.is_exact:  # guard: exact_for_other_inputs
            raise NoGraphNowError(OTHER_INPUTS)
        if not key.is_declared and keys.num_graphs >= keys.max_graphs:
            why = f"static inputs moved, and max_graphs={keys.max_graphs} graphs are captured"
            raise NoGraphNowError(Reason(why, "refill them in place (`tensor.copy_(new)`), or raise max_graphs"))
        with self._permission(auto, key):
            return self._run_key(context, args, is_cut=is_cut)

    def _run_key(
        self, context: ForwardContext, args: Sequence[Any], *, is_cut: bool, plan: ReplayPlan | None = None
    ) -> Any:
        """Capture or replay the key of ``context``; ``plan`` serves a PIECEWISE call, if it is known already.

        Outputs that are cut are not cloned before, and the pool lease is held until they are cut.
        """
        is_full = context.runtime_mode is CUDAGraphMode.FULL
        clone = is_outermost = False if is_cut else None
        if is_full:
            return self._full.call_flat(context, args, clone=clone, is_outermost=is_outermost)
        with entered(context):
            return self._piecewise(context, tuple(args), clone=clone, plan=plan)[0]

    def _check(
        self, auto: AutoDispatcher, call: AutoCall, context: ForwardContext, args: Sequence[Any], *, may_capture: bool
    ) -> None:
        """Replay with several contents of the padding; if real entries differ, pad no later call of this graph."""
        filled = call.filled(args)

        def replay() -> Sequence[Any]:
            return self._flat(self._key_outputs(auto, call, context, filled, may_capture=may_capture))

        with contextlib.ExitStack() as stack:
            for wrapper in (self._full, *self._callees.values()):
                if isinstance(wrapper, CUDAGraphWrapper):
                    stack.enter_context(wrapper.uncounted(call.key.descriptor))
            fault, is_noisy = fault_of_padding(
                PaddedCall(
                    call=call,
                    rules=auto.rules,
                    args=args,
                    filled=filled,
                    replay=replay,
                    run_unpadded=lambda: self._flat(self._stitched(*args)),
                    device=self.runtime.lease.device_for(filled).device,
                )
            )
        name = f"{self.name} {call.key.descriptor}"
        if is_noisy:
            text = "replays of equal contents differ; padding was compared within their spread"
            self.runtime.warn(text, "set torch.use_deterministic_algorithms(True) for a check by bits", at=name)
        call.key.is_checked = fault is None
        if fault is not None:
            auto.refute()
            self.runtime.warn(f"{fault}; its calls are no longer padded", NOT_PADDED, at=name)
            if auto.is_strict:
                raise MismatchError(
                    f"{name}: {fault}",
                    expected="real entries that do not depend on the padding",
                    found=f"others at the real sizes {call.real}",
                    remedy=NOT_PADDED,
                )
            raise NoGraphNowError(CHECKED)

    def _flat(self, returned: Any) -> Sequence[Any]:
        return returned if self.returns_flat else trees.flatten(returned)[0]

    # -- over graphs --------------------------------------------------------------------------------------------------

    def _as_a_whole(
        self, context: ForwardContext, args: tuple[Any, ...], scope: CaptureScope | None
    ) -> tuple[Any, ReplayPlan | None]:
        """Capture or replay the FULL graph; returns the outputs and, inside a capture scope, its plan."""
        if scope is None:
            return self._full.call_flat(context, args), None
        lease = self.runtime.lease
        # Under one lease: after its release, another thread's forward changes `forward_entries`.
        lease.acquire(context, args, self.name)
        try:
            return self._full.call_flat(context, args, is_outermost=False), lease.forward_entries[-1].plan
        finally:
            lease.release()

    def _piecewise(
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
                args = tuple(lease.without_stale(args, self._staged))
            plan = plan or self._plans.serving(descriptor, args)
            if plan is not None:
                plan.check(args, context)
                outputs = plan.run(args, lease)
            else:
                first = len(lease.forward_entries)
                outputs = self._stitched(*args)
                if not self._policy.compare:  # comparison with eager runs region by region, without a plan
                    plan = self._plans.add(descriptor, args, lease.forward_entries[first:])
            flat = self._flat(outputs)
            pool = lease.forward_storages
            # guard: piecewise_outputs_cloned
            leaves = clone_pool_tensors(flat, pool) if clones else own_objects(flat, pool)
            if is_outermost and self._policy.compare and not clones:
                leaves = lease.tracking_views(leaves, pool, self.name)
            return type(outputs)(leaves) if self.returns_flat else _rebuilt(outputs, leaves), plan
        finally:
            lease.release()


def _rebuilt(outputs: Any, flat: Sequence[Any]) -> Any:
    return trees.unflatten(flat, trees.flatten(outputs)[1])
