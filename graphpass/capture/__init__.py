"""Capture and replay of graphs: devices, pool, static buffers, wrapper. Does not use FX."""

from graphpass.capture.policy import CapturePolicy
from graphpass.capture.records import (
    CallableRecord,
    CompileSeconds,
    Counts,
    RegionId,
    RegionReason,
    RegionRecord,
    RuntimeStats,
    SizeRecord,
)
from graphpass.capture.scope import CaptureScope, ReachedCall, ReachedCallable

__all__ = [
    "CallableRecord",
    "CapturePolicy",
    "CaptureScope",
    "CompileSeconds",
    "Counts",
    "ReachedCall",
    "ReachedCallable",
    "RegionId",
    "RegionReason",
    "RegionRecord",
    "RuntimeStats",
    "SizeRecord",
]
