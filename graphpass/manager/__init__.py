"""Running a whole model over its graphs: dispatch, pad, replay, cut."""

from graphpass.manager.attention import PagedAttention
from graphpass.manager.batch import AttentionMetadataBuilder, Batch, InputSpec
from graphpass.manager.cudagraphs import CudaGraphManager
from graphpass.manager.generation import Generation, NewToken
from graphpass.manager.graphed import GraphedModel, graphed
from graphpass.manager.managerstats import CapturedKey, KeyTraffic, ManagerStats
from graphpass.manager.masking import zero_padding
from graphpass.manager.paged import PageAllocator, PagedKVCache, PagedRequests
from graphpass.manager.scheduler import Request

__all__ = [
    "AttentionMetadataBuilder",
    "Batch",
    "CapturedKey",
    "CudaGraphManager",
    "Generation",
    "GraphedModel",
    "InputSpec",
    "KeyTraffic",
    "ManagerStats",
    "NewToken",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedRequests",
    "Request",
    "graphed",
    "zero_padding",
]
