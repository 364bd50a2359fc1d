"""Records of a runtime for its reports: its callables, and counts of captures, replays, calls, sizes and notes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from graphpass.compat import tracing
from graphpass.errors import NoGraph
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Problem, UncapturedCalls

__all__ = [
    "CallCounts",
    "CallTraffic",
    "Counts",
    "Notes",
    "RegionId",
    "RegionUse",
    "RunningCounts",
    "RuntimeStats",
    "SizesSeen",
]

_log = logging.getLogger("graphpass")


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


class Notes(Counter[str]):
    """Notes for the report, each with the number of times it was added."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()
        self._parts: dict[str, tuple[str, str]] = {}

    def add(
        self,
        text: str,
        *,
        remedy: str = "",
        level: int = logging.INFO,
        once_for: str | None = None,
        is_recorded: bool = False,
    ) -> None:
        """Count a note; log it at its first occurrence.

        Args:
            text: what happened, and why.
            remedy: what the user can do about it; appended to ``text``.
            level: the level of the log record.
            once_for: the reason that several notes share: only the first of them is logged above INFO.
            is_recorded: whether other records of the report say it, too; it is then no problem of its own.
        """
        noted = f"{text}; {remedy}" if remedy else text
        if noted not in self:
            reason = once_for or noted
            _log.log(min(level, logging.INFO) if reason in self._warned else level, "%s", noted)
            if level > logging.INFO:
                self._warned.add(reason)
            if not is_recorded:
                self._parts[noted] = (text, remedy)
            tracing.trace_json(
                "graphpass_note", lambda: {"what": text, "remedy": remedy, "is_warning": level > logging.INFO}
            )
        self[noted] += 1

    def problems(self) -> tuple[Problem, ...]:
        """The notes that no other record of the report says."""
        return tuple(
            Problem("note", text, times=self[noted], remedy=remedy) for noted, (text, remedy) in self._parts.items()
        )


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
class CallTraffic:
    """Call counts of all callables of a runtime that the auto dispatcher serves."""

    _counts: dict[tuple[str, CUDAGraphMode, BatchDescriptor | None, str], CallCounts] = field(default_factory=dict)
    _refusals: dict[str, NoGraph] = field(default_factory=dict)

    def of(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor, reason: str) -> CallCounts:
        """The counter for these calls; the caller may keep it and update it on each call.

        Args:
            name: the callable.
            mode: the runtime mode of the call.
            key: the padded shape.
            reason: why the call replays this key.
        """
        return self._counts.setdefault((name, mode, key, reason), CallCounts())

    def without(self, name: str, reason: NoGraph) -> CallCounts:
        """The counter for calls of a callable without a graph, as :meth:`of`."""
        self._refusals.setdefault(reason.why, reason)
        return self._counts.setdefault((name, CUDAGraphMode.NONE, None, reason.why), CallCounts())

    def num_calls(self, *, with_graph: bool) -> int:
        """Number of calls with a graph, or of those without."""
        return sum(c.calls for (_, mode, _, _), c in self._counts.items() if bool(mode) == with_graph)

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
        for (name, mode, _, reason), counts in self._counts.items():
            if not mode and counts.calls:
                refusal = self._refusals[reason]
                yield UncapturedCalls(name, reason, counts.calls, refusal.is_expected, refusal.remedy)
