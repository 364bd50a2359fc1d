"""Capture and replay: devices, pool, static buffers, wrapper. Knows no FX."""

from graphpass.capture.policy import CapturePolicy
from graphpass.capture.runtime import CallableRecord, CaptureScope, EnteredCallable, GraphRuntime, RuntimeStats
from graphpass.capture.tally import Counts
from graphpass.capture.wrapper import CUDAGraphWrapper

__all__ = [
    "CUDAGraphWrapper",
    "CallableRecord",
    "CapturePolicy",
    "CaptureScope",
    "Counts",
    "EnteredCallable",
    "GraphRuntime",
    "RuntimeStats",
]
