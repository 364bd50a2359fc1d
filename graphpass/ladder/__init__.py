"""A set of graphs at sizes: what the engine and the encoder share.

How inputs are padded into buffers of a size, whether the model is still the captured one, and what captures take of a
device's memory: read, estimated, and limited.
"""

from graphpass.ladder.estimate import GroupEstimate, MemoryEstimate
from graphpass.ladder.meter import MemoryGrowth
from graphpass.ladder.traffic import CapturedGraph, Traffic

__all__ = [
    "CapturedGraph",
    "GroupEstimate",
    "MemoryEstimate",
    "MemoryGrowth",
    "Traffic",
]
