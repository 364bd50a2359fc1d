"""Attention over a paged cache of keys and values."""

from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PageAllocator, PagedKVCache, PagedRequests
from graphpass.text.paged.layers import LayerMask, PagedLayer, PositionScale

__all__ = [
    "LayerMask",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedLayer",
    "PagedRequests",
    "PositionScale",
]
