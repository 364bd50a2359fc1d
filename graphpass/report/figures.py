"""The figures of a report: problems, keys, calls without a graph, sizes of the traffic, costs. Numbers stay numbers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import CountedReason, Ledger, PaddingFinding, Reason, named_sizes
from graphpass.report.records import (
    LOADED,
    TUNED,
    UNTUNED,
    WARM_START,
    CallableRecord,
    CapturedGroup,
    CompileSeconds,
    RegionId,
    RegionUse,
    RuntimeStats,
    TunedRange,
)
from graphpass.sizeplan import plan_sizes

Figures = dict[str, Any]
_MOST_OF_A_FIELD = 16
_LARGEST_GRID = 64
_CALLS_OF_A_KEY = 4
PADDING_BEFORE = "padding before"
"""The event of a size that got a graph of its own: the seconds that its padding had cost."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is slow or missing."""

    #: Short and stable: ``cut``, ``graph break``, ``never captured``, ``no graph``, ``not padded``, ``not captured`` or
    #: ``note``.
    kind: str
    what: str  #: what is slow or missing, and why
    places: tuple[str, ...] = ()  #: the regions, graphs or keys that it is about
    where: str = ""  #: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown
    times: int | None = None  #: how often it happened; None if it is no event
    remedy: str = ""  #: what to do about it; empty if nothing is known


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The use of one key."""

    graph: str  #: the callable, or the group of keys: ``g0``, ``decode``, ``encoder``
    mode: str  #: FULL or PIECEWISE
    sizes: Mapping[str, Hashable]  #: the sizes of the key, by the user's names; empty if the shapes are fixed
    graphs: int  #: graphs that were captured for it: one for each region in mode PIECEWISE
    calls: int  #: calls, batches or requests that replayed it
    replays: int  #: replays of these graphs
    copied: int | None = None  #: inputs copied into static buffers; None if they are not counted
    real: int | None = None  #: elements or tokens of these calls without padding; None if unknown
    padded: int | None = None  #: the same with padding; None if unknown
    capture_s: float | None = None  #: seconds of the capture, warm-up included; None if it was not measured
    pool_bytes: int | None = None  #: growth of the graph pool by the capture; None if it was not measured
    driver_bytes: int | None = None  #: growth of the driver's memory, for executables; None if it was not measured
    #: seconds that padding cost before a size that recurs had this graph; None for the keys of a ladder
    padding_s: float | None = None

    @property
    def padding(self) -> float | None:
        """Share of padding among the computed elements, 0 to 1; None if unknown."""
        return None if self.real is None or self.padded is None else padding_share(self.real, self.padded)

    @property
    def named(self) -> str:
        """The sizes as text: ``batch=8 seq=64``."""
        return named_sizes(self.sizes.items()) or "fixed shapes"


def padding_share(real: int, padded: int) -> float:
    """Share of padding among computed elements or tokens, 0 to 1; 0 if none were computed."""
    return 1 - real / padded if padded else 0.0


@dataclass(frozen=True, slots=True)
class SizeTraffic:
    """The sizes of one key field that calls had."""

    field: str  #: the user's name of the field
    option: str  #: how sizes are passed back: ``capture_sizes`` or ``token_budgets``
    histogram: Mapping[int, int]  #: {size: number of calls}
    captured: tuple[int, ...] = ()  #: the sizes that have graphs, ascending
    is_padded: bool = True  #: whether calls are padded along it; if not, a captured size serves that size alone
    limit: int = _MOST_OF_A_FIELD  #: the most sizes to suggest
    at_least: int = 0  #: a size that is always suggested, too; 0 for none
    adapts: bool = False  #: whether ``adapt()`` would capture graphs for this traffic

    @property
    def suggested(self) -> tuple[int, ...]:
        """At most ``limit`` sizes with the least padding for this traffic; empty without traffic or padding."""
        if not self.is_padded or not any(self.histogram.values()):
            return ()
        always = {self.at_least: 0} if self.at_least else {}
        return plan_sizes({**always, **self.histogram}, self.limit).sizes

    @property
    def ladder(self) -> tuple[int, ...]:
        """The sizes to declare: the suggested ones, or all if none is padded and they are at most ``limit``."""
        exact = () if self.is_padded else tuple(sorted(size for size, times in self.histogram.items() if times))
        return self.suggested if self.is_padded or len(exact) > self.limit else exact

    def waste(self, sizes: tuple[int, ...]) -> float | None:
        """Share of padding if calls were padded to these ascending sizes; None if one fits none, or without calls."""
        used = {} if not self.is_padded else {size: weight for size, weight in self.histogram.items() if weight}
        if not used or not sizes or max(used) > sizes[-1]:
            return None
        real = sum(size * weight for size, weight in used.items())
        padded = sum(sizes[bisect.bisect_left(sizes, size)] * weight for size, weight in used.items())
        return 1 - real / padded


@dataclass(frozen=True, slots=True)
class Costs:
    """What compiling and capturing cost, and what replays save."""

    callables: int = 0  #: graphs that Dynamo handed over
    loaded: int = 0  #: the graphs among them that were loaded from the directory of ``warm_start``
    load_s: float = 0.0  #: seconds of reading that directory, whether or not it had what was asked for
    artifacts: int = 0  #: compiled artifacts
    compile_s: CompileSeconds = field(default_factory=CompileSeconds)  #: seconds of compiling, by phase
    graphs: int = 0  #: graphs captured
    capture_s: float = 0.0  #: seconds of their captures, warm-ups included
    pool_bytes: int = 0  #: bytes of the graph pool; 0 on the CPU, which has none
    buffer_bytes: int = 0  #: bytes of static buffers
    replays: int = 0  #: replays of all graphs
    saved_s: float | None = None  #: estimated host time that the replays saved; None on the CPU, and before a replay
    groups: tuple[CapturedGroup, ...] = ()  #: time and memory by group of keys, where it is measured
    tuned: tuple[TunedRange, ...] = ()  #: what ``tune="measure"`` chose for each distinct region and range of sizes


@dataclass(frozen=True, slots=True)
class KernelUse:
    """An attention kernel, the steps that it serves, and why."""

    kernel: str  #: its name
    serves: str  #: the steps that it serves
    why: str  #: why it serves them, or serves none
    remedy: str = ""  #: what makes a faster kernel possible; empty if there is none, or it is the fastest


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """Everything that a report shows."""

    subject: str  #: what it is about: the model, ``a runtime``
    problems: tuple[Problem, ...] = ()  #: what is slow or missing, apart from what the other figures say
    callables: tuple[CallableRecord, ...] = ()  #: the compiled callables
    keys: tuple[KeyUse, ...] = ()  #: the keys that have graphs
    uncaptured: tuple[CountedReason, ...] = ()  #: calls without a graph
    kernels: tuple[KernelUse, ...] = ()  #: attention kernels
    traffic: tuple[SizeTraffic, ...] = ()  #: the sizes of the calls
    costs: Costs = field(default_factory=Costs)  #: what it cost


def runtime_figures(
    subject: str,
    ledger: Ledger,
    callables: tuple[CallableRecord, ...],
    uses: Sequence[RegionUse],
    stats: RuntimeStats,
    problems: tuple[Problem, ...],
    *,
    is_timed: bool,
) -> ReportFigures:
    """The figures of a runtime."""
    keys = tuple(_key_uses(callables, uses, ledger, is_timed=is_timed))
    exact = {size.field for record in callables for size in record.sizes if not size.is_padded}
    exact -= {size.field for record in callables for size in record.sizes if size.is_padded}
    spent = [record.seconds for record in callables]
    return ReportFigures(
        subject,
        problems=problems,
        callables=callables,
        keys=keys,
        uncaptured=tuple(ledger.uncaptured.values()),
        traffic=tuple(_traffic_of(keys, stats.histograms, exact)),
        costs=Costs(
            callables=stats.callables,
            loaded=sum(record.is_loaded for record in callables),
            load_s=ledger.rows(WARM_START, LOADED)[None].seconds,
            artifacts=stats.artifacts,
            compile_s=CompileSeconds(*map(sum, zip(*map(astuple, spent), strict=True))) if spent else CompileSeconds(),
            graphs=stats.captured,
            capture_s=sum(use.captured.seconds for use in uses),
            pool_bytes=stats.pool_bytes,
            buffer_bytes=stats.buffer_bytes,
            replays=stats.replayed,
            saved_s=saved_s(uses) if is_timed else None,
            tuned=tuple(_tuned_ranges(ledger)),
        ),
    )


def _traffic_of(
    keys: Sequence[KeyUse], histograms: Mapping[str, Mapping[int, int]], exact: Collection[str]
) -> Iterator[SizeTraffic]:
    """The sizes of each field, of which so many are suggested that their combinations are a moderate number of keys.

    Each size of an exact field multiplies the keys, so beside one the calls per key count.
    """
    num_exact = math.prod(len(histograms[field]) or 1 for field in histograms.keys() & exact)
    calls = max((sum(seen.values()) for seen in histograms.values()), default=0)
    grid = _LARGEST_GRID if num_exact == 1 else min(_LARGEST_GRID, calls // _CALLS_OF_A_KEY) // num_exact
    limit = max(1, min(_MOST_OF_A_FIELD, round(grid ** (1 / (len(histograms.keys() - exact) or 1)))))
    limit_exact = num_exact if num_exact <= _LARGEST_GRID else 0
    for name, seen in histograms.items():
        is_padded, captured = name not in exact, captured_sizes(keys, name)
        of_field = limit if is_padded else limit_exact
        yield SizeTraffic(name, "capture_sizes", seen, captured, is_padded=is_padded, limit=of_field)


def _tuned_ranges(ledger: Ledger) -> Iterator[TunedRange]:
    for (region, event), live in list(ledger.tables.items()):
        rows = dict(live) if event == TUNED else {}
        for (sizes, settings), untuned in rows.items():
            if settings == UNTUNED and math.isfinite(untuned.least_s):
                of_range = ((name, row) for (other, name), row in rows.items() if other == sizes and row.n)
                name, kept = next(of_range, (UNTUNED, untuned))
                yield TunedRange(str(region), sizes, name, untuned.least_s, kept.least_s, untuned.seconds)


def saved_s(uses: Iterable[RegionUse]) -> float | None:
    """Estimated host seconds that the replays saved, rather low; None if nothing was timed.

    Launches take as long at any size, so the least times of all keys of a region count: of a warm-up or a recording,
    which submits no kernels; and of replays after captures, which may upload the graph.
    """
    by_region: dict[tuple[RegionId, CUDAGraphMode], list[RegionUse]] = {}
    for use in uses:
        by_region.setdefault((use.region, use.mode), []).append(use)
    found = [
        max(0.0, launch_s - replay_s) * sum(use.counts.replayed for use in of_region)
        for of_region in by_region.values()
        if math.isfinite(launch_s := min(use.captured.least_s for use in of_region))
        and math.isfinite(replay_s := min(use.replayed.least_s for use in of_region))
    ]
    return sum(found) if found else None


def key_sizes(key: BatchDescriptor, fields: Collection[str] | None = None) -> dict[str, Hashable]:
    """The sizes of a key by the user's names; values that JSON does not have are text."""
    sizes: dict[str, Hashable] = {"num_tokens": key.num_tokens} if fields is None or "num_tokens" in fields else {}
    if fields is None:
        named = {"num_reqs": key.num_reqs, "uniform": key.uniform or None, "num_active_loras": key.num_active_loras}
        sizes |= {name: value for name, value in named.items() if value}
    plain = (bool, int, float, str, type(None))
    return {**sizes, **{name: value if isinstance(value, plain) else str(value) for name, value in key.extra}}


def captured_sizes(keys: Iterable[KeyUse], field: str) -> tuple[int, ...]:
    """The sizes of one field at which there are graphs, ascending."""
    return tuple(sorted({size for key in keys if isinstance(size := key.sizes.get(field), int) and key.graphs}))


def _key_uses(
    callables: Sequence[CallableRecord], uses: Iterable[RegionUse], ledger: Ledger, *, is_timed: bool
) -> Iterator[KeyUse]:
    fields = {record.name: [size.field for size in record.sizes] for record in callables}
    by_key: dict[tuple[str, CUDAGraphMode, BatchDescriptor], list[RegionUse]] = {}
    for use in uses:
        by_key.setdefault((use.region.callable, use.mode, use.key), []).append(use)
    for (name, mode, key), of_regions in by_key.items():
        calls = ledger.rows(name, "called").get((mode, key))  # None if the callable's dispatcher never chose the key
        before = ledger.rows(name, PADDING_BEFORE).get((mode, key))
        is_measured = is_timed and calls is not None  # by the dispatcher that chose it
        yield KeyUse(
            graph=name,
            mode=str(mode),
            sizes=key_sizes(key, None if calls is None else fields.get(name, ())),
            graphs=sum(use.counts.captured for use in of_regions),
            calls=max(use.counts.replayed for use in of_regions) if calls is None else calls.n,
            replays=sum(use.counts.replayed for use in of_regions),
            copied=sum(use.counts.copied for use in of_regions),
            real=None if calls is None else calls.real,
            padded=None if calls is None else calls.padded,
            capture_s=sum(use.captured.seconds for use in of_regions),
            pool_bytes=sum(use.captured.pool_bytes for use in of_regions) if is_measured else None,
            driver_bytes=sum(use.captured.driver_bytes for use in of_regions) if is_measured else None,
            padding_s=None if before is None or not is_timed else before.seconds,
        )


def graph_figures(record: CallableRecord) -> Figures:
    """One callable as dicts, lists, strings, numbers, booleans and None."""
    sizes = list(map(asdict, record.sizes))
    for size, figures in zip(record.sizes, sizes, strict=True):
        del figures["causes"]
        figures["padded"] = figures.pop("is_padded")
        figures["not_proved"] = [_cause(cause, cause.verdict) for cause in size.causes]
        figures["made"] = [_cause(cause, "made") for cause in size.made]
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
        "sizes": sizes,
        "assumptions": list(record.assumptions),
        "compile_s": asdict(record.seconds),
    }


def _cause(cause: PaddingFinding, verdict: str) -> Figures:
    names = ("target", "op", "why", "where")
    return {**{name: getattr(cause, name) for name in names}, "verdict": str(verdict)}


def _reason(reason: Reason | None) -> Figures | None:
    return None if reason is None else {"why": reason.why, "where": reason.where, "remedy": reason.remedy}
