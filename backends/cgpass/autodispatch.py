"""Runs the calls of a callable that have no forward context: replays, captures, or runs without a graph.

Why one has no graph is a reason with its remedy. What serves a call is looked up in :mod:`cgpass.servedcalls`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from cgpass.keyrules import AutoRules
from cgpass.paddingcheck import PaddedCall, fault_of_padding
from cgpass.servedcalls import ServedCall, ServedCalls
from cgpass.wrappers import CallableGraphs
from graphpass.capture.scope import CaptureScope
from graphpass.capture.settings import restoring
from graphpass.compat import memory
from graphpass.compile import chosen, summary
from graphpass.context import ForwardContext
from graphpass.dispatch.owngraphs import MOST_LOSSES, RecurringSize, Serve
from graphpass.dispatch.recurring import CALLS_OF_A_NUMBER, RecurringKey
from graphpass.errors import AgreementError, CaptureError, MismatchError, StaticInputError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import CountedReason, Reason, named_sizes, uncounted, why_failed
from graphpass.paddedcalls import run
from graphpass.report.problems import OF_A_NEW_KEY
from graphpass.saved.files import UsedKeys

_log = logging.getLogger("graphpass")

FIRST_CALLS = Reason(OF_A_NEW_KEY, "", is_expected=True)
EMPTY = Reason("an input has no elements", "", is_expected=True)
ON_THE_CPU = Reason("its tensors are on the CPU, and the graphs of the runtime on a GPU", "", is_expected=True)
OTHER_INPUTS = Reason("the graph of this size is for other static inputs", "", is_expected=True)
FASTER_WITHOUT = Reason("a run without a graph is faster than the graphs that hold the size", "", is_expected=True)
CHECKED = Reason("the check found that padding changes results", "", is_expected=True)
NUMBER_IN_KEY = Reason(
    "a Python number is part of the key, which gets a graph after"
    f" {CALLS_OF_A_NUMBER} calls with the same number and sizes",
    "pass the number as a tensor, or keep it in a buffer; where it is a size, pass a tensor that has it, and read its"
    " shape (x.shape[0])",
)
BUSY = Reason(
    "another capture or forward of the runtime was under way",
    "capture before other threads start (capture() or precapture()), or compile a model for each thread, with options"
    " runtime=graphpass.GraphRuntime(), dispatch='auto'",
)
PLAIN = "compiled once more, without what makes padding neutral, for graphs of sizes that recur"
NOT_PLAIN = "graphs of sizes that recur contain what makes padding neutral: it cannot be compiled without"
NOT_PADDED = (
    "correct the rule (register_padding_rule) or promise (rows_apart) that is wrong; a model with neither shows a fault"
    " of graphpass, which padding='never' avoids: report it"
)
_AFTER_FAILURE = "run it at that size with mode='NONE': if it fails there, too, the model causes it, else the capture"


class NoGraphNowError(Exception):
    """Control flow: this call must run without a graph, and no part of it has run yet."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.why)
        self.reason = reason


Failures: TypeAlias = dict[tuple[str, type[BaseException], str], Reason]
"""The captures of one callable that failed: one reason for all keys that fail at one place with one error."""


def of_failure(error: BaseException, known: Failures, name: str, sizes: Sequence[tuple[str, int]]) -> Reason:
    """The reason for all further calls of a key whose capture failed; the whole error is logged at DEBUG."""
    _log.debug("%s %s: %s", name, named_sizes(sizes), error)
    cause, where = error, ""
    if isinstance(error, CaptureError) and error.where:
        cause, where = error.__cause__ or error, error.where
    reason = why_failed(error, otherwise=_AFTER_FAILURE)
    # The text of an error of torch may have sizes; that of the first key stands for all.
    return replace(known.setdefault((where, type(cause), reason.remedy), reason), sizes=tuple(sizes))


def refused(name: str, reason: Reason, option: str, otherwise: str) -> CaptureError:
    """The error of a call that would run without a graph, where an option makes that an error."""
    remedy = reason.remedy or "capture the sizes that calls have (capture_sizes, then capture() or precapture())"
    return CaptureError(
        f"{name} would run without a graph, and {option}",
        expected="a call whose key has a graph, or may be captured now",
        found=str(reason),
        remedy=f"{remedy}, or {otherwise}",
    )


class AutoDispatcher:
    """Runs the calls of one callable that have no forward context."""

    def __init__(self, rules: AutoRules, graphs: CallableGraphs) -> None:
        self._rules, self._graphs, self._device = rules, graphs, graphs.device
        self._is_on_cpu = graphs.device.type == "cpu"
        self._name, self._runtime, self._settings = graphs.name, graphs.runtime, graphs.settings
        self._calls = ServedCalls(rules, graphs)
        self._refused: dict[str, CountedReason] = {}
        self._failures: Failures = {}
        self._generation = self._runtime.lease.generation
        self._knows_replays = rules.mode is CUDAGraphMode.FULL and not self._settings.policy.compare
        self.used: UsedKeys | None = None  #: with ``warm_start``: written when the graphs are dropped
        self._runtime.adopt(self)

    def call(self, args: Sequence[Any], scope: CaptureScope | None) -> Any:
        """Replay, capture, or run the compiled regions without graphs."""
        call = self._decided(args, scope)
        while not isinstance(call, Reason):
            try:
                if scope is not None or not call.key.num_graphs:
                    return self._captured(call, args, scope)
                returned = self._known_replay(call, args)
                if returned is not None:
                    return returned
                return self._run(call, args, may_capture=False)
            except NoGraphNowError as error:
                call = self._instead(call, args, error.reason)
        self._count_without_graph(call)
        return self._graphs.stitched(*args)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _decided(self, args: Sequence[Any], scope: CaptureScope | None) -> ServedCall | Reason:
        reason = self._never_or_not_now(scope)
        if reason is not None:
            return reason
        for position in self._rules.dynamic:
            if not args[position].numel():
                return EMPTY
        call, keys = self._call_of(args), self._rules.keys
        for seen, size in call.seen:
            seen[size] += 1
        if call.size is not None and scope is None:  # guard: exact_in_scopes
            served = self._serving(call, call.size, args)
            if isinstance(served, Reason):
                return served
            call = served
        if scope is not None or call.key.is_exact:
            return call
        if call.key.num_graphs:
            call.key.calls += 1
            return call
        is_warm, refusal = keys.counted(call.key), keys.refusal(call.key)
        if refusal is not None:
            return self._unless_error(refusal)
        if is_warm or self._is_strict:
            return call
        numbers = keys.numbers(call.key)
        return replace(NUMBER_IN_KEY, sizes=numbers) if numbers else FIRST_CALLS

    def _never_or_not_now(self, scope: CaptureScope | None) -> Reason | None:
        """Why no call, or none for the moment, runs over a graph; None if calls do."""
        off = self._rules.off
        if off is not None:
            return off if off.is_expected else self._unless_error(off)
        if self._is_beside_a_gpu():
            return ON_THE_CPU
        lease, scopes = self._runtime.lease, self._runtime.scopes
        is_busy = scopes.is_any_open() if scope is None else scope.is_automatic
        # guard: another_capture
        if is_busy or lease.turn.is_mine() or memory.is_capturing_stream(self._device):
            return BUSY
        return None

    @property
    def _is_strict(self) -> bool:
        return self._settings.padding_check == "strict"

    def _is_beside_a_gpu(self) -> bool:
        device = self._runtime.lease.device
        return self._is_on_cpu and device is not None and device.type != "cpu"

    def _count_without_graph(self, reason: Reason) -> None:
        calls = self._refused.get(reason.why)
        if calls is None:
            calls = self._refused[reason.why] = self._runtime.ledger.without_graph(self._name, reason)
        if calls.count_call(reason) and not reason.is_expected:
            self._warn(reason)
        if self._is_strict:
            raise refused(self._name, reason, "padding_check is 'strict'", "set padding_check='prove'")

    def _unless_error(self, reason: Reason) -> Reason:
        if self._settings.on_fallback == "error":
            raise refused(self._name, reason, "on_fallback is 'error'", "set on_fallback='warn'")
        return reason

    def _failed(self, key: RecurringKey, error: BaseException) -> Reason:
        key.refusal = of_failure(error, self._failures, self._name, self._rules.keys.named(key.sizes))
        size = self._calls.exact.find(key.sizes) if key.is_exact else None
        if size is not None:
            self._calls.exact.dropped(size, MOST_LOSSES)
        return key.refusal

    def _warn(self, reason: Reason) -> None:
        at, is_silent = f"{self._name} {named_sizes(reason.sizes)}".rstrip(), self._settings.on_fallback == "silent"
        text = f"runs without a graph: {reason.why}"
        self._runtime.warn(text, reason.remedy, at=at, is_silent=is_silent, is_recorded=True)

    # -- sizes that get graphs of their own ----------------------------------------------------------------------------

    def _instead(self, call: ServedCall, args: Sequence[Any], reason: Reason) -> ServedCall | Reason:
        """What serves a call whose graph cannot be captured or replayed now: padding, or no graph for this reason."""
        if not call.key.is_exact:
            return reason
        if call.size is not None and reason is OTHER_INPUTS and call.key.is_captured:
            self._calls.exact.drop(call.size, losses=1)
        return self._call_of(args)

    def _serving(self, call: ServedCall, size: RecurringSize, args: Sequence[Any]) -> ServedCall | Reason:
        is_due, has_own = size.replays >= size.asks_at, size.own_bytes is not None
        if not (is_due or has_own):
            return call
        if not has_own and call.key.num_graphs != 1:  # guard: exact_for_one_instance
            size.asks_at = 2 * size.replays
            return call
        serve = self._calls.exact.serve(size)
        if serve is Serve.PADDED:
            return call
        if serve is Serve.WITHOUT:
            return replace(FASTER_WITHOUT, sizes=self._rules.keys.named(call.real))
        if serve is Serve.PLAIN and self._compiled_plain():
            self._calls.exact.drop(size)
        return self._calls.own_of(call, args)

    def _compiled_plain(self) -> bool:
        """Compile the regions without what makes their padding neutral, if they are not; whether they are now."""
        start_s, problem = self._clock_s(), ""
        try:
            with restoring((), (), self._device):
                is_compiled = all(region.compile() for region in self._graphs.plain)
        except Exception as error:
            is_compiled, problem = False, f": {summary(error)}"
        self._calls.exact.compiled_plain(self._clock_s() - start_s, is_compiled=is_compiled)
        text = PLAIN if is_compiled else f"{NOT_PLAIN}{problem}"
        self._runtime.note(text, at=self._name)
        return is_compiled

    def _num_graphs(self, descriptor: BatchDescriptor) -> int:
        """How many graphs a key has: one for each set of static inputs; 0 if a region has none."""
        return min(map(len, self._graphs.entries_at(self._rules.mode, descriptor)), default=0)

    def _call_of(self, args: Sequence[Any]) -> ServedCall:
        if self._generation != self._runtime.lease.generation:  # some graph was dropped: count the remaining graphs
            self._generation = self._runtime.lease.generation
            self._rules.keys.recount(self._num_graphs)
            self._calls.exact.recount()
        return self._calls.of(args)

    # -- running ------------------------------------------------------------------------------------------------------

    def _known_replay(self, call: ServedCall, args: Sequence[Any]) -> Any:
        """What a call returns that a known FULL graph serves; None for any other call."""
        # guard: known_replay_is_checked
        if not self._knows_replays or call.needs_check or torch.is_grad_enabled():
            return None
        graphs, lease = self._graphs, self._runtime.lease
        anchor, generation = args[graphs.static[0]].data_ptr() if graphs.static else 0, lease.generation
        known = call.known.get(anchor)
        if known is None or known.generation != generation:
            entry = graphs.full.entry_for(call.key.descriptor, call.inputs.placed(args))
            if entry is None:
                return None
            known = call.know(anchor, entry, generation, clones=self._settings.policy.clones_outputs)
        if known.plan is None:
            return None
        returned = run(known, args, lease, self._name)
        if returned is not None:
            self._calls.count(call)
        return returned

    def _captured(self, call: ServedCall, args: Sequence[Any], scope: CaptureScope | None) -> Any:
        start_s = self._clock_s()
        if scope is not None:  # explicit capture: errors go to the caller who opened the scope
            is_new = not call.key.is_captured
            outputs = self._run(call, args, may_capture=True)
            self._rules.keys.captured(call.key, self._num_graphs(call.key.descriptor))
        else:
            # The graph of its own size may contain no insertions.
            is_plain = call.key.is_exact and call.size is not None and call.size.insertions_s is not None
            with (
                self._permission(call.key),
                chosen(self._graphs.plain) if is_plain else contextlib.nullcontext(),  # guard: plain_at_exact_sizes
            ):
                is_new = not call.key.is_captured  # guard: capture_timed_once
                outputs = self._run(call, args, may_capture=True)
            device = self._runtime.lease.device
            if call.key.is_captured and device is not None and device.type == "cuda":
                torch.cuda.empty_cache()  # replays do not use blocks that earlier eager calls left in the cache
        if is_new and call.key.is_captured:
            calls = self._calls.row_of(call.key) if call.results.is_cut else None
            self._calls.exact.captured(call.key, call.size, calls, self._clock_s() - start_s)
        return outputs

    def _clock_s(self) -> float:
        """Seconds on a clock that stands still while regions are tuned."""
        return time.perf_counter() - self._runtime.ledger.tuning_s  # guard: tuning_is_no_capture

    @contextlib.contextmanager
    def _permission(self, key: RecurringKey) -> Iterator[None]:
        with self._runtime.scopes.held(is_automatic=True) as scope:
            if scope is None:
                raise NoGraphNowError(BUSY)
            try:
                yield
            except (NoGraphNowError, MismatchError, AgreementError):
                raise
            except Exception as error:
                if self._rules.mode is not CUDAGraphMode.FULL:  # some regions may have run
                    raise
                raise NoGraphNowError(self._failed(key, error)) from error
            if scope.failures:
                self._warn(self._failed(key, scope.failures[0]))
            else:
                self._rules.keys.captured(key, self._num_graphs(key.descriptor))

    def _run(self, call: ServedCall, args: Sequence[Any], *, may_capture: bool) -> Any:
        context = ForwardContext(
            None, self._rules.mode, call.key.descriptor, None, None, None, None, None, owner=self._name
        )
        if not call.results.is_cut:
            outputs = self._key_outputs(call, context, args, may_capture=may_capture)
            self._calls.count(call)
            return outputs
        lease = self._runtime.lease
        lease.acquire(context, args, self._name)
        try:
            if call.results.views or call.results.written:  # the replay overwrites views of an earlier call
                args = lease.without_stale(args, tuple(self._rules.padded))
            if call.needs_check:  # guard: padding_checked_at_run_time
                self._check(call, context, args, may_capture=may_capture)
            call.inputs.fill(args)
            placed = call.inputs.placed(args)
            returned = self._key_outputs(call, context, placed, may_capture=may_capture)
            cut = call.results.hand_out(self._graphs.flat(returned), args, lease)
        finally:
            lease.release()
        self._calls.count(call)
        return self._graphs.rebuilt(returned, cut)

    def _key_outputs(self, call: ServedCall, context: ForwardContext, args: Sequence[Any], *, may_capture: bool) -> Any:
        """The outputs of a key. A key that has a graph, but not for these static inputs, may be captured once more."""
        key, is_cut = call.key, call.results.is_cut
        if may_capture:
            return self._graphs.run_key(context, args, is_cut=is_cut)
        # PIECEWISE without permission must replay as a whole: else some regions would have run before one is refused.
        is_full = self._rules.mode is CUDAGraphMode.FULL
        plan = None if is_full else self._graphs.plans.serving(key.descriptor, args)
        if is_full or plan is not None:
            try:
                return self._graphs.run_key(context, args, is_cut=is_cut, plan=plan)
            except StaticInputError:
                if self._settings.policy.on_moved_input != "copy":
                    raise
            except CaptureError:
                pass
        keys = self._rules.keys
        if key.is_exact:  # guard: exact_for_other_inputs
            raise NoGraphNowError(OTHER_INPUTS)
        if not key.is_declared and keys.num_graphs >= keys.max_graphs:
            why = f"static inputs moved, and max_graphs={keys.max_graphs} graphs are captured"
            raise NoGraphNowError(Reason(why, "refill them in place (`tensor.copy_(new)`), or raise max_graphs"))
        with self._permission(key):
            return self._graphs.run_key(context, args, is_cut=is_cut)

    def _check(self, call: ServedCall, context: ForwardContext, args: Sequence[Any], *, may_capture: bool) -> None:
        """Replay with several contents of the padding; if real entries differ, pad no later call of this graph."""
        call.inputs.fill(args)
        filled = call.inputs.placed(args)

        def replay() -> Sequence[Any]:
            return self._graphs.flat(self._key_outputs(call, context, filled, may_capture=may_capture))

        with uncounted(self._graphs.replays(call.key.descriptor)):
            fault, is_noisy = fault_of_padding(PaddedCall(call, self._rules, self._graphs, args, filled, replay))
        name = f"{self._name} {call.key.descriptor}"
        if is_noisy:
            text = "replays of equal contents differ; padding was compared within their spread"
            self._runtime.warn(text, "set torch.use_deterministic_algorithms(True) for a check by bits", at=name)
        call.key.is_checked = fault is None
        if fault is not None:
            self._calls.is_refuted = True
            self._runtime.warn(f"{fault}; its calls are no longer padded", NOT_PADDED, at=name)
            if self._is_strict:
                raise MismatchError(
                    f"{name}: {fault}",
                    expected="real entries that do not depend on the padding",
                    found=f"others at the real sizes {call.real}",
                    remedy=NOT_PADDED,
                )
            raise NoGraphNowError(CHECKED)

    # -- ahead of the calls -------------------------------------------------------------------------------------------

    def ladder(self, args: Sequence[Any]) -> list[RecurringKey]:
        """The keys of all capture sizes, largest first, or that of ``args`` alone; then those of an earlier process."""
        if self._rules.off is not None or self._is_beside_a_gpu():
            return []
        used = () if self.used is None else self.used.keys
        return self._rules.keys.ladder_keys(self._calls.sizes(args), used)

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`; afterwards, restore all tensors that the graph writes."""
        key = next(key for key in self.ladder(args) if key.descriptor == descriptor)
        with torch.no_grad():  # as in the call: the step of an optimizer turns autograd off by itself
            call, example = self._calls.example_of(key, args)
            if self._graphs.appended is not None:
                example = self._graphs.appended.at_sizes_of(example)  # guard: real_sizes_of_examples
            written = [example[position] for position in self._rules.written]
            generators = [value for value in example if isinstance(value, torch.Generator)]
            with restoring(written, generators, self._runtime.lease.device_for(example).device):
                self._captured(call, example, self._runtime.scopes.current())
        if not key.is_captured:
            raise CaptureError(
                f"{self._name} could not be captured at {descriptor}",
                expected="a graph that can be captured at each of its capture sizes",
                found=str(key.refusal or "inputs that share memory, or another capture in progress"),
                remedy="leave the size out of capture_sizes, or fix the cause that the report names",
            )

    # -- what the runtime asks ----------------------------------------------------------------------------------------

    def buffer_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._calls.num_bytes()

    def close(self) -> None:
        """Drop keys, buffers and all remembered calls; called when the graphs are dropped."""
        keys = self._rules.keys
        problem = None if self.used is None else self.used.write(keys.used(lambda key: self._calls.row_of(key).n))
        if problem is not None:
            self._runtime.ledger.note(problem, at=self._name, is_problem=True)
        self._calls.forget()
        keys.forget()
