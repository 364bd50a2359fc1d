"""Attention over a paged cache of keys and values."""

from graphpass.text.paged.kvcache import (
    LayerMask,
    PageAllocator,
    PagedKVCache,
    PagedLayer,
    PagedRequests,
    PositionScale,
)
from graphpass.text.paged.pagedattention import PagedAttention

__all__ = [
    "LayerMask",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedLayer",
    "PagedRequests",
    "PositionScale",
]
