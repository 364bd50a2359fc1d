"""Runs any model over a ladder of captured sizes: dispatch a batch, pad it, replay its graph, cut the results."""

from graphpass.engine.batch import ForwardHooks
from graphpass.engine.stats import ManagerStats
from graphpass.report.records import CapturedGroup

__all__ = [
    "CapturedGroup",
    "ForwardHooks",
    "ManagerStats",
]
