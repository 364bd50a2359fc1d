"""When graphs are captured: a wrapper's policy, and scopes, which permit one thread to capture.

Which graphs a call reaches is seen by the observer that its forward context names.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from graphpass.capture.replay import ReplayPlan
from graphpass.compat.sideeffects import SideEffect
from graphpass.errors import CaptureError, one_of
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """Whether a wrapper clones outputs, when it may capture, and how it handles static inputs that moved."""

    #: ``clone``: results are independent of later replays. ``view``: results lie in the pool, without a copy, and are
    #: valid until the next replay of any key of the runtime.
    outputs: Literal["clone", "view"] = "clone"
    #: ``copy``: capture the key again for the new address, if capture is allowed. ``error``: raise an error that names
    #: the input, unless a capture scope is open. Under a user's context, only a ``runtime.capturing()`` scope and
    #: ``lazy_capture`` allow a capture.
    on_moved_input: Literal["copy", "error"] = "copy"
    #: capture a key at its first use, also outside ``runtime.capturing()``, with a warning
    lazy_capture: bool = False
    #: also run the region eagerly at each replay, on copies, and raise an error if a result differs; overwrite stale
    #: output views with NaN, and report those that are still held after a later replay
    compare: bool = False

    def __post_init__(self) -> None:
        switches = ((name, (False, True)) for name in ("lazy_capture", "compare"))
        for name, allowed in (("outputs", ("clone", "view")), ("on_moved_input", ("copy", "error")), *switches):
            remedy = f"leave it out for {allowed[0]!r}"
            one_of(getattr(self, name), allowed, f"option {name} has no such value", remedy=remedy)

    @property
    def clones_outputs(self) -> bool:
        """Whether results are copied out of the pool."""
        return self.outputs == "clone"


class ReachedCallable(Protocol):
    """One compiled graph of a model: Dynamo calls it, and capture code captures its keys."""

    name: str  #: ``g0``, ``g1``, ... in the order of compilation
    partition: Any  #: a ``graphpass.regions.Partition``; typed Any because this package does not import FX code
    traces: Mapping[str, Any]  #: region name -> a ``graphpass.compile.RegionTrace``
    static: tuple[int, ...]  #: positions of the arguments whose address graphs may bake in
    returns_flat: bool  #: the graph returns a tuple or list of values, not nested
    code: str  #: file and name of the function whose code the graph is: ``model.py:forward``
    ends_early: str | None  #: why the graph ends before the model does (a graph break), or None
    never_full: Reason | None  #: the first region that a FULL graph cannot contain, with its reason, or None
    side_effects: tuple[SideEffect, ...]  #: changes to Python state that Dynamo's code makes after the graph has run

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of the configured capture sizes, largest first; ``args`` are flat example arguments."""

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`, with inputs resized from the flat example arguments ``args``."""


@dataclass(frozen=True, slots=True)
class ReachedCall:
    """One call of a callable under an observer."""

    callable: ReachedCallable
    args: tuple[Any, ...]  #: its flat arguments
    outputs: tuple[Any, ...]  #: its flat outputs, none while it runs; holding them keeps their pool memory reserved
    plan: ReplayPlan | None  #: the plan that replays it; None if it ran without a graph, or a part of it did


class CallObserver:
    """Sees the calls of a runtime's graphs in forwards whose context names it; it gives no permission to capture.

    ``entering`` gets the calls so far and the one that begins, which it may prevent. ``prepare`` restores what the
    model reads besides its arguments, before each FULL recording. ``keep_results`` may copy the flat outputs of a FULL
    graph out of the pool, in its warm-up and recording.
    """

    def __init__(
        self,
        runtime: object,
        entering: Callable[[list[ReachedCall]], object] = lambda calls: None,
        prepare: Callable[[], object] = lambda: None,
        keep_results: Callable[[list[Any]], list[Any]] = lambda outputs: outputs,
    ) -> None:
        self.runtime, self._entering, self.prepare, self.keep_results = runtime, entering, prepare, keep_results
        self.reached: list[ReachedCall] = []  #: the calls that have returned, in order

    def entering(self, callable_: ReachedCallable, args: tuple[Any, ...]) -> None:
        """Called before a graph runs or is captured, with its flat arguments."""
        self._entering([*self.reached, ReachedCall(callable_, args, (), None)])


class Permission(enum.Enum):
    """Who permits a call to capture a key that has no graph."""

    SCOPE = "a capture scope of the caller"
    AUTOMATIC = "the dispatcher of a callable, for one call"
    LAZY = "the option lazy_capture"
    NEVER = "nobody"


class CaptureScope:
    """The capture scopes of a runtime: at most one is open at a time, for the thread that opened it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        #: an auto dispatcher opened the scope, for one call. A region whose capture fails then runs without a graph,
        #: and its error is added to ``failures``.
        self.is_automatic = False
        self.failures: list[Exception] = []

    def current(self) -> CaptureScope | None:
        """The open scope, if this thread opened it; None otherwise."""
        return self if self._thread == threading.get_ident() else None

    def permission(self, policy: CapturePolicy) -> Permission:
        """Who permits a call of this thread, under this policy, to capture."""
        if self.current() is not None:
            return Permission.AUTOMATIC if self.is_automatic else Permission.SCOPE
        return Permission.LAZY if policy.lazy_capture else Permission.NEVER

    def is_any_open(self) -> bool:
        """Whether a scope is open in any thread."""
        return self._lock.locked()

    @contextlib.contextmanager
    def opened(self) -> Iterator[CaptureScope]:
        """Allow this thread's calls to capture keys that have no graph yet, in the body of the ``with``.

        For many captures use ``GraphRuntime.capturing``, which also freezes existing objects for the garbage collector.
        """
        with self.held(is_automatic=False) as scope:
            if scope is None:
                raise CaptureError(
                    "this runtime is capturing already",
                    expected="one capturing() scope at a time",
                    found="a second one, in this or another thread",
                    remedy="capture all keys inside one `with runtime.capturing():`",
                )
            yield scope

    @contextlib.contextmanager
    def held(self, *, is_automatic: bool) -> Iterator[CaptureScope | None]:
        """Open a scope for this thread, in the body; yields None if one is open already."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        self._thread, self.is_automatic, self.failures = threading.get_ident(), is_automatic, []
        try:
            yield self
        finally:
            self._thread, self.failures = None, []
            self._lock.release()
