"""Capture and replay of graphs: devices, pool, static buffers, wrapper. Does not use FX."""

from graphpass.capture.scope import CapturePolicy, CaptureScope, ReachedCall, ReachedCallable
from graphpass.report.records import (
    CallableRecord,
    CompileSeconds,
    Counts,
    RegionId,
    RegionRecord,
    RegionUse,
    RuntimeStats,
    SizeRecord,
)

__all__ = [
    "CallableRecord",
    "CapturePolicy",
    "CaptureScope",
    "CompileSeconds",
    "Counts",
    "ReachedCall",
    "ReachedCallable",
    "RegionId",
    "RegionRecord",
    "RegionUse",
    "RuntimeStats",
    "SizeRecord",
]
