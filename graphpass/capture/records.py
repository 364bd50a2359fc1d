"""Records of a runtime for its reports: its callables, and counts of captures, replays, calls, sizes and notes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from graphpass.compat import tracing
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Table

__all__ = [
    "CallCounts",
    "CallTraffic",
    "CallableRecord",
    "CompileSeconds",
    "Counts",
    "Notes",
    "RegionId",
    "RegionReason",
    "RegionRecord",
    "RunningCounts",
    "RuntimeStats",
    "SizeRecord",
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
class CompileSeconds:
    """Seconds that the backend spent on one graph, by phase.

    Attributes:
        partition: splitting the graph and generating the stitched code.
        key: structural keys of the regions.
        compile: the compiler, over the distinct regions.
        proof: the proof of what may be padded.
    """

    partition: float = 0.0
    key: float = 0.0
    compile: float = 0.0
    proof: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionReason:
    """Why a region is eager.

    Attributes:
        why: the reason as text.
        where: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown.
    """

    why: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """One region of a callable.

    Attributes:
        name: ``r0``, ``r1``, ... in program order.
        kind: ``captured`` or ``eager``.
        num_ops: number of nodes in its graph.
        reasons: why it is eager; empty if it is captured.
        like: the first region of the callable with the same compiled artifact; its own name if there is none before it.
    """

    name: str
    kind: str
    num_ops: int
    reasons: tuple[RegionReason, ...] = ()
    like: str = ""

    @property
    def why(self) -> str:
        """The reasons as one line."""
        return "; ".join(dict.fromkeys(reason.why for reason in self.reasons))


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """One size that distinguishes the calls of a callable.

    Attributes:
        field: its key field: the name in ``dynamic_dims``, or the place where it is read, as ``input_ids[0]``.
        symbol: its symbol in the graph.
        traced: its value in the traced call.
        least: the least value that the graph admits; None for any.
        greatest: the greatest value that the graph admits; None for any.
        is_padded: whether calls are padded along it.
    """

    field: str
    symbol: str
    traced: int
    least: int | None
    greatest: int | None
    is_padded: bool


@dataclass(frozen=True, slots=True)
class CallableRecord:
    """One callable that a compiler registered, for reports.

    Attributes:
        name: ``g0``, ``g1``, ... in the order of compilation.
        regions: its regions, in program order.
        artifacts: number of artifacts compiled for it; those shared with an earlier callable count there.
        frame: id of the Python frame it was compiled for; recompiles of one function share it.
        reason: why the graph ends where it does (a graph break), or why it is never captured; None otherwise.
        seconds: compile time by phase.
        admits: whether the guards of the callable admit a key's sizes; None if its sizes are not key fields.
        padding: (key field, verdict, why): whether a size may be padded; an empty field means all sizes.
        sizes: the sizes that distinguish its calls, if it chooses graphs itself.
        mode: FULL if it is captured whole, PIECEWISE if region by region, NONE if never; None if it does not choose.
        off: why it is never captured, if it chooses graphs itself and never does; else None.
    """

    name: str
    regions: tuple[RegionRecord, ...]
    artifacts: int
    frame: int | None = None
    reason: str | None = None
    seconds: CompileSeconds = CompileSeconds()
    admits: Callable[[BatchDescriptor], bool] | None = None
    padding: tuple[tuple[str, str, str], ...] = ()
    sizes: tuple[SizeRecord, ...] = ()
    mode: CUDAGraphMode | None = None
    off: str | None = None


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
        histogram: {batch size: number of calls}. :func:`graphpass.plan_sizes` computes capture sizes from it.
    """

    callables: int
    artifacts: int
    captured: int
    replayed: int
    copied: int
    pool_bytes: int
    buffer_bytes: int
    histogram: Mapping[int, int] = field(default_factory=dict)


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


@dataclass(slots=True)
class RunningCounts:
    """The running counts behind :class:`Counts`; written by the wrapper that owns it."""

    warmed: int = 0
    captured: int = 0
    replayed: int = 0
    copied: int = 0

    def counts(self, static_sets: int) -> Counts:
        """The counts as of now."""
        return Counts(self.warmed, self.captured, self.replayed, self.copied, static_sets)


class SizesSeen(Counter[int]):
    """How often each batch size was seen."""

    def suggested(self, limit: int) -> list[int]:
        """Sizes worth a graph: the most frequent ones, at most ``limit``, the largest always among them."""
        if not self:
            return []
        frequent = [size for size, _ in self.most_common(limit)]
        largest = max(self)
        return sorted({*frequent[: limit - (largest not in frequent)], largest})


class Notes(Counter[str]):
    """Notes for the report, each with the number of times it was added."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def add(self, text: str, *, remedy: str = "", level: int = logging.INFO, once_for: str | None = None) -> None:
        """Count a note; log it at its first occurrence.

        Args:
            text: what happened, and why.
            remedy: what the user can do about it; appended to ``text``.
            level: the level of the log record.
            once_for: the reason that several notes share: only the first of them is logged above INFO.
        """
        noted = f"{text}; {remedy}" if remedy else text
        if noted not in self:
            reason = once_for or noted
            _log.log(min(level, logging.INFO) if reason in self._warned else level, "%s", noted)
            if level > logging.INFO:
                self._warned.add(reason)
            tracing.trace_json(
                "graphpass_note", lambda: {"what": text, "remedy": remedy, "is_warning": level > logging.INFO}
            )
        self[noted] += 1


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

    def of(self, name: str, mode: CUDAGraphMode, key: BatchDescriptor | None, reason: str) -> CallCounts:
        """The counter for these calls; the caller may keep it and update it on each call.

        Args:
            name: the callable.
            mode: the runtime mode of the call, NONE for a call without a graph.
            key: the padded shape, None if no key fits.
            reason: why the call replays this key, or why it has no graph.
        """
        return self._counts.setdefault((name, mode, key, reason), CallCounts())

    def num_calls(self, *, with_graph: bool) -> int:
        """Number of calls with a graph, or of those without."""
        return sum(c.calls for (_, mode, _, _), c in self._counts.items() if bool(mode) == with_graph)

    def table(self) -> Table:
        """One row for each (callable, mode, key, reason) that has calls."""
        return Table("Calls", ("graph", "mode", "key", "reason", "calls", "padding"), tuple(self._rows()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for (name, mode, key, reason), counts in self._counts.items():
            waste = 1 - counts.real_elements / counts.padded_elements if counts.padded_elements else 0.0
            if counts.calls:
                yield name, str(mode), str(key or ""), reason, str(counts.calls), f"{waste:.1%}"
