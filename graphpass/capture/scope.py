"""Capture scopes: the permission to capture, which one thread has at a time, and what its calls reached."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graphpass.compat.sideeffects import SideEffect
from graphpass.errors import CaptureError
from graphpass.keys import BatchDescriptor

__all__ = ["CaptureScope", "CaptureScopes", "EnteredCallable", "ReachedCall", "ReachedCallable"]


class ReachedCallable(Protocol):
    """One graph of a model, as a compiler hands it to Dynamo and to the code that drives captures.

    Attributes:
        name: ``g0``, ``g1``, ... in the order of compilation.
        partition: a ``graphpass.regions.Partition``; this package knows no FX, so it has no type here.
        traces: region name -> a ``graphpass.compile.RegionTrace``.
        static: positions of the arguments whose address graphs may bake in.
        returns_flat: the graph returns a tuple or list of values, without structure inside.
        ends_early: why the graph ends before the model does (a graph break), or None.
        never_full: the first region that no graph of the whole can hold, with its reason, or None.
        side_effects: what Dynamo's code does to Python state after the graph has run.
    """

    name: str
    partition: Any
    traces: Mapping[str, Any]
    static: tuple[int, ...]
    returns_flat: bool
    ends_early: str | None
    never_full: str | None
    side_effects: tuple[SideEffect, ...]

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys that the capture sizes ask for, largest first."""

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder` from graph inputs made of an example's."""


@dataclass(frozen=True, slots=True)
class ReachedCall:
    """One call of a callable inside a scope.

    Attributes:
        callable: the callable.
        args: its flat arguments.
        outputs: its flat outputs; they keep their pool memory.
    """

    callable: ReachedCallable
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(slots=True)
class CaptureScope:
    """What was reached inside one ``with runtime.capturing():``.

    Attributes:
        reached: the calls of callables, in order.
        plans: the replay plan of each callable and key captured in the scope.
        keep_results: called with the flat outputs of each callable that is captured as a whole, while it is warmed up
            and recorded; the graph returns what it returns. Who wants results in memory of its own copies them there.
        prepare: called between the warm-up and the recording of each callable that is captured as a whole: what the
            model reads besides its arguments is as it was before the warm-up.
        stops_at_entry: callables raise :class:`EnteredCallable` instead of running: for whoever wants to know which
            callable a compiled call reaches, without its effects.
        reaches: a call without a forward context runs without graphs and enters ``reached``.
        is_automatic: the auto dispatcher opened the scope, for one call. A region whose capture fails then runs without
            a graph, and its error enters ``failures``.
        failures: the errors of captures that failed.
    """

    reached: list[ReachedCall] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
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
    """The scope of a runtime that is open now: at most one, of the thread that opened it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scope: CaptureScope | None = None
        self._thread: int | None = None

    def current(self) -> CaptureScope | None:
        """This thread's open scope."""
        return self._scope if self._thread == threading.get_ident() else None

    def is_mine(self) -> bool:
        """Whether this thread has the open scope."""
        return self._thread == threading.get_ident()

    def is_any_open(self) -> bool:
        """Whether some thread has a scope open."""
        return self._lock.locked()

    @contextlib.contextmanager
    def opened(self) -> Iterator[CaptureScope]:
        """Let this thread's calls capture keys that have no graph yet, for the body of the ``with``.

        :meth:`GraphRuntime.capturing <graphpass.capture.runtime.GraphRuntime.capturing>` is for many captures at once.

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
        """Let this thread's auto dispatcher capture, for one call; None while another scope is open."""
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
