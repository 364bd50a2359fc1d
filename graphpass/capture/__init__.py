"""Capture and replay: devices, pool, static buffers, wrapper. Knows no FX."""

from graphpass.capture.counts import Counts
from graphpass.capture.policy import CapturePolicy
from graphpass.capture.records import CallableRecord, CompileSeconds, RuntimeStats
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CaptureScope, EnteredCallable
from graphpass.capture.wrapper import CUDAGraphWrapper

__all__ = [
    "CUDAGraphWrapper",
    "CallableRecord",
    "CapturePolicy",
    "CaptureScope",
    "CompileSeconds",
    "Counts",
    "EnteredCallable",
    "GraphRuntime",
    "RuntimeStats",
]
