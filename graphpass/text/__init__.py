"""Text generation with a decoder over captured graphs: scheduling, paged attention, LoRA adapters, draft tokens."""

from graphpass.text.causallm import CausalLM, CausalLMConfig
from graphpass.text.drafting import Drafter, NgramDrafter
from graphpass.text.generation import Generation, GenerationStats, NewToken
from graphpass.text.lora import AdapterBatch, LoraAdapters, LoraModel
from graphpass.text.paged import (
    LayerMask,
    PageAllocator,
    PagedAttention,
    PagedKVCache,
    PagedLayer,
    PagedRequests,
    PositionScale,
)
from graphpass.text.scheduler import Request

__all__ = [
    "AdapterBatch",
    "CausalLM",
    "CausalLMConfig",
    "Drafter",
    "Generation",
    "GenerationStats",
    "LayerMask",
    "LoraAdapters",
    "LoraModel",
    "NewToken",
    "NgramDrafter",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedLayer",
    "PagedRequests",
    "PositionScale",
    "Request",
]
