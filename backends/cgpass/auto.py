"""The dispatcher nobody provided: a callable that picks, captures and replays its own keys.

A call without a forward context tells its sizes by its arguments. They choose a key; its first call runs the compiled
regions and warms them, the next one captures, later ones replay. Sizes whose padding cannot reach a real entry round up
to a ladder: the graph's inputs are padded, its outputs cut. Dynamo has run the user's Python by then, with the user's
own tensors, so nothing of the padding leaks into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cgpass.calls import AutoCall, AutoRules, CallTable
from cgpass.graphsizes import GraphSizes
from cgpass.paddingcheck import PaddedCall, padding_reaches
from graphpass.capture.counts import Counts
from graphpass.capture.records import RegionId
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.snapshot import state_kept
from graphpass.capture.traffic import CallCounts
from graphpass.compat import memory, trees
from graphpass.context import ForwardContext
from graphpass.dispatch.recurring import KeyStep, RecurringKey
from graphpass.errors import CaptureError, MismatchError, StaticInputError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["AutoDispatcher", "RunsGraphs"]

_log = logging.getLogger("graphpass")
_FIRST_CALLS = "first calls of a key"
_BUSY = "another capture or forward of the runtime was under way"


class RunsGraphs(Protocol):
    """The callable that a dispatcher works for."""

    name: str
    runtime: GraphRuntime
    returns_flat: bool

    def run_plain(self, args: Sequence[Any]) -> Any:
        """Run the compiled regions, without graphs."""

    def run_key(self, context: ForwardContext, args: Sequence[Any], *, clone: bool | None) -> Any:
        """Capture or replay the key of ``context``; ``clone`` as the policy says where it is None.

        Raises:
            CaptureError: there is no graph for these arguments, and capture is closed; nothing has run.
            StaticInputError: the same, since a static input has moved.
        """

    def uncounted(self, descriptor: BatchDescriptor) -> AbstractContextManager[None]:
        """Do not count the replays of a key in the body."""

    def can_replay(self, context: ForwardContext, args: Sequence[Any]) -> bool:
        """Whether :meth:`run_key` may be tried while capture is closed: it replays, or it raises before it runs."""


@dataclass(slots=True)
class _Checked:
    """How far one key's padding was checked."""

    calls: int = 0
    smallest: tuple[int, ...] | None = None


class _NoGraphNowError(Exception):
    """Control flow: this call has to run without a graph; nothing of it has run yet."""


class AutoDispatcher:
    """Dispatches the calls of one callable that come without a forward context.

    Args:
        owner: the callable.
        graph: the sizes of its graph.
        rules: what it goes by.

    Attributes:
        name: the callable's, for the runtime that counts the buffers.
    """

    def __init__(self, owner: RunsGraphs, graph: GraphSizes, rules: AutoRules) -> None:
        self._owner, self._rules = owner, rules
        self.region = RegionId(owner.name)
        self._runtime = owner.runtime
        self._table = CallTable(owner.name, owner.runtime, graph, rules)
        self._plain_counts: dict[str, CallCounts] = {}
        self._checked: dict[BatchDescriptor, _Checked] = {}
        self._refuted: str | None = None
        self._generation = self._runtime.lease.generation
        self._runtime.adopt(self)

    @property
    def rules(self) -> AutoRules:
        """What it goes by."""
        return self._rules

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run one call."""
        if self._rules.off is not None:
            return self._plain(self._rules.off, args)
        if self._runtime.is_busy() or memory.is_capturing_stream(self._runtime.lease.device):
            return self._plain(_BUSY, args)
        if any(not args[position].numel() for position in self._rules.dynamic):
            return self._plain("an input has no elements", args)
        call = self._call_of(args)
        step = self._rules.keys.step(call.key)
        try:
            if step is KeyStep.REPLAY:
                return self._run(call, args)
            if step is KeyStep.CAPTURE or (step is KeyStep.WARM and self._rules.is_strict):
                return self._captured(call, args)
        except _NoGraphNowError as reason:
            return self._plain(str(reason), args)
        if step is KeyStep.WARM:
            return self._plain(_FIRST_CALLS, args)
        return self._fall_back(self._rules.keys.reason(call.key) or "", call.key, args)

    @property
    def mode(self) -> CUDAGraphMode:
        """The level at which its keys are captured."""
        return self._rules.mode

    def counts(self) -> Mapping[BatchDescriptor, Counts]:
        """Nothing: the wrappers count their graphs."""
        return {}

    def captured(self) -> list[BatchDescriptor]:
        """Nothing: the wrappers have the graphs."""
        return []

    def hidden(self) -> Callable[[], None]:
        """Nothing to hide: while a throwaway scope is open, no call is dispatched here."""
        return lambda: None

    def buffer_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._table.num_bytes()

    def close(self) -> None:
        """Forget keys and buffers: the graphs are gone."""
        self._table.clear()
        self._checked.clear()
        self._rules.keys.forget()

    # -- ahead of the calls -------------------------------------------------------------------------------------------

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys that the capture sizes ask for, largest first; without capture sizes the example's own."""
        return [] if self._rules.off is not None else [key.descriptor for key in self._table.ladder_keys(args)]

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder` from graph inputs made of an example's; what the graph writes is restored.

        Raises:
            CaptureError: the key cannot be captured.
        """
        key = next(key for key in self._table.ladder_keys(args) if key.descriptor == descriptor)
        if key.is_captured:
            return
        example = self._table.stretched(args, key.sizes)
        written = [example[position] for position in self._rules.written]
        generators = [value for value in example if isinstance(value, torch.Generator)]
        with state_kept(written, generators, self._runtime.lease.device_for(example).device):
            self._captured(self._call_of(example), example)
        if not key.is_captured:
            raise CaptureError(
                f"{self._owner.name} could not be captured at {descriptor}",
                expected="a graph that can be captured at each of its capture sizes",
                found=key.reason or "inputs that share memory, or another capture under way",
                remedy="leave the size out of capture_sizes, or mend what the report says of it",
            )

    def _call_of(self, args: Sequence[Any]) -> AutoCall:
        if self._generation != self._runtime.lease.generation:  # some graph was dropped: what is left is counted anew
            self._generation = self._runtime.lease.generation
            self._rules.keys.recount()
        return self._table.call_of(args, as_is=self._refuted is not None)

    # -- without a graph ----------------------------------------------------------------------------------------------

    def _plain(self, reason: str, args: Sequence[Any]) -> Any:
        """Run without a graph, counted under its reason."""
        counts = self._plain_counts.get(reason)
        if counts is None:
            counts = self._runtime.traffic.of(self._owner.name, CUDAGraphMode.NONE, None, reason)
            self._plain_counts[reason] = counts
        counts.saw(0, 0)
        if self._rules.is_strict:
            raise self._refusal(reason, "padding_check is 'strict'", "set padding_check='prove'")
        return self._owner.run_plain(args)

    def _fall_back(self, reason: str, key: RecurringKey, args: Sequence[Any]) -> Any:
        """:meth:`_plain` for a key that recurs and gets no graph: ``on_fallback`` applies."""
        if self._rules.on_fallback == "error":
            raise self._refusal(reason, "on_fallback is 'error'", "set on_fallback='warn'")
        if self._rules.on_fallback == "warn" and reason not in self._plain_counts:
            _log.warning("%s %s runs without a graph: %s", self._owner.name, key.descriptor, reason)
        return self._plain(reason, args)

    def _refusal(self, reason: str, option: str, remedy: str) -> CaptureError:
        return CaptureError(
            f"{self._owner.name} would run without a graph, and {option}",
            expected="a call whose key has a graph, or may be captured now",
            found=reason,
            remedy=f"capture the sizes that come (capture_sizes, precapture), or {remedy}",
        )

    def _give_up(self, key: RecurringKey, error: BaseException) -> None:
        key.reason = f"its capture failed: {error}"
        _log.warning("%s %s runs without a graph: %s", self._owner.name, key.descriptor, key.reason)

    # -- over a graph -------------------------------------------------------------------------------------------------

    def _captured(self, call: AutoCall, args: Sequence[Any]) -> Any:
        """Run with the permission to capture what is missing."""
        if self._runtime.scopes.is_mine():  # ahead of the calls: whoever opened the scope sees the errors
            outputs = self._run(call, args)
            self._rules.keys.captured(call.key)
            return outputs
        with self._permission(call.key) as allowed:
            outputs = self._run(call, args)
        if allowed:
            self._rules.keys.captured(call.key)
            if self._runtime.lease.device is not None and self._runtime.lease.device.type == "cuda":
                torch.cuda.empty_cache()  # what the calls before have left cached, no replay needs
        return outputs

    @contextmanager
    def _permission(self, key: RecurringKey) -> Iterator[list[bool]]:
        """Permission to capture, for the body; a list that is empty afterwards where a capture failed."""
        allowed = [True]
        with self._runtime.scopes.opened_automatically() as scope:
            if scope is None:
                raise _NoGraphNowError(_BUSY)
            try:
                yield allowed
            except (_NoGraphNowError, MismatchError):
                raise
            except Exception as error:
                if self._rules.mode is not CUDAGraphMode.FULL:  # some regions may have run
                    raise
                self._give_up(key, error)
                raise _NoGraphNowError(key.reason) from error
            if scope.failures:
                allowed.clear()
                self._give_up(key, scope.failures[0])

    def _run(self, call: AutoCall, args: Sequence[Any]) -> Any:
        """Fill, replay and cut, as one critical section of the runtime; captures where that is permitted."""
        context = ForwardContext(
            None, self._rules.mode, call.key.descriptor, None, None, None, call.mask, None, owner=self._owner
        )
        if call.cuts is None:
            outputs = self._key_outputs(call, context, args, clone=None)
            call.counts.saw(1, 1)
            return outputs
        self._runtime.lease.acquire(context, args, self._owner.name)
        try:
            if call.cuts.views or any(padded.is_written for padded in call.inputs):
                # A view that an earlier call handed out is overwritten by this replay.
                args = self._runtime.lease.without_stale(args, tuple(self._rules.padded))
            if call.is_padded and self._is_due(call):
                with self._owner.uncounted(call.key.descriptor):
                    self._check(call, context, args)
            given = call.filled(args)
            returned = self._key_outputs(call, context, given, clone=False)
            flat = returned if self._owner.returns_flat else trees.flatten(returned)[0]
            cut = call.cuts.apply(flat, args)
            for padded in call.inputs:
                if padded.is_written:
                    args[padded.position].copy_(padded.real)
        finally:
            self._runtime.lease.release()
        call.counts.saw(_volume(call.real), _volume(call.key.sizes))
        if self._owner.returns_flat:
            return type(returned)(cut)
        return trees.unflatten(cut, trees.flatten(returned)[1])

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
            raise _NoGraphNowError(f"static inputs moved, and max_graphs={keys.max_graphs} are captured")
        with self._permission(call.key) as allowed:
            outputs = self._owner.run_key(context, args, clone=clone)
        if allowed:
            keys.captured(call.key)
        return outputs

    # -- the run-time check -------------------------------------------------------------------------------------------

    def _is_due(self, call: AutoCall) -> bool:
        if self._rules.checks == "never":
            return False
        checked = self._checked.setdefault(call.key.descriptor, _Checked())
        checked.calls += 1
        if checked.smallest is None:
            return True
        if self._rules.checks == "once":
            return False
        is_smaller = any(real < seen for real, seen in zip(call.real, checked.smallest, strict=True))
        return is_smaller or checked.calls & (checked.calls - 1) == 0

    def _check(self, call: AutoCall, context: ForwardContext, args: Sequence[Any]) -> None:
        """Compare replays with other contents of the padding; where they differ, nothing of this graph is padded again.

        Raises:
            MismatchError: they differ, and ``padding_check`` is ``strict``.
        """
        assert call.cuts is not None
        given = call.filled(args)

        def replay() -> Sequence[Any]:
            returned = self._key_outputs(call, context, given, clone=False)
            return returned if self._owner.returns_flat else trees.flatten(returned)[0]

        reached, is_noisy = padding_reaches(
            PaddedCall(
                inputs=call.inputs,
                declared=self._rules.declared,
                args=args,
                written=[(f"written input {p}", given[p]) for p in self._rules.written],
                generators=[value for value in args if isinstance(value, torch.Generator)],
                cuts=call.cuts,
                replay=replay,
                device=self._runtime.lease.device_for(given).device,
            )
        )
        checked = self._checked[call.key.descriptor]
        smallest = checked.smallest or call.real
        checked.smallest = tuple(min(pair) for pair in zip(call.real, smallest, strict=True))
        name = f"{self._owner.name} {call.key.descriptor}"
        if is_noisy:
            self._runtime.note(f"{name}: replays of equal contents differ; padding was compared within their spread")
        if reached is not None:
            self._refuted = f"real entries of {reached} depend on the padding"
            _log.warning("%s: %s; its calls are not padded any more", name, self._refuted)
            if self._rules.is_strict:
                raise MismatchError(
                    f"{name}: {self._refuted}",
                    expected="the same bits for every content of the padding",
                    found=f"others at the real sizes {call.real}",
                    remedy="declare what the model needs there (padding={input: value}), or mask it in the model",
                )
            raise _NoGraphNowError(self._refuted)


def _volume(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
