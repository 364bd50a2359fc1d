"""Capture scopes: permission for one thread to capture, and a record of the callables that its calls reach."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graphpass.capture.replayplan import ReplayPlan
from graphpass.compat.dynamo import SideEffect
from graphpass.errors import CaptureError
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason

__all__ = ["CallObserver", "CaptureScope", "CaptureScopes", "EnteredCallable", "ReachedCall", "ReachedCallable"]


class ReachedCallable(Protocol):
    """One compiled graph of a model: Dynamo calls it, and capture code captures its keys.

    Attributes:
        name: ``g0``, ``g1``, ... in the order of compilation.
        partition: a ``graphpass.regions.Partition``; typed Any because this package does not import FX code.
        traces: region name -> a ``graphpass.compile.RegionTrace``.
        static: positions of the arguments whose address graphs may bake in.
        returns_flat: the graph returns a tuple or list of values, not nested.
        ends_early: why the graph ends before the model does (a graph break), or None.
        never_full: the first region that a FULL graph cannot contain, with its reason, or None.
        side_effects: changes to Python state that Dynamo's code makes after the graph has run.
    """

    name: str
    partition: Any
    traces: Mapping[str, Any]
    static: tuple[int, ...]
    returns_flat: bool
    ends_early: str | None
    never_full: Reason | None
    side_effects: tuple[SideEffect, ...]

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of the configured capture sizes, largest first; ``args`` are flat example arguments."""

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`, with inputs resized from the flat example arguments ``args``."""


@dataclass(frozen=True, slots=True)
class ReachedCall:
    """One call of a callable inside a scope, or under an observer.

    Attributes:
        callable: the callable.
        args: its flat arguments.
        outputs: its flat outputs, none while it runs; holding them keeps their pool memory reserved.
        plan: the plan that replays it; None if it ran without a graph, or a part of it did.
    """

    callable: ReachedCallable
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    plan: ReplayPlan | None


class CallObserver(Protocol):
    """Sees every call of a graph in a forward whose context names it; it gives no permission to capture."""

    def entering(self, callable_: ReachedCallable, args: tuple[Any, ...]) -> None:
        """Called before a graph runs or is captured, with its flat arguments; an error prevents that."""

    def returned(self, call: ReachedCall) -> None:
        """Called after it has run."""


@dataclass(slots=True)
class CaptureScope:
    """State of one ``with runtime.capturing():``.

    Attributes:
        reached: the calls of callables, in order.
        keep_results: called with the flat outputs of each FULL capture, in warm-up and recording; returns the flat
            outputs that the graph returns. The function may copy results into memory outside the pool.
        prepare: called between the warm-up and the recording of each FULL capture, to restore state that the model
            reads besides its arguments.
        stops_at_entry: callables raise :class:`EnteredCallable` instead of running. Shows which callable a compiled
            call reaches, without side effects.
        reaches: a call without a forward context runs without graphs and is added to ``reached``.
        is_automatic: the auto dispatcher opened the scope, for one call. A region whose capture fails then runs without
            a graph, and its error is added to ``failures``.
        failures: the errors of failed captures.
    """

    reached: list[ReachedCall] = field(default_factory=list)
    keep_results: Callable[[list[Any]], list[Any]] | None = None
    prepare: Callable[[], object] | None = None
    stops_at_entry: bool = False
    reaches: bool = False
    is_automatic: bool = False
    failures: list[Exception] = field(default_factory=list)


class EnteredCallable(Exception):  # noqa: N818 - control flow, like StopIteration
    """Control flow, no error: a callable was reached in a scope that stops at entry.

    Args:
        reached: the callable.
        args: its flat arguments.
    """

    def __init__(self, reached: ReachedCallable, args: tuple[Any, ...]) -> None:
        super().__init__(reached, args)
        self.reached = reached
        self.args = args


class CaptureScopes:
    """The capture scopes of a runtime: at most one is open at a time, for the thread that opened it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scope: CaptureScope | None = None
        self._thread: int | None = None

    def current(self) -> CaptureScope | None:
        """The open scope, if this thread opened it; None otherwise."""
        return self._scope if self._thread == threading.get_ident() else None

    def is_mine(self) -> bool:
        """Whether this thread opened the scope that is open now."""
        return self._thread == threading.get_ident()

    def is_any_open(self) -> bool:
        """Whether a scope is open in any thread."""
        return self._lock.locked()

    @contextlib.contextmanager
    def opened(self) -> Iterator[CaptureScope]:
        """Allow this thread's calls to capture keys that have no graph yet, in the body of the ``with``.

        For many captures use :meth:`GraphRuntime.capturing <graphpass.capture.runtime.GraphRuntime.capturing>`, which
        also freezes existing objects for the garbage collector.

        Raises:
            CaptureError: a scope is open already.
        """
        if not self._lock.acquire(blocking=False):
            raise CaptureError(
                "this runtime is capturing already",
                expected="one capturing() scope at a time",
                found="a second one, in this or another thread",
                remedy="capture all keys inside one `with runtime.capturing():`",
            )
        with self._held(CaptureScope()) as scope:
            yield scope

    @contextlib.contextmanager
    def opened_automatically(self) -> Iterator[CaptureScope | None]:
        """Allow this thread's auto dispatcher to capture during one call; yields None if a scope is open already."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        with self._held(CaptureScope(is_automatic=True)) as scope:
            yield scope

    @contextlib.contextmanager
    def _held(self, scope: CaptureScope) -> Iterator[CaptureScope]:
        """Make ``scope`` this thread's; the caller has acquired ``_lock``."""
        self._scope, self._thread = scope, threading.get_ident()
        try:
            yield scope
        finally:
            self._scope = self._thread = None
            self._lock.release()
