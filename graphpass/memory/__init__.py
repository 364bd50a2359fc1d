"""What captures take of a device's memory: read, told apart, and estimated before they are made."""

from graphpass.memory.estimating import estimated
from graphpass.memory.limit import KeyPool, capture_within
from graphpass.memory.meter import DeviceMemory, MemoryGrowth, MemoryMeter
from graphpass.memory.model import NOTHING_ESTIMATED, GroupEstimate, Key, MemoryEstimate, PoolModel

__all__ = [
    "NOTHING_ESTIMATED",
    "DeviceMemory",
    "GroupEstimate",
    "Key",
    "KeyPool",
    "MemoryEstimate",
    "MemoryGrowth",
    "MemoryMeter",
    "PoolModel",
    "capture_within",
    "estimated",
]
