"""Records of a runtime for its reports: its callables, and counts of captures, replays, calls, sizes and notes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from graphpass.compat import dynamo
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason, named_sizes
from graphpass.modes import CUDAGraphMode
from graphpass.report import Problem, UncapturedCalls

__all__ = [
    "CallCounts",
    "CallTraffic",
    "Counts",
    "Notes",
    "RefusedCalls",
    "RegionId",
    "RegionUse",
    "RunningCounts",
    "RuntimeStats",
    "SizesSeen",
]

_log = logging.getLogger("graphpass")
_MAX_PLACES = 64
"""Bound of the remembered places and sizes of one reason: traffic with ever new sizes must not fill the memory."""


@dataclass(frozen=True, slots=True)
class RegionId:
    """The name of a region of a callable (``g0.r3``) or of a whole callable (``g0.full``).

    Attributes:
        callable: the callable's name; or the whole name of a wrapper that belongs to no callable.
        region: the region's name, ``full`` for the whole; empty for a wrapper that belongs to no callable.
    """

    callable: str
    region: str = ""

    def __str__(self) -> str:
        return f"{self.callable}.{self.region}" if self.region else self.callable


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Totals over all callables of a runtime.

    Attributes:
        callables: graphs that Dynamo handed over.
        artifacts: compiled artifacts.
        captured: graphs captured so far.
        replayed: replays so far.
        copied: inputs copied into static buffers so far.
        pool_bytes: bytes of the graph pool, 0 on the CPU tape.
        buffer_bytes: bytes of static input buffers.
        histograms: {key field: {size: number of calls}}. :func:`graphpass.plan_sizes` computes capture sizes from one.
    """

    callables: int
    artifacts: int
    captured: int
    replayed: int
    copied: int
    pool_bytes: int
    buffer_bytes: int
    histograms: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one region at one key so far.

    Attributes:
        warmed: warm-up runs before a capture.
        captured: graphs captured, one for each set of static inputs and alias pattern.
        replayed: replays, including the replay of the call that captures.
        copied: inputs copied into static buffers.
        static_sets: sets of static inputs that have a graph now.
    """

    warmed: int
    captured: int
    replayed: int
    copied: int
    static_sets: int


@dataclass(frozen=True, slots=True)
class RegionUse:
    """Use and cost of the graphs of one region at one key.

    Attributes:
        region: the region.
        mode: FULL or PIECEWISE.
        key: the padded shape.
        counts: its counts.
        capture_s: seconds of its captures, warm-ups included.
        launch_s: host seconds of launching each kernel, the least of its warm-ups and recordings; infinite if there was
            none. A warm-up may load kernels and plan them; a recording finds them ready.
        replay_s: host seconds of the replay that followed a capture, the least; infinite if there was none.
    """

    region: RegionId
    mode: CUDAGraphMode
    key: BatchDescriptor
    counts: Counts
    capture_s: float
    launch_s: float
    replay_s: float


@dataclass(slots=True)
class RunningCounts:
    """The running counts behind :class:`Counts`; written by the wrapper that owns it."""

    warmed: int = 0
    captured: int = 0
    replayed: int = 0
    copied: int = 0
    capture_s: float = 0.0
    launch_s: float = math.inf
    replay_s: float = math.inf

    def captured_in(self, seconds: float, launch_s: float) -> None:
        """Count a capture that took ``seconds``, ``launch_s`` of them on the host in the faster of its two runs."""
        self.captured += 1
        self.capture_s += seconds
        self.launch_s = min(self.launch_s, launch_s)

    def counts(self, static_sets: int) -> Counts:
        """The counts as of now."""
        return Counts(self.warmed, self.captured, self.replayed, self.copied, static_sets)


class SizesSeen(dict[str, Counter[int]]):
    """How often each size of each key field was seen, {key field: {size: calls}}."""

    def of(self, field: str) -> Counter[int]:
        """The counts of one field; the caller may keep and update them."""
        return self.setdefault(field, Counter())


@dataclass(slots=True)
class _Note:
    """One explanation: its first log record, how often and where it was added, and the problem in the report."""

    record: str
    what: str
    remedy: str
    is_problem: bool
    times: int = 0
    places: dict[str, None] = field(default_factory=dict)


class Notes:
    """Explanations for the log and the report: one for each cause and remedy, however many places have it."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], _Note] = {}

    def add(
        self, what: str, *, remedy: str = "", at: str = "", level: int = logging.INFO, is_problem: bool = False
    ) -> None:
        """Count a note; log its first occurrence, and at INFO the first one at each further place.

        Args:
            what: what happened, and why, without regions, keys and sizes.
            remedy: what the user can do about it.
            at: the region, key or sizes that it happened to.
            level: the level of the first log record.
            is_problem: whether it is a problem of its own in the report; other records of the report may say it.
        """
        note = self._notes.get((what, remedy))
        if note is None or (at not in note.places and len(note.places) < _MAX_PLACES):
            record = f"{at}: {what}" if at else what
            record = f"{record}; {remedy}" if remedy else record
            _log.log(level if note is None else min(level, logging.INFO), "%s", record)
            artifact = {"what": what, "at": at, "remedy": remedy, "is_warning": level > logging.INFO}
            dynamo.trace_json("graphpass_note", lambda: artifact)
            if note is None:
                note = self._notes[what, remedy] = _Note(record, what, remedy, is_problem)
            note.places[at] = None
        note.times += 1

    def problems(self) -> tuple[Problem, ...]:
        """The notes that are problems of their own."""
        return tuple(
            Problem("note", note.what, tuple(filter(None, note.places)), times=note.times, remedy=note.remedy)
            for note in self._notes.values()
            if note.is_problem
        )

    def counts(self) -> dict[str, int]:
        """{first log record of a note: how often it was added}."""
        return {note.record: note.times for note in self._notes.values()}


@dataclass(slots=True)
class CallCounts:
    """Counts for one (callable, mode, key, reason).

    Attributes:
        calls: number of calls.
        real_elements: product of the real sizes, summed over the calls.
        padded_elements: product of the key's sizes, summed over the calls.
    """

    calls: int = 0
    real_elements: int = 0
    padded_elements: int = 0

    def saw(self, real: int, padded: int) -> None:
        """Count one call."""
        self.calls += 1
        self.real_elements += real
        self.padded_elements += padded


@dataclass(slots=True)
class RefusedCalls:
    """Calls of one callable that one reason leaves without a graph.

    Attributes:
        reason: the reason; its sizes are those of the first call.
        calls: number of calls.
    """

    reason: Reason
    calls: int = 0
    _sizes: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict)

    def saw(self, reason: Reason) -> bool:
        """Count one call; returns whether its sizes are new."""
        self.calls += 1
        if reason.sizes in self._sizes:
            return False
        self._sizes[reason.sizes] = math.prod(size for _, size in reason.sizes)
        if len(self._sizes) > _MAX_PLACES:
            del self._sizes[min(self._sizes, key=self._sizes.__getitem__)]
        return True

    def sizes(self) -> tuple[str, ...]:
        """The sizes of the calls, as ``batch=8 seq=64``, the largest first; empty if the reason has none."""
        largest_first = sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)
        return tuple(named_sizes(sizes) for sizes in largest_first if sizes)


@dataclass(slots=True)
class CallTraffic:
    """Call counts of all callables of a runtime that the auto dispatcher serves."""

    _counts: dict[tuple[str, CUDAGraphMode, BatchDescriptor, str], CallCounts] = field(default_factory=dict)
    _refused: dict[tuple[str, str], RefusedCalls] = field(default_factory=dict)

    def of(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor, reason: str) -> CallCounts:
        """The counter for these calls; the caller may keep it and update it on each call.

        Args:
            name: the callable.
            mode: the runtime mode of the call.
            key: the padded shape.
            reason: why the call replays this key.
        """
        return self._counts.setdefault((name, mode, key, reason), CallCounts())

    def without(self, name: str, reason: Reason) -> RefusedCalls:
        """The counter for calls of a callable without a graph, as :meth:`of`."""
        return self._refused.setdefault((name, reason.why), RefusedCalls(reason))

    def at(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor) -> CallCounts | None:
        """The counts of one key for all reasons together; None if the auto dispatcher never chose it."""
        found = [counts for known, counts in self._counts.items() if known[:3] == (name, mode, key)]
        if not found:
            return None
        return CallCounts(
            sum(counts.calls for counts in found),
            sum(counts.real_elements for counts in found),
            sum(counts.padded_elements for counts in found),
        )

    def without_graph(self) -> Iterator[UncapturedCalls]:
        """The calls without a graph, by callable and reason."""
        for (name, why), refused in self._refused.items():
            reason = refused.reason
            yield UncapturedCalls(name, why, refused.calls, reason.is_expected, reason.remedy, refused.sizes())
