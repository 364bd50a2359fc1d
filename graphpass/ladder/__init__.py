"""A ladder: one graph for each of several padded sizes. The engine and the encoder share this package.

It pads inputs into buffers, checks that the model has not changed since the capture, and measures, estimates and limits
the device memory of captures.
"""

from graphpass.ladder.estimate import GroupEstimate, MemoryEstimate
from graphpass.ladder.traffic import CapturedGraph, Traffic
from graphpass.report.records import MemoryGrowth

__all__ = [
    "CapturedGraph",
    "GroupEstimate",
    "MemoryEstimate",
    "MemoryGrowth",
    "Traffic",
]
