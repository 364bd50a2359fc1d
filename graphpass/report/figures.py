"""The figures of a report: problems, keys, calls without a graph, sizes of the traffic, costs. Numbers stay numbers."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graphpass.ledger import Reason
from graphpass.report.callables import CallableRecord, CompileSeconds
from graphpass.sizeplan import plan_sizes

__all__ = [
    "Costs",
    "GroupCost",
    "KernelUse",
    "KeyUse",
    "Problem",
    "SizeTraffic",
    "UncapturedCalls",
    "counted",
    "graph_figures",
]

Figures = dict[str, Any]


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is slow or missing.

    Attributes:
        kind: short and stable: ``cut``, ``graph break``, ``never captured``, ``no graph``, ``not padded``,
            ``not captured`` or ``note``.
        what: what is slow or missing, and why.
        places: the regions, graphs or keys that it is about.
        where: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown.
        times: how often it happened; None if it is no event.
        remedy: what to do about it; empty if nothing is known.
    """

    kind: str
    what: str
    places: tuple[str, ...] = ()
    where: str = ""
    times: int | None = None
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The use of one key.

    Attributes:
        graph: the callable, or the group of keys: ``g0``, ``decode``, ``encoder``.
        mode: FULL or PIECEWISE.
        sizes: the sizes of the key, by the user's names; empty if the shapes are fixed.
        graphs: graphs that were captured for it: one for each region in mode PIECEWISE.
        calls: calls, batches or requests that replayed it.
        replays: replays of these graphs.
        copied: inputs copied into static buffers; None if they are not counted.
        real: elements or tokens of these calls without padding; None if unknown.
        padded: the same with padding; None if unknown.
        capture_s: seconds of the capture, warm-up included; None if it was not measured.
        pool_bytes: growth of the graph pool by the capture; None if it was not measured.
    """

    graph: str
    mode: str
    sizes: Mapping[str, Hashable]
    graphs: int
    calls: int
    replays: int
    copied: int | None = None
    real: int | None = None
    padded: int | None = None
    capture_s: float | None = None
    pool_bytes: int | None = None

    @property
    def padding(self) -> float | None:
        """Share of padding among the computed elements, 0 to 1; None if unknown."""
        if self.real is None or self.padded is None:
            return None
        return 1 - self.real / self.padded if self.padded else 0.0

    @property
    def named(self) -> str:
        """The sizes as text: ``batch=8 seq=64``."""
        return " ".join(f"{name}={value}" for name, value in self.sizes.items()) or "fixed shapes"


@dataclass(frozen=True, slots=True)
class UncapturedCalls:
    """Calls that ran without a graph.

    Attributes:
        graph: the callable, or what else ran.
        reason: why.
        calls: how many.
        is_expected: whether that is no problem: a first call of a key, which warms it up, or an empty batch.
        remedy: what to do about it; empty if nothing is known.
        sizes: the sizes of these calls, as ``batch=8 seq=64``, the largest first; empty if it does not depend on them.
    """

    graph: str
    reason: str
    calls: int
    is_expected: bool = False
    remedy: str = ""
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeTraffic:
    """The sizes of one key field that calls had.

    Attributes:
        field: the user's name of the field.
        option: how sizes are passed back: ``capture_sizes`` or ``token_budgets``.
        histogram: {size: number of calls}.
        captured: the sizes that have graphs, ascending.
        is_padded: whether calls are padded along it; if not, a size that was captured serves that size alone.
        limit: the most sizes to suggest.
        at_least: a size that is always suggested, too; 0 for none.
    """

    field: str
    option: str
    histogram: Mapping[int, int]
    captured: tuple[int, ...] = ()
    is_padded: bool = True
    limit: int = 16
    at_least: int = 0

    @property
    def suggested(self) -> tuple[int, ...]:
        """At most ``limit`` sizes with the least padding for this traffic; empty without traffic or padding."""
        if not self.is_padded or not any(self.histogram.values()):
            return ()
        always = {self.at_least: 0} if self.at_least else {}
        return plan_sizes({**always, **self.histogram}, self.limit).sizes

    def waste(self, sizes: tuple[int, ...]) -> float | None:
        """Share of padding if calls were padded to these sizes; None if one of them fits none, or there is no traffic.

        Args:
            sizes: ascending.
        """
        used = {} if not self.is_padded else {size: weight for size, weight in self.histogram.items() if weight}
        if not used or not sizes or max(used) > sizes[-1]:
            return None
        real = sum(size * weight for size, weight in used.items())
        padded = sum(sizes[bisect.bisect_left(sizes, size)] * weight for size, weight in used.items())
        return 1 - real / padded


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Time and memory of the captures of a group of keys; see :class:`graphpass.ladder.MemoryGrowth`."""

    name: str
    keys: int
    seconds: float
    pool_bytes: int
    cached_bytes: int
    driver_bytes: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What compiling and capturing cost, and what replays save.

    Attributes:
        callables: graphs that Dynamo handed over.
        artifacts: compiled artifacts.
        compile_s: seconds of compiling, by phase.
        graphs: graphs captured.
        capture_s: seconds of their captures, warm-ups included.
        pool_bytes: bytes of the graph pool; 0 on the CPU, which has none.
        buffer_bytes: bytes of static buffers.
        replays: replays of all graphs.
        saved_s: estimated host time that the replays saved; None on the CPU, and before a replay.
        groups: time and memory by group of keys, where it is measured.
    """

    callables: int = 0
    artifacts: int = 0
    compile_s: CompileSeconds = field(default_factory=CompileSeconds)
    graphs: int = 0
    capture_s: float = 0.0
    pool_bytes: int = 0
    buffer_bytes: int = 0
    replays: int = 0
    saved_s: float | None = None
    groups: tuple[GroupCost, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelUse:
    """An attention kernel, the steps that it serves, and why.

    Attributes:
        kernel: its name.
        serves: the steps that it serves.
        why: why it serves them, or serves none.
        remedy: what makes a faster kernel possible; empty if there is none, or it is the fastest.
    """

    kernel: str
    serves: str
    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """Everything that a report shows.

    Attributes:
        subject: what it is about: the model, ``a runtime``.
        problems: what is slow or missing, apart from what the other figures say.
        callables: the compiled callables.
        keys: the keys that have graphs.
        uncaptured: calls without a graph.
        kernels: attention kernels.
        traffic: the sizes of the calls.
        costs: what it cost.
    """

    subject: str
    problems: tuple[Problem, ...] = ()
    callables: tuple[CallableRecord, ...] = ()
    keys: tuple[KeyUse, ...] = ()
    uncaptured: tuple[UncapturedCalls, ...] = ()
    kernels: tuple[KernelUse, ...] = ()
    traffic: tuple[SizeTraffic, ...] = ()
    costs: Costs = field(default_factory=Costs)


def graph_figures(record: CallableRecord) -> Figures:
    """One callable as dicts, lists, strings, numbers, booleans and None."""
    return {
        "name": record.name,
        "mode": None if record.mode is None else str(record.mode),
        "never_captured": _reason(record.off),
        "ends": _reason(record.ends),
        "regions": [
            {
                "name": f"{record.name}.{region.name}",
                "kind": region.kind,
                "nodes": region.num_ops,
                "same_as": None if region.like in ("", region.name) else f"{record.name}.{region.like}",
                "reasons": list(map(_reason, region.reasons)),
            }
            for region in record.regions
        ],
        "sizes": [
            {
                "field": size.field,
                "symbol": size.symbol,
                "traced": size.traced,
                "least": size.least,
                "greatest": size.greatest,
                "padded": size.is_padded,
                "verdict": size.verdict,
                "not_proved": [asdict(cause) for cause in size.causes],
                "remedy": size.remedy,
            }
            for size in record.sizes
        ],
        "assumptions": list(record.assumptions),
        "compile_s": asdict(record.seconds),
    }


def _reason(reason: Reason | None) -> Figures | None:
    return None if reason is None else {"why": reason.why, "where": reason.where, "remedy": reason.remedy}
