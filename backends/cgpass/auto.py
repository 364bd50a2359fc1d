"""Dispatches calls without a forward context: chooses a key by the sizes of the arguments, captures and replays it.

The first call of a key runs the compiled regions without a graph and warms them up, the second captures, later calls
replay. A size whose padding cannot change real entries is rounded up to the next size of its ladder: the graph's inputs
are padded and its outputs cut. Dynamo has already run the user's Python with the unpadded tensors, so the user's code
never sees padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from cgpass.calls import AutoCall, AutoRules, CallTable
from cgpass.float64run import Float64Run
from cgpass.graphsizes import GraphSizes
from cgpass.paddingcheck import DueChecks, PaddedCall, RunsInFloat64, check_padding
from cgpass.reasons import (
    BUSY,
    CHECKED,
    EMPTY,
    FIRST_CALLS,
    NOT_PADDED,
    NUMBER_IN_KEY,
    FailedCaptures,
    NoGraphNowError,
    refused,
)
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.snapshot import restoring
from graphpass.compat import memory, trees
from graphpass.context import ForwardContext
from graphpass.dispatch.recurring import KeyStep, RecurringKey
from graphpass.errors import CaptureError, MismatchError, StaticInputError
from graphpass.keys import BatchDescriptor
from graphpass.ledger import CountedReason, Reason, Row, named_sizes
from graphpass.modes import CUDAGraphMode
from graphpass.regions.split import Partition
from graphpass.report.records import RegionId, RegionUse

__all__ = ["AutoDispatcher", "RunsGraphs"]


class RunsGraphs(Protocol):
    """The callable whose calls an :class:`AutoDispatcher` dispatches."""

    name: str
    runtime: GraphRuntime
    partition: Partition
    returns_flat: bool

    def run_plain(self, args: Sequence[Any]) -> Any:
        """Run the compiled regions, without graphs."""

    def run_key(self, context: ForwardContext, args: Sequence[Any], *, clone: bool | None) -> Any:
        """Capture or replay the key of ``context``.

        Args:
            context: forward context with the key and the runtime mode.
            args: the graph's arguments at the key's sizes.
            clone: whether outputs are copied out of the pool; None: as the capture policy says.

        Raises:
            CaptureError: these arguments have no graph and capture is not permitted; nothing has run.
            StaticInputError: the same, because a static input is at another address than at capture.
        """

    def uncounted(self, descriptor: BatchDescriptor) -> AbstractContextManager[None]:
        """Leave replays of this key inside the ``with`` block out of the counts."""

    def can_replay(self, context: ForwardContext, args: Sequence[Any]) -> bool:
        """Whether :meth:`run_key` without permission to capture either replays or raises before anything runs."""


class AutoDispatcher:
    """Dispatches the calls of one callable that have no forward context. Owns the padded input buffers.

    Args:
        owner: the callable.
        graph: the sizes of its graph.
        rules: keys, padding and checks of the graph.

    Attributes:
        region: identity under which the runtime reports the buffers.
    """

    def __init__(self, owner: RunsGraphs, graph: GraphSizes, rules: AutoRules) -> None:
        self._owner, self._rules = owner, rules
        self.region, self._runtime = RegionId(owner.name), owner.runtime
        self._table = CallTable(owner.name, owner.runtime, graph, rules)
        self._refused: dict[str, CountedReason] = {}
        self._failures = FailedCaptures(owner.name)
        self._due = DueChecks(rules.checks)
        self._is_refuted = False
        self._generation = self._runtime.lease.generation
        self._runtime.adopt(self)

    @property
    def rules(self) -> AutoRules:
        """Keys, padding and checks of the graph."""
        return self._rules

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run one call: replay, capture, or run without a graph.

        Args:
            args: the graph's arguments at their real sizes.

        Raises:
            CaptureError: the call would run without a graph, and the options make that an error.
            MismatchError: real entries depend on the padding, and ``padding_check`` is ``strict``.
            Inside the thread's own ``with runtime.capturing():`` also the errors of a capture.
        """
        off = self._rules.off
        if off is not None:
            return self._plain(off, args) if off.is_expected else self._fall_back(off, args)
        is_busy = self._runtime.is_busy()
        is_asked = is_busy and self._is_asked_to_capture()
        if (is_busy and not is_asked) or memory.is_capturing_stream(self._runtime.lease.device):
            return self._plain(BUSY, args)
        if any(not args[position].numel() for position in self._rules.dynamic):
            return self._plain(EMPTY, args)
        call = self._call_of(args)
        for seen, size in call.seen:
            seen[size] += 1
        step = KeyStep.CAPTURE if is_asked else self._rules.keys.step(call.key)
        try:
            if step is KeyStep.REPLAY:
                return self._run(call, args)
            if step is KeyStep.CAPTURE or (step is KeyStep.WARM and self._rules.is_strict):
                return self._captured(call, args)
        except NoGraphNowError as error:
            return self._plain(error.reason, args)
        if step is KeyStep.WARM:
            numbers = self._rules.keys.numbers(call.key)
            return self._plain(replace(NUMBER_IN_KEY, sizes=numbers) if numbers else FIRST_CALLS, args)
        reason = self._rules.keys.refusal(call.key)
        assert reason is not None, "only a key that gets no graph is refused"
        return self._fall_back(reason, args)

    @property
    def mode(self) -> CUDAGraphMode:
        """FULL or PIECEWISE: how keys are captured; NONE if they never are."""
        return self._rules.mode

    def uses(self) -> Iterator[RegionUse]:
        """Always empty: the wrappers count their graphs."""
        return iter(())

    def captured(self) -> list[BatchDescriptor]:
        """Always empty: the wrappers own the graphs."""
        return []

    def hidden(self) -> Callable[[], None]:
        """Hides nothing: no call is dispatched here while a throwaway scope is open. Returns a no-op."""
        return lambda: None

    def buffer_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._table.num_bytes()

    def close(self) -> None:
        """Drop keys and buffers; called when the graphs are dropped."""
        self._table.clear()
        self._due.clear()
        self._rules.keys.forget()

    # -- ahead of the calls -------------------------------------------------------------------------------------------

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone."""
        return [] if self._rules.off is not None else [key.descriptor for key in self._table.ladder_keys(args)]

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`; afterwards, restore all tensors that the graph writes.

        Args:
            descriptor: the key.
            args: example arguments; their entries are repeated to the sizes of the key.

        Raises:
            CaptureError: the key cannot be captured.
        """
        key = next(key for key in self._table.ladder_keys(args) if key.descriptor == descriptor)
        example = self._table.stretched(args, key.sizes)
        written = [example[position] for position in self._rules.written]
        generators = [value for value in example if isinstance(value, torch.Generator)]
        with restoring(written, generators, self._runtime.lease.device_for(example).device):
            # It serves nobody: the traffic has the calls of the user alone.
            self._captured(replace(self._call_of(example), counts=Row()), example)
        if not key.is_captured:
            raise CaptureError(
                f"{self._owner.name} could not be captured at {descriptor}",
                expected="a graph that can be captured at each of its capture sizes",
                found=str(key.refusal or "inputs that share memory, or another capture in progress"),
                remedy="leave the size out of capture_sizes, or fix the cause that the report names",
            )

    def _is_asked_to_capture(self) -> bool:
        """Whether the caller has opened a capture scope around this call, which lies in no other forward."""
        scope = self._runtime.scopes.current()
        return scope is not None and not scope.is_automatic and not self._runtime.lease.turn.is_mine()

    def _call_of(self, args: Sequence[Any]) -> AutoCall:
        if self._generation != self._runtime.lease.generation:  # some graph was dropped: count the remaining graphs
            self._generation = self._runtime.lease.generation
            self._rules.keys.recount()
        return self._table.call_of(args, as_is=self._is_refuted)

    # -- without a graph ----------------------------------------------------------------------------------------------

    def _plain(self, reason: Reason, args: Sequence[Any]) -> Any:
        """Run without a graph, count the call under ``reason``, and report the reason the first time."""
        refused_calls = self._refused.get(reason.why)
        if refused_calls is None:
            refused_calls = self._refused[reason.why] = self._runtime.ledger.without_graph(self._owner.name, reason)
        if refused_calls.count_call(reason) and not reason.is_expected:
            self._warn(reason)
        if self._rules.is_strict:
            raise refused(self._owner.name, reason, "padding_check is 'strict'", "set padding_check='prove'")
        return self._owner.run_plain(args)

    def _warn(self, reason: Reason) -> None:
        at = " ".join(filter(None, (self._owner.name, named_sizes(reason.sizes))))
        text, is_silent = f"runs without a graph: {reason.why}", self._rules.on_fallback == "silent"
        self._runtime.warn(text, reason.remedy, at=at, is_silent=is_silent, is_recorded=True)

    def _fall_back(self, reason: Reason, args: Sequence[Any]) -> Any:
        """Like :meth:`_plain`, for a key that recurs but has no graph: ``on_fallback`` may make it an error."""
        if self._rules.on_fallback == "error":
            raise refused(self._owner.name, reason, "on_fallback is 'error'", "set on_fallback='warn'")
        return self._plain(reason, args)

    # -- over a graph -------------------------------------------------------------------------------------------------

    def _captured(self, call: AutoCall, args: Sequence[Any]) -> Any:
        """Run, and capture each missing graph."""
        if self._runtime.scopes.is_mine():  # explicit capture: errors go to the caller who opened the scope
            outputs = self._run(call, args)
            if not call.key.is_captured:
                self._rules.keys.captured(call.key)
            return outputs
        with self._permission(call.key) as allowed:
            outputs = self._run(call, args)
        if allowed:
            self._rules.keys.captured(call.key)
            if self._runtime.lease.device is not None and self._runtime.lease.device.type == "cuda":
                torch.cuda.empty_cache()  # replays do not use blocks that earlier eager calls left in the cache
        return outputs

    @contextmanager
    def _permission(self, key: RecurringKey) -> Iterator[list[bool]]:
        """Permit capture inside the ``with`` block. Yields a list, which is empty afterwards if a capture failed."""
        allowed = [True]
        with self._runtime.scopes.opened_automatically() as scope:
            if scope is None:
                raise NoGraphNowError(BUSY)
            try:
                yield allowed
            except (NoGraphNowError, MismatchError):
                raise
            except Exception as error:
                if self._rules.mode is not CUDAGraphMode.FULL:  # some regions may have run
                    raise
                key.refusal = self._failures.failed(self._rules.keys.named(key), error)
                raise NoGraphNowError(key.refusal) from error
            if scope.failures:
                allowed.clear()
                key.refusal = self._failures.failed(self._rules.keys.named(key), scope.failures[0])
                self._warn(key.refusal)

    def _run(self, call: AutoCall, args: Sequence[Any]) -> Any:
        """Fill the buffers, replay and cut the outputs while holding the pool lease; capture if permitted."""
        context = ForwardContext(
            None, self._rules.mode, call.key.descriptor, None, None, None, call.mask, None, owner=self._owner
        )
        if call.cuts is None:
            outputs = self._key_outputs(call, context, args, clone=None)
            call.counts.n += 1
            call.counts.real += 1
            call.counts.padded += 1
            return outputs
        self._runtime.lease.acquire(context, args, self._owner.name)
        try:
            if call.cuts.views or any(padded.is_written for padded in call.inputs):
                # This replay overwrites views that an earlier call returned.
                args = self._runtime.lease.without_stale(args, tuple(self._rules.padded))
            if call.is_padded and self._due.takes(call):  # guard: padding_checked_at_run_time
                with self._owner.uncounted(call.key.descriptor):
                    self._check(call, context, args)
            filled = call.filled(args)
            returned = self._key_outputs(call, context, filled, clone=False)
            cut = call.cuts.apply(self._flat(returned), args, self._runtime.lease.forward_storages)
            for padded in call.inputs:
                if padded.is_written:
                    args[padded.position].copy_(padded.real)  # guard: padded_copy_back
        finally:
            self._runtime.lease.release()
        call.counts.n += 1
        call.counts.real += _volume(call.real)
        call.counts.padded += _volume(call.key.sizes)
        if self._owner.returns_flat:
            return type(returned)(cut)
        return trees.unflatten(cut, trees.flatten(returned)[1])

    def _flat(self, returned: Any) -> Sequence[Any]:
        return returned if self._owner.returns_flat else trees.flatten(returned)[0]

    def _key_outputs(self, call: AutoCall, context: ForwardContext, args: Sequence[Any], *, clone: bool | None) -> Any:
        if self._runtime.scopes.is_mine():
            return self._owner.run_key(context, args, clone=clone)
        if self._owner.can_replay(context, args):
            try:
                return self._owner.run_key(context, args, clone=clone)
            except StaticInputError:
                if not self._rules.moves:
                    raise
            except CaptureError:
                pass
        keys = self._rules.keys
        if not call.key.is_declared and keys.num_graphs >= keys.max_graphs:
            why = f"static inputs moved, and max_graphs={keys.max_graphs} graphs are captured"
            raise NoGraphNowError(Reason(why, "refill them in place (`tensor.copy_(new)`), or raise max_graphs"))
        with self._permission(call.key) as allowed:
            outputs = self._owner.run_key(context, args, clone=clone)
        if allowed:
            keys.captured(call.key)
        return outputs

    # -- the run-time check -------------------------------------------------------------------------------------------

    def _check(self, call: AutoCall, context: ForwardContext, args: Sequence[Any]) -> None:
        """Replay with several contents of the padding; if real entries differ, no later call of this graph is padded.

        Raises:
            MismatchError: real entries differ, and ``padding_check`` is ``strict``.
        """
        assert call.cuts is not None
        filled = call.filled(args)

        def replay() -> Sequence[Any]:
            return self._flat(self._key_outputs(call, context, filled, clone=False))

        def run_unpadded() -> Sequence[Any]:
            return self._flat(self._owner.run_plain(args))

        found = check_padding(
            PaddedCall(
                inputs=call.inputs,
                declared=self._rules.declared,
                args=args,
                written=[(f"written input {p}", filled[p]) for p in self._rules.written],
                generators=[value for value in args if isinstance(value, torch.Generator)],
                cuts=call.cuts,
                contents=self._rules.check_contents,
                replay=replay,
                run_unpadded=run_unpadded,
                in_float64=None
                if self._rules.checks == "once"
                else RunsInFloat64(Float64Run(self._owner.partition), self._table.amounts(call, args), context),
                device=self._runtime.lease.device_for(filled).device,
            )
        )
        name = f"{self._owner.name} {call.key.descriptor}"
        for text, remedy in found.limits():
            self._runtime.warn(text, remedy, at=name)
        if found.fault is not None:
            self._is_refuted = True
            self._runtime.warn(f"{found.fault}; its calls are no longer padded", NOT_PADDED, at=name)
            if self._rules.is_strict:
                raise MismatchError(
                    f"{name}: {found.fault}",
                    expected="real entries that do not depend on the padding",
                    found=f"others at the real sizes {call.real}",
                    remedy=NOT_PADDED,
                )
            raise NoGraphNowError(CHECKED)


def _volume(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
