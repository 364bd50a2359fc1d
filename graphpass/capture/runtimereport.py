"""The figures of a runtime's report, and captured keys that a recompilation by torch.compile makes unreachable.

Of all compilations of a function, Dynamo calls the newest one whose guards pass. If an earlier compilation captured a
key, calls with that key may now reach a later compilation, which has no graph for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from graphpass.capture.records import CallTraffic, RegionId, RegionUse, RuntimeStats
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Costs, KeyUse, Problem, SizeTraffic
from graphpass.report.callables import CallableRecord, CompileSeconds
from graphpass.report.figures import ReportFigures

__all__ = ["captured_earlier", "captured_sizes", "figures_of", "key_sizes", "left_behind", "saved_s"]


class _Reported(Protocol):
    traffic: CallTraffic

    @property
    def device(self) -> torch.device | None: ...
    def callables(self) -> tuple[CallableRecord, ...]: ...
    def noted(self) -> tuple[Problem, ...]: ...
    def uses(self) -> list[RegionUse]: ...
    def stats(self) -> RuntimeStats: ...


def figures_of(runtime: _Reported, subject: str) -> ReportFigures:
    """The figures of a runtime's report.

    Args:
        runtime: the runtime.
        subject: what the report is about.
    """
    callables, uses, stats = runtime.callables(), runtime.uses(), runtime.stats()
    keys = tuple(_key_uses(callables, uses, runtime.traffic))
    exact = {size.field for record in callables for size in record.sizes if not size.is_padded}
    exact -= {size.field for record in callables for size in record.sizes if size.is_padded}
    return ReportFigures(
        subject,
        problems=runtime.noted(),
        callables=callables,
        keys=keys,
        uncaptured=tuple(runtime.traffic.without_graph()),
        traffic=tuple(
            SizeTraffic(field, "capture_sizes", seen, captured_sizes(keys, field), is_padded=field not in exact)
            for field, seen in stats.histograms.items()
        ),
        costs=Costs(
            callables=stats.callables,
            artifacts=stats.artifacts,
            compile_s=_sum_of([record.seconds for record in callables]),
            graphs=stats.captured,
            capture_s=sum(use.capture_s for use in uses),
            pool_bytes=stats.pool_bytes,
            buffer_bytes=stats.buffer_bytes,
            replays=stats.replayed,
            saved_s=None if runtime.device is None or runtime.device.type == "cpu" else saved_s(uses),
        ),
    )


def saved_s(uses: Iterable[RegionUse]) -> float | None:
    """Estimated host seconds that the replays saved; None if nothing was timed.

    The launches of a region take as long at any size, so the least times of all its keys count: those of a warm-up or a
    recording, and of the replays that follow captures. Such a replay may also upload its graph, and a recording does
    not submit its kernels, so the estimate is rather low.
    """
    by_region: dict[tuple[RegionId, CUDAGraphMode], list[RegionUse]] = {}
    for use in uses:
        by_region.setdefault((use.region, use.mode), []).append(use)
    found = [
        max(0.0, launch_s - replay_s) * sum(use.counts.replayed for use in of_region)
        for of_region in by_region.values()
        if math.isfinite(launch_s := min(use.launch_s for use in of_region))
        and math.isfinite(replay_s := min(use.replay_s for use in of_region))
    ]
    return sum(found) if found else None


def key_sizes(key: BatchDescriptor, fields: Collection[str] | None = None) -> dict[str, Hashable]:
    """The sizes of a key by the user's names; values that JSON does not have are text.

    Args:
        key: the padded shape.
        fields: the key fields of the callable that made the key; None if a dispatcher made it: the names are those of
            :class:`graphpass.BatchDescriptor`.
    """
    own = fields is not None
    sizes: dict[str, Hashable] = {}
    if not own or "num_tokens" in (fields or ()):
        sizes["num_tokens"] = key.num_tokens
    if not own:
        named = {"num_reqs": key.num_reqs, "uniform": key.uniform or None, "num_active_loras": key.num_active_loras}
        sizes |= {name: value for name, value in named.items() if value}
    return {**sizes, **{name: _plain(value) for name, value in key.extra}}


def captured_sizes(keys: Iterable[KeyUse], field: str) -> tuple[int, ...]:
    """The sizes of one field at which there are graphs, ascending."""
    return tuple(sorted({size for key in keys if isinstance(size := key.sizes.get(field), int) and key.graphs}))


def _key_uses(callables: Sequence[CallableRecord], uses: Iterable[RegionUse], traffic: CallTraffic) -> Iterator[KeyUse]:
    fields = {record.name: [size.field for size in record.sizes] for record in callables}
    by_key: dict[tuple[str, CUDAGraphMode, BatchDescriptor], list[RegionUse]] = {}
    for use in uses:
        by_key.setdefault((use.region.callable, use.mode, use.key), []).append(use)
    for (name, mode, key), of_regions in by_key.items():
        own = traffic.at(name, mode, key)
        yield KeyUse(
            graph=name,
            mode=str(mode),
            sizes=key_sizes(key, None if own is None else fields.get(name, ())),
            graphs=sum(use.counts.captured for use in of_regions),
            calls=max(use.counts.replayed for use in of_regions) if own is None else own.calls,
            replays=sum(use.counts.replayed for use in of_regions),
            copied=sum(use.counts.copied for use in of_regions),
            real=None if own is None else own.real_elements,
            padded=None if own is None else own.padded_elements,
            capture_s=sum(use.capture_s for use in of_regions),
        )


def _plain(value: Hashable) -> Hashable:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _sum_of(seconds: Sequence[CompileSeconds]) -> CompileSeconds:
    return CompileSeconds(
        partition=sum(s.partition for s in seconds),
        key=sum(s.key for s in seconds),
        compile=sum(s.compile for s in seconds),
        proof=sum(s.proof for s in seconds),
    )


class _Wrapper(Protocol):
    region: RegionId

    @property
    def mode(self) -> CUDAGraphMode: ...
    def captured(self) -> list[BatchDescriptor]: ...


def captured_earlier(
    wrappers: Iterable[_Wrapper],
    callables: Sequence[CallableRecord],
    region: RegionId,
    mode: CUDAGraphMode,
    descriptor: BatchDescriptor,
) -> RegionId | None:
    """The same region of another compilation of the function that has a graph for this key; None if there is none."""
    frames = {record.name: record.frame for record in callables if record.frame is not None}
    for wrapper in wrappers:
        other = wrapper.region
        if (
            other.callable != region.callable
            and other.region == region.region
            and wrapper.mode is mode
            and frames.get(other.callable, -1) == frames.get(region.callable, -2)
            and descriptor in wrapper.captured()
        ):
            return other
    return None


def left_behind(wrappers: Iterable[_Wrapper], callables: Sequence[CallableRecord]) -> Iterator[Problem]:
    """A problem for each compilation whose guards admit keys that only an earlier one has captured."""
    captured: dict[str, dict[tuple[CUDAGraphMode, BatchDescriptor], None]] = {}
    for wrapper in wrappers:
        keys = captured.setdefault(wrapper.region.callable, {})
        keys.update(dict.fromkeys((wrapper.mode, descriptor) for descriptor in wrapper.captured()))
    for number, newer in enumerate(callables):
        if newer.frame is None or newer.admits is None:
            continue
        for older in callables[:number]:
            if older.frame != newer.frame:
                continue
            keys = captured.get(older.name, {})
            missing = [key for key in keys if key not in captured.get(newer.name, {}) and newer.admits(key[1])]
            if missing:
                mode, descriptor = missing[0]
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                yield Problem(
                    "note",
                    f"torch.compile compiled {newer.name} after {older.name} was captured at {mode} {descriptor}"
                    f"{more}: calls that reach {newer.name} now have no graph",
                    (newer.name,),
                    remedy="call it once more at these keys inside `with runtime.capturing():`, or compile before "
                    "capturing, by a call in mode NONE whose dynamic sizes all differ",
                )
