"""Any model over a ladder of captured sizes: dispatch, pad, replay, cut."""

from graphpass.engine.hooks import ForwardHooks
from graphpass.engine.stats import CapturedGroup, ManagerStats

__all__ = [
    "CapturedGroup",
    "ForwardHooks",
    "ManagerStats",
]
