"""What a runtime reports: its tables, and captured keys that a recompilation by torch.compile makes unreachable.

Of all compilations of a function, Dynamo calls the newest one whose guards pass. If an earlier compilation captured a
key, calls with that key may now reach a later compilation, which has no graph for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from graphpass.capture.records import (
    CallableRecord,
    CallTraffic,
    Counts,
    RegionId,
    RegionReason,
    RegionRecord,
    RuntimeStats,
)
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report, Table

__all__ = ["captured_earlier", "left_behind", "report_of"]


def report_of(
    callables: Sequence[CallableRecord],
    counts: Mapping[tuple[str, CUDAGraphMode, BatchDescriptor], Counts],
    notes: Mapping[str, int],
    traffic: CallTraffic,
    stats: RuntimeStats,
    suggested_sizes: Sequence[int],
) -> Report:
    """Tables of regions, padding, keys, calls, notes, and memory with suggested sizes, in this order."""
    regions = Table(
        "Regions",
        ("region", "kind", "ops", "reason"),
        tuple(
            (f"{record.name}.{region.name}", region.kind, str(region.num_ops), region.why)
            for record in callables
            for region in (*record.regions, *_ending(record))
        ),
    )
    padding = Table(
        "Padding",
        ("graph", "size", "verdict", "why"),
        tuple((record.name, *row) for record in callables for row in record.padding),
    )
    keys = Table(
        "Keys",
        ("region", "mode", "key", "captured", "replayed", "copied", "static sets"),
        tuple(
            (name, str(mode), str(key), str(c.captured), str(c.replayed), str(c.copied), str(c.static_sets))
            for (name, mode, key), c in counts.items()
        ),
    )
    sizes = ", ".join(map(str, suggested_sizes)) or "none seen"
    memory = Table(
        "Memory and sizes",
        ("pool bytes", "buffer bytes", "suggested capture sizes"),
        ((str(stats.pool_bytes), str(stats.buffer_bytes), sizes),),
    )
    noted = Table("Notes", ("times", "what"), tuple((str(times), text) for text, times in notes.items()))
    return Report((regions, padding, keys, traffic.table(), noted, memory))


def _ending(record: CallableRecord) -> tuple[RegionRecord, ...]:
    return (RegionRecord("end", "", 0, (RegionReason(record.reason),)),) if record.reason else ()


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


def left_behind(wrappers: Iterable[_Wrapper], callables: Sequence[CallableRecord]) -> Iterator[tuple[str, str]]:
    """(warning, remedy) for each compilation whose guards admit keys that only an earlier one has captured."""
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
                yield (
                    f"torch.compile compiled {newer.name} after {older.name} was captured at {mode} {descriptor}"
                    f"{more}: calls that reach {newer.name} now have no graph",
                    "call it once more at these keys inside `with runtime.capturing():`, or compile before capturing, "
                    "by a call in mode NONE whose dynamic sizes all differ",
                )
