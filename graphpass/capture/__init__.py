"""Capture and replay of graphs: devices, pool, static buffers, wrapper. Does not use FX."""

from graphpass.capture.policy import CapturePolicy
from graphpass.capture.records import Counts, RegionId, RegionUse, RuntimeStats
from graphpass.capture.scope import CaptureScope, ReachedCall, ReachedCallable
from graphpass.report.callables import (
    CallableRecord,
    CompileSeconds,
    PaddingCause,
    RegionRecord,
    SizeRecord,
)

__all__ = [
    "CallableRecord",
    "CapturePolicy",
    "CaptureScope",
    "CompileSeconds",
    "Counts",
    "PaddingCause",
    "ReachedCall",
    "ReachedCallable",
    "RegionId",
    "RegionRecord",
    "RegionUse",
    "RuntimeStats",
    "SizeRecord",
]
