"""The runtime owns everything that a set of graphs shares: pool, capture stream, entries and statistics.

The runtime of a ``torch.compile`` is an attribute of the object through which Dynamo calls the backend. So there is no
global registry, the caller's options are not changed, and the runtime is freed with that object.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar

import torch

from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import WRAPPER_EVENTS, EntryTable
from graphpass.capture.scope import CaptureScope
from graphpass.capture.settings import frozen_objects
from graphpass.capture.untracedcalls import GivenUpFunctions, against_recompiling
from graphpass.compat import dynamo, memory
from graphpass.errors import OptionError, named
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Ledger, Reason
from graphpass.report import Problem, Report
from graphpass.report.figures import ReportFigures, runtime_figures
from graphpass.report.records import TUNED, CallableRecord, Counts, RegionId, RegionUse, RuntimeStats

#: The oldest and the newest release of torch with which the tests have run.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
_ATTRIBUTE = "graphpass_runtime"
_OF_MODES = ("dispatch key", "grad_mode", "inference", "requires_grad")  # in guards
_SAME_MODE = "create all inputs and make all calls under torch.inference_mode(), or none"
_AFTER_A_CHANGE = (
    "capture again with each value before it serves (capture(), precapture(), or a call); keep a Python number that"
    " changes in a buffer"
)
_CALL_IT = (
    "call it once first, or pass options=cgpass.options(runtime=...) to torch.compile; if it has run, Dynamo compiled "
    f"no graph of it: TORCH_LOGS=graph_breaks says why, and for an RNN, GRU or LSTM {dynamo.ALLOW_RNN}"
)
_COMPILE_IT = (
    'it is not compiled: call its compile(backend="cgpass") if it is a module, or else use what torch.compile returns; '
    "the copy of a module that was compiled so has to be compiled, too"
)
_MANY = 8  # compilations of one function: the default of torch._dynamo.config.recompile_limit

_Owned = TypeVar("_Owned")


class _Owner(Protocol):
    def buffer_bytes(self) -> int: ...
    def close(self) -> None: ...


class GraphRuntime:
    """Owns the pool, capture stream, entries and statistics of every callable created with it.

    Use it as a context manager, or call :meth:`close` to free graphs and pool. Graphs of one runtime share a pool, so
    only one forward runs at a time; see :class:`~graphpass.capture.pool.PoolLease`.

    Args:
        pool: a CUDA graph pool handle to share with other graphs; None creates a private pool.
        device: the device its graphs run on; None means the device of the first captured call.
    """

    def __init__(self, pool: Any = None, *, device: torch.device | str | None = None) -> None:
        self.ledger = Ledger(dynamo.trace)
        self.lease = PoolLease(self.ledger, pool, None if device is None else torch.device(device))
        self.scopes = CaptureScope()
        self._owners: list[weakref.ref[_Owner]] = []
        self._callables: list[CallableRecord] = []
        self._captured_ahead: set[str] = set()
        self._loaded: list[tuple[weakref.ref[types.CodeType], str]] = []  # (code of a function, its loaded callable)
        self._retraced_for: str | None = None  # the first reason: one warning stands for all callables
        self._owned: dict[type, Any] = {}
        self._serves_calls = False
        #: {name of a callable: the ranks that capture it together}, see ``graphpass.ranks.lockstep``
        self.lockstep: dict[str, Any] = {}
        self.given_up = GivenUpFunctions()
        if torch_release() > NEWEST_TORCH:  # guard: newer_torch
            text = f"torch {torch.__version__} is newer than any release with which graphpass was tested"
            self.warn(text, "if something fails, install torch {}.{}".format(*NEWEST_TORCH))

    # -- what users call ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self, *, by_calls: bool = True) -> Iterator[CaptureScope]:
        """Allow this thread's calls to capture keys that have no graph yet, in the body of the ``with``.

        Objects that exist on entry are frozen (``gc.freeze``) for the body; the garbage collector runs on exit.

        Args:
            by_calls: calls of compiled functions will replay the graphs: warn if one of them would reach a compilation
                that has none. A manager, which replays without Dynamo, does not need that.

        Raises:
            CaptureError: a scope of this runtime is open already, or somebody else's capture of the current stream.
        """
        memory.refuse_inside_capture(self.lease.device or torch.device("cuda"), "capturing()")
        with self.scopes.opened() as scope:
            try:
                with frozen_objects():
                    yield scope
                    self._serves_calls |= by_calls
                    for problem in self._left_behind() if by_calls else ():
                        self.warn(problem.what, problem.remedy, is_recorded=True)
            finally:
                gc.collect()

    @contextlib.contextmanager
    def throwaway(self) -> Iterator[CaptureScope]:
        """:meth:`capturing` into a temporary pool, which is freed with all its graphs at the end of the body.

        The body starts without graphs: existing graphs, pool and counts are hidden, and restored at the end. Code
        compiled in the body stays compiled. No other thread may run a callable of this runtime in the meantime.

        Raises:
            CaptureError: a scope of this runtime is open already.
        """
        with self.scopes.opened() as scope, self._hidden(), frozen_objects():
            try:
                yield scope
            finally:
                gc.collect()  # while older objects are still frozen, so that only the body's objects are traversed

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        held, before = self.lease, self._alive()
        restores = [table.hide() for table in self._tables()]
        tables = self.ledger.tables.copy()
        self.ledger.tables.clear()
        self.lease = used = held.fork_empty()
        in_body = used.generation
        try:
            yield
        finally:
            for owner in self._alive():
                if not any(owner is one for one in before):  # compiled in the body: it stays, without graphs and counts
                    owner.close()
            for restore in restores:
                restore()
            tables |= {of: rows for of, rows in self.ledger.tables.items() if of[1] == TUNED}  # the choices stay, too
            self.lease, self.ledger.tables = held, tables
            held.shows_stale |= used.shows_stale
            if used.generation != in_body:  # a parameter died, and hidden graphs that read it were dropped with it
                held.entries_dropped()
            used.close()

    def counts(self) -> dict[tuple[str, CUDAGraphMode, BatchDescriptor], Counts]:
        """Counts so far by (region name, mode, descriptor); regions are named ``g0.r3``, a FULL graph ``g0.full``."""
        return {(str(use.region), use.mode, use.key): use.counts for use in self.uses()}

    def compiled(self) -> int:
        """Number of compiled artifacts of all registered callables."""
        return sum(record.artifacts for record in self._callables)

    def uses(self) -> list[RegionUse]:
        """Counts and costs so far of each region at each key that was captured."""
        return [use for table in self._tables() for use in table.uses(self.ledger)]

    def suggested_sizes(self, limit: int | None = None) -> dict[str, list[int]]:
        """The sizes with the least padding for the calls so far, as ``capture_sizes`` takes them.

        Args:
            limit: the most sizes of a key field; by default 16, and fewer where fields multiply.

        Returns:
            {key field: sizes}; without fields that are not padded.
        """
        return self.report().suggested_sizes(limit)

    def stats(self) -> RuntimeStats:
        """Totals over all callables."""
        counts = list(self.counts().values())
        return RuntimeStats(
            callables=len(self._callables),
            artifacts=self.compiled(),
            captured=sum(c.captured for c in counts),
            replayed=sum(c.replayed for c in counts),
            copied=sum(c.copied for c in counts),
            pool_bytes=self.pool_bytes(),
            buffer_bytes=self.buffer_bytes(),
            histograms={field: dict(seen) for field, seen in list(self.ledger.sizes.items())},
        )

    def report(self, subject: str = "a runtime") -> Report:
        """What is slow or missing, what replays, where padding goes, and what it cost; ``print`` it.

        Args:
            subject: what the report is about, for its title.
        """
        return Report(self.figures(subject))

    def figures(self, subject: str) -> ReportFigures:
        """The figures of a report."""
        is_timed = self.device is not None and self.device.type != "cpu"
        return runtime_figures(
            subject, self.ledger, self.callables(), self.uses(), self.stats(), self.noted(), is_timed=is_timed
        )

    @property
    def notes(self) -> Mapping[str, int]:
        """{log record of an explanation, as it was at first: how often it was added}."""
        return MappingProxyType(self.ledger.notes())

    def noted(self) -> tuple[Problem, ...]:
        """The explanations that the report does not derive from its records."""
        notes = (
            Problem("note", why.why, tuple(map(str, filter(None, list(note.places)))), why.where, note.n, why.remedy)
            for note, why in ((note, note.reason) for note in self.ledger.problems())
        )
        uncounted = (
            Problem("no graph", f"{why.why}; its later calls are not counted", (), why.where, None, why.remedy)
            for why in self.given_up.reasons(why for _, why in self.ledger.uncaptured)
        )
        return (*notes, *uncounted, *(self._left_behind() if self._serves_calls else ()))

    def close(self) -> None:
        """Drop all graphs and free the pool; callables still run, without graphs, and can be captured again."""
        for owner in self._alive():
            owner.close()
        self._captured_ahead.clear()
        self.lease.close()

    def __reduce__(self) -> tuple[type[GraphRuntime], tuple[()]]:
        # Graphs cannot be copied: the copy of a compiled model starts with a new, empty runtime.
        return (GraphRuntime, ())

    def __enter__(self) -> GraphRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pool_bytes(self) -> int:
        """Bytes of the graph pool; 0 on the CPU tape."""
        return self.lease.pool_bytes()

    def buffer_bytes(self) -> int:
        """Bytes of all static input buffers."""
        return sum(owner.buffer_bytes() for owner in self._alive())

    # -- what wrappers and compilers call --------------------------------------------------------------------------

    def adopt(self, owner: _Owner, *, shows_stale: bool = False) -> None:
        """Count, hide and close what this owns, by weak reference; forget the regions of wrappers that died.

        ``shows_stale`` makes every device overwrite stale outputs with NaN; ``compare`` sets this.
        """
        alive = self._alive()
        if len(alive) < len(self._owners):
            regions = {table.region for table in self._tables()}
            for subject, event in list(self.ledger.tables):
                if event in WRAPPER_EVENTS and isinstance(subject, RegionId) and subject not in regions:
                    del self.ledger.tables[subject, event]
        self._owners = [weakref.ref(of) for of in (*alive, owner)]
        self.lease.shows_stale |= shows_stale

    def drop(self, keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]]) -> bool:
        """Drop the graphs of keys, unless a forward uses the pool; returns whether it did."""
        with self.lease.turn.unused() as is_unused:
            if is_unused:
                tables = [(table, key) for mode, key in keys for table in self._tables() if table.mode is mode]
                self.lease.drop([entry.graph for table, key in tables for entry in table.take(key)])
        return is_unused

    def next_callable_name(self) -> str:
        """The name (``g0``, ``g1``, ...) of the callable that will be registered next."""
        return f"g{len(self._callables)}"

    def register(self, record: CallableRecord) -> None:
        """Add a compiled callable to the report."""
        self._callables.append(record)
        if record.frame is not None and sum(known.frame == record.frame for known in self._callables) == _MANY:
            reason = dynamo.recompile_reason()
            last = f" (the last time because this did not hold: {reason})" if reason else ""
            self.warn(
                f"torch.compile has compiled a function {_MANY} times{last}: each compilation starts without graphs, "
                "and Dynamo runs the function uncompiled once it is at its recompile limit",
                against_recompiling(),
                at=record.name,
            )

    def loaded_for(self, code: types.CodeType, name: str) -> None:
        """Record that a callable was loaded for a function with this code, before Dynamo gave it the id of a frame."""
        self._loaded.append((weakref.ref(code), name))

    def compiles_frame(self, frame: int | None, code: types.CodeType | None, name: str) -> None:
        """Give the callables that were loaded for a function the id of its frame, which Dynamo compiles as ``name``."""
        self.given_up.compiles(frame, code, name)
        names = {name for of, name in self._loaded if of() is code is not None}
        self._callables = [replace(own, frame=frame) if own.name in names else own for own in self._callables]

    def captured_ahead(self, names: Iterable[str]) -> None:
        """Record that these callables were captured before they serve calls."""
        self._captured_ahead |= set(names)

    def is_captured_ahead(self, frame: int | None) -> bool:
        """Whether a function, by the id of its frame, was captured ahead, and the caller has no capture scope open."""
        of_frame = {known.name for known in self._callables if known.frame == frame is not None}
        return not of_frame.isdisjoint(self._captured_ahead) and self.scopes.current() is None

    def owned(self, kind: type[_Owned]) -> _Owned:
        """This runtime's single instance of ``kind``, created at first use; compilers share state through it."""
        found = self._owned.get(kind)
        if found is None:
            found = self._owned[kind] = kind()
        return found

    def callables(self) -> tuple[CallableRecord, ...]:
        """The callables registered so far."""
        return tuple(self._callables)

    def captured_before(self, name: str) -> dict[tuple[CUDAGraphMode, BatchDescriptor], str]:
        """{key: the earlier compilation of the same function that has captured it}.

        Of all compilations of a function, Dynamo calls the newest one whose guards pass.
        """
        frames = {record.name: record.frame for record in self._callables}
        older = list(frames)[: list(frames).index(name)] if frames.get(name) is not None else []
        return {
            (table.mode, key): table.region.callable
            for table in self._tables()
            if table.region.callable in older and frames[table.region.callable] == frames[name]
            for key in table.descriptors()
        }

    def _left_behind(self) -> Iterator[Problem]:
        captured = {(table.region.callable, table.mode, key) for table in self._tables() for key in table.descriptors()}
        for newer in self._callables:
            before, admits = self.captured_before(newer.name), newer.admits
            missing = [key for key in before if (newer.name, *key) not in captured and admits and admits(key[1])]
            if missing:
                mode, descriptor = missing[0]
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                yield Problem(
                    "note",
                    f"torch.compile compiled {newer.name} after {before[missing[0]]} was captured at {mode} "
                    f"{descriptor}{more}: calls that reach {newer.name} now have no graph",
                    (newer.name,),
                    remedy="call it once more at these keys inside `with runtime.capturing():`, or compile before "
                    "capturing, by a call in mode NONE whose dynamic sizes all differ",
                )

    def compiled_later(self, name: str, artifacts: int, seconds: float) -> None:
        """Add the artifacts that waited for the second call of a callable to its record."""
        for index, record in enumerate(self._callables):
            if record.name == name:
                spent = replace(record.seconds, compile=record.seconds.compile + seconds)
                self._callables[index] = replace(record, artifacts=record.artifacts + artifacts, seconds=spent)

    def retraced(self, name: str) -> None:
        """Record that torch.compile traced the function of callable ``name`` again and got the same graph."""
        is_late = self.scopes.current() is None and any(
            table.region.callable == name and table.descriptors() for table in self._tables()
        )
        reason = dynamo.recompile_reason()
        if self._retraced_for is None:
            self._retraced_for = reason
        text = "torch.compile traced its function once more and got the same graph"
        if self._retraced_for:
            text += f" (the first time because this did not hold: {self._retraced_for})"
        if is_late and reason:  # without one, two threads have compiled their first calls at once
            remedy = _SAME_MODE if any(word in (self._retraced_for or "") for word in _OF_MODES) else _AFTER_A_CHANGE
            self.warn(f"{text}: a call in serving is of another kind than in capture", remedy, at=name)
        else:
            self.note(text, at=name)

    def note(self, text: str, *, at: str = "") -> None:
        """:meth:`warn` of an event that makes nothing slow: logged at INFO the first time for each place."""
        self.ledger.note(Reason(text), at=at)

    def warn(self, text: str, remedy: str, *, at: str = "", is_silent: bool = False, is_recorded: bool = False) -> None:
        """Add to the report that something has no graph, is not padded or not checked; the first time is a WARNING.

        ``text`` says what happened, and why; the region, key or sizes are ``at``: one WARNING and one line of the
        report stand for all places, and each further place is INFO. ``is_silent`` (``on_fallback="silent"``) logs the
        first one at INFO, too. With ``is_recorded``, counts or records of the report say it already.
        """
        level = logging.INFO if is_silent else logging.WARNING
        self.ledger.note(Reason(text, remedy), at=at, level=level, is_problem=not is_recorded)

    @property
    def device(self) -> torch.device | None:
        """The device its graphs run on; None before the first capture."""
        return self.lease.device

    def _alive(self) -> list[_Owner]:
        return [owner for reference in self._owners if (owner := reference()) is not None]

    def _tables(self) -> list[EntryTable]:
        return [owner for owner in self._alive() if isinstance(owner, EntryTable)]


def torch_release() -> tuple[int, ...]:
    """Major and minor number of torch."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


# -- the runtime of a callable ----------------------------------------------------------------------------------------


def runtime_of_compiler(compiler: Any | None) -> GraphRuntime:
    """The runtime of one ``torch.compile``: from its options, else created at its first graph.

    A graph that is compiled outside of a frame has a runtime of its own.
    """
    if compiler is None:
        return GraphRuntime()
    given = dynamo.backend_options(compiler).get("runtime")
    if isinstance(given, GraphRuntime):
        return given
    if not hasattr(compiler, _ATTRIBUTE):
        runtime = GraphRuntime()
        # Deep copies of a compiled model run the same graphs; and what copies an object leaves a function as it is.
        setattr(compiler, _ATTRIBUTE, lambda: runtime)
    return getattr(compiler, _ATTRIBUTE)()  # type: ignore[no-any-return]


def runtime_of(compiled: Any) -> GraphRuntime:
    """The runtime of a callable compiled with ``backend="cgpass"``.

    Args:
        compiled: what ``torch.compile``, its ``aot_compile``, :func:`graphpass.graphed` or the backend itself
            returned, or a module after ``module.compile(backend="cgpass")``.

    Raises:
        OptionError: it was compiled with another backend, has not run yet, or is not compiled.
    """
    compilers = dynamo.compilers_of(compiled)
    for compiler in compilers:
        if hasattr(compiler, _ATTRIBUTE) or dynamo.backend_options(compiler).get("runtime") is not None:
            of_compiler = runtime_of_compiler(compiler)
            of_compiler.given_up.serves(dynamo.code_of(compiled))
            return of_compiler
    runtime = getattr(dynamo.compiled_ahead(compiled), "runtime", None)
    if isinstance(runtime, GraphRuntime):
        return runtime
    remedy = _CALL_IT if compilers else _COMPILE_IT  # guard: runtime_of_what_is_not_compiled
    raise OptionError(
        "this callable has no graphpass runtime",
        expected="a callable compiled with backend='cgpass' that has run once, or options with runtime=GraphRuntime()",
        found=next((str(why) for why in GivenUpFunctions().serves(dynamo.code_of(compiled))), named(compiled)),
        remedy=remedy,
    )
