"""Runs any model over a ladder of captured sizes: dispatch a batch, pad it, replay its graph, cut the results.

A ladder is one graph for each of several padded sizes. What its captures need of the device is measured, estimated and
limited in ``estimate`` and counted in ``traffic``, for encoders, too.
"""

from graphpass.report.records import CapturedGroup, MemoryGrowth
from graphpass.serving.batch import ForwardHooks
from graphpass.serving.estimate import GroupEstimate, MemoryEstimate
from graphpass.serving.stats import ManagerStats
from graphpass.serving.traffic import CapturedGraph, Traffic

__all__ = [
    "CapturedGraph",
    "CapturedGroup",
    "ForwardHooks",
    "GroupEstimate",
    "ManagerStats",
    "MemoryEstimate",
    "MemoryGrowth",
    "Traffic",
]
