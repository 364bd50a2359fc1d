"""Running a whole model over its graphs: dispatch, pad, replay, cut."""

from graphpass.manager.attention import PagedAttention
from graphpass.manager.batch import AttentionMetadataBuilder, Batch, InputSpec
from graphpass.manager.cudagraphs import CudaGraphManager
from graphpass.manager.drafting import Drafter, NgramDrafter
from graphpass.manager.generation import Generation, NewToken
from graphpass.manager.lora import AdapterBatch, LoraAdapters, LoraModel
from graphpass.manager.managerstats import CapturedGroup, CapturedKey, KeyTraffic, ManagerStats
from graphpass.manager.masking import zero_padding
from graphpass.manager.offload import WeightOffloader
from graphpass.manager.paged import PageAllocator, PagedKVCache, PagedRequests
from graphpass.manager.scheduler import Request
from graphpass.manager.speculation import GenerationStats

__all__ = [
    "AdapterBatch",
    "AttentionMetadataBuilder",
    "Batch",
    "CapturedGroup",
    "CapturedKey",
    "CudaGraphManager",
    "Drafter",
    "Generation",
    "GenerationStats",
    "InputSpec",
    "KeyTraffic",
    "LoraAdapters",
    "LoraModel",
    "ManagerStats",
    "NewToken",
    "NgramDrafter",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedRequests",
    "Request",
    "WeightOffloader",
    "zero_padding",
]
