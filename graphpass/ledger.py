"""Reasons and counts: why something has no graph, and how often what happened. Reports read nothing else.

A count belongs to an event of a subject at a key, as ``replayed`` of region ``g0.r3`` at (FULL, 8 tokens). Whoever
makes the event happen keeps its :class:`Row` and adds to the fields: counting looks nothing up and allocates nothing.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphpass.errors import CaptureError, GraphpassError

_log = logging.getLogger("graphpass")
UNCOMPILED = "uncompiled"
"""The subject of calls in which Dynamo runs functions as they are."""
_MAX_PLACES = 64  # places and sizes kept for one reason: traffic with ever new sizes must not fill the memory


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something runs without a graph, in pieces or without padding."""

    why: str  #: the reason, in one clause without sizes: calls of other sizes may have it, too
    remedy: str = ""  #: what works against it in this situation; empty if nothing is lost, or the user asked for it
    where: str = ""  #: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown
    sizes: tuple[tuple[str, int], ...] = ()  #: (key field, size) that it is about; empty if it holds at any size
    is_expected: bool = False  #: harmless: counted, not warned about

    def __str__(self) -> str:
        text = f"{self.why} ({named_sizes(self.sizes)})" if self.sizes else self.why
        return f"{text} at {self.where}" if self.where else text


class Verdict(enum.StrEnum):
    """Whether real entries depend on the padding of a size. See Note [Padding verdicts]."""

    PROVED = "proved"
    UNPROVED = "unproved"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFinding(Reason):
    """A way in which real entries depend on padding; ``why`` is the effect of an operator."""

    field: str  #: the key field of the padding
    op: str  #: the operator that makes real entries depend on it, ``aten.mean.dim``
    target: str = ""  #: the output, written input or effect that depends on it; empty for values inside a graph
    verdict: Verdict = Verdict.UNPROVED  #: PROVED if the graph is changed so that they do not depend on it
    is_by_contents: bool = False  #: data selects the entries, so that the contents of a call decide

    def reaching(self, target: str) -> PaddingFinding:
        """This finding for ``target``."""
        return replace(self, target=target)

    @property
    def through(self) -> str:
        """The operator with its effect and its line."""
        return f"{self.op} ({self.why})" + (f" at {self.where}" if self.where else "")

    def __str__(self) -> str:
        rows = f"row i of {self.target}" if self.target.startswith(("output", "written")) else self.target or "a value"
        place, _, source = self.where.partition(": ")
        line = f" at {place}: `{source}`" if source else f" at {place}" if place else ""
        several = rows.endswith("numbers")
        may = "may depend" if self.is_by_contents else "depend" if several else "depends"
        return f"{rows} {may} on padding of '{self.field}' through {self.op} ({self.why}){line}"


def named_sizes(sizes: Iterable[tuple[str, Hashable]]) -> str:
    """Sizes of key fields as text: ``batch=8 seq=64``."""
    return " ".join(f"{field}={size}" for field, size in sizes)


def why_failed(error: BaseException, *, otherwise: str) -> Reason:
    """Why a capture that raised ``error`` has no graph, without the key, the sizes and the memory in use.

    The remedy is the error's own, or ``otherwise``.
    """
    where = error.where if isinstance(error, CaptureError) else ""
    cause = error.__cause__ if where and error.__cause__ is not None else error
    found = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, GraphpassError):
        found = f"{cause.problem}: {cause.found}"
    remedy = error.remedy if isinstance(error, GraphpassError) else otherwise
    return Reason(f"the capture failed {where}: {found}" if where else f"the capture failed: {found}", remedy)


@dataclass(slots=True)
class Row:
    """The sums of one event of a subject at a key."""

    n: int = 0  #: how often it happened
    items: int = 0  #: the things that it handled: inputs copied by replays, images encoded
    real: int = 0  #: elements or tokens without padding
    padded: int = 0  #: the same with padding
    seconds: float = 0.0  #: duration in all
    least_s: float = math.inf  #: host seconds of the shortest one; infinite if none was timed
    pool_bytes: int = 0  #: growth of the graph pool
    driver_bytes: int = 0  #: growth of the driver's memory, for executables


@contextlib.contextmanager
def uncounted(rows: Iterable[Row]) -> Iterator[None]:
    """Do not count in these rows what happens in the body: it serves no call."""
    before = [(row, row.n, row.items) for row in rows]
    try:
        yield
    finally:
        for row, n, items in before:
            row.n, row.items = n, items


@dataclass(slots=True)
class CountedReason:
    """How often a reason applied to one subject, and where."""

    subject: str  #: the callable, or what else ran without a graph; empty for a note, which has places of any subject
    reason: Reason  #: its sizes are those of the first time
    n: int = 0  #: how often it applied
    is_problem: bool = False  #: a problem of its own in the report, which no other count says
    places: dict[Hashable, int] = field(default_factory=dict)  #: {place or sizes: number of elements}, the largest 64

    def count(self, place: Hashable, elements: int = 0) -> bool:
        """Count one time. Returns whether the place is new and kept."""
        self.n += 1
        if place in self.places:
            return False
        if len(self.places) >= _MAX_PLACES:
            least = min(self.places, key=self.places.__getitem__)
            if elements <= self.places[least]:
                return False
            del self.places[least]
        self.places[place] = elements
        return True

    def count_call(self, reason: Reason) -> bool:
        """Count a call at the sizes of ``reason``. Returns whether these sizes are new and kept."""
        return self.count(reason.sizes, math.prod(size for _, size in reason.sizes))

    def sizes(self) -> tuple[str, ...]:
        """The sizes of the calls, as ``batch=8 seq=64``, the largest first; empty if the reason has none."""
        places = dict(self.places)  # another thread may count meanwhile
        largest_first = sorted(places, key=places.__getitem__, reverse=True)
        return tuple(named_sizes(sizes) for sizes in largest_first if isinstance(sizes, tuple) and sizes)


class Ledger:
    """The counts and reasons of a runtime, a manager or an encoder."""

    def __init__(self, trace: Callable[[str, Callable[[], Mapping[str, Any]]], None] | None = None) -> None:
        #: {(subject, event): {key: the event's sums}}
        self.tables: defaultdict[tuple[Hashable, str], defaultdict[Any, Row]] = defaultdict(lambda: defaultdict(Row))
        self.tuning_s = 0.0  #: seconds in which regions were tuned
        self.sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)  #: {key field: {size: calls}}
        self.uncaptured: dict[tuple[str, str], CountedReason] = {}  #: calls without a graph, by subject and reason
        self._notes: dict[tuple[str, str, str], CountedReason] = {}
        self._trace = trace

    def rows(self, subject: Hashable, event: str) -> defaultdict[Any, Row]:
        """{key: the sums of one event of a subject}; the caller may keep it and add to its rows."""
        return self.tables[subject, event]

    @contextlib.contextmanager
    def timed(self, subject: Hashable, event: str) -> Iterator[None]:
        """Add the seconds of the body to an event."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.rows(subject, event)[None].seconds += time.perf_counter() - start_s

    def without_graph(self, subject: str, reason: Reason) -> CountedReason:
        """The counts of a subject's calls that ``reason`` leaves without a graph; the caller keeps them."""
        return self.uncaptured.setdefault((subject, reason.why), CountedReason(subject, reason))

    def note(self, reason: Reason, *, at: str = "", level: int = logging.INFO, is_problem: bool = False) -> None:
        """Count a reason for the log; log its first time, and at INFO the first time at each further place."""
        cause = (reason.why, reason.where, reason.remedy)
        note = self._notes.get(cause)
        first_level = level if note is None else min(level, logging.INFO)
        if note is None:
            note = self._notes[cause] = CountedReason("", reason, is_problem=is_problem)
        if note.count(at):
            _log.log(first_level, "%s", _record(reason, at))
            artifact = {"what": str(reason), "at": at, "remedy": reason.remedy, "is_warning": level > logging.INFO}
            if self._trace is not None:
                self._trace("graphpass_note", lambda: artifact)

    def problems(self) -> tuple[CountedReason, ...]:
        """The notes that are problems of their own."""
        return tuple(note for note in list(self._notes.values()) if note.is_problem)

    def notes(self) -> dict[str, int]:
        """{first log record of a note: how often it was counted}."""
        return {_record(note.reason, next(iter(note.places))): note.n for note in list(self._notes.values())}


def _record(reason: Reason, at: Hashable) -> str:
    text = str(reason) if at == "" else f"{at}: {reason}"
    return f"{text}; {reason.remedy}" if reason.remedy else text
