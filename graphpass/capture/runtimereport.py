"""The tables of :meth:`GraphRuntime.report <graphpass.capture.runtime.GraphRuntime.report>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphpass.capture.records import CallableRecord, CallTraffic, Counts, RegionReason, RegionRecord
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report, Table

__all__ = ["report_of"]


def report_of(
    callables: Sequence[CallableRecord],
    counts: Mapping[tuple[str, CUDAGraphMode, BatchDescriptor], Counts],
    notes: Mapping[str, int],
    traffic: CallTraffic,
    *,
    pool_bytes: int,
    buffer_bytes: int,
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
        ((str(pool_bytes), str(buffer_bytes), sizes),),
    )
    noted = Table("Notes", ("times", "what"), tuple((str(times), text) for text, times in notes.items()))
    return Report((regions, padding, keys, traffic.table(), noted, memory))


def _ending(record: CallableRecord) -> tuple[RegionRecord, ...]:
    return (RegionRecord("end", "", 0, (RegionReason(record.reason),)),) if record.reason else ()
