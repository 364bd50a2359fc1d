"""A set of graphs at sizes: what the engine and the encoder share.

How inputs are padded into buffers of a size, whether the model is still the captured one, and what captures take of a
device's memory: read, estimated, and limited.
"""

from graphpass.ladder.estimate import NOTHING_ESTIMATED, GroupEstimate, Key, MemoryEstimate, PoolModel
from graphpass.ladder.estimating import estimated
from graphpass.ladder.limit import KeyPool, capture_within
from graphpass.ladder.meter import DeviceMemory, MemoryGrowth, MemoryMeter
from graphpass.ladder.traffic import CapturedGraph, Traffic

__all__ = [
    "NOTHING_ESTIMATED",
    "CapturedGraph",
    "DeviceMemory",
    "GroupEstimate",
    "Key",
    "KeyPool",
    "MemoryEstimate",
    "MemoryGrowth",
    "MemoryMeter",
    "PoolModel",
    "Traffic",
    "capture_within",
    "estimated",
]
