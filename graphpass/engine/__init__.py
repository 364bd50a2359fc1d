"""Any model over a ladder of captured sizes: dispatch, pad, replay, cut."""

from graphpass.engine.batch import AttentionMetadataBuilder, Batch, InputSpec
from graphpass.engine.hooks import ForwardHooks
from graphpass.engine.manager import CudaGraphManager
from graphpass.engine.stats import CapturedGroup, ManagerStats

__all__ = [
    "AttentionMetadataBuilder",
    "Batch",
    "CapturedGroup",
    "CudaGraphManager",
    "ForwardHooks",
    "InputSpec",
    "ManagerStats",
]
