"""Capture scopes: the permission to capture, which one thread has at a time, and what its calls reached."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graphpass.errors import CaptureError

__all__ = ["CaptureScope", "CaptureScopes", "EnteredCallable"]


@dataclass(slots=True)
class CaptureScope:
    """What was reached inside one ``with runtime.capturing():``.

    Attributes:
        reached: (callable, its flat arguments, its flat outputs), in the order of the calls.
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

    reached: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
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

    def __init__(self, reached: Any, args: tuple[Any, ...]) -> None:
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
