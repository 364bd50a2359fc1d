"""Attention over a paged cache of keys and values."""

from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import (
    LayerMask,
    PageAllocator,
    PagedKVCache,
    PagedLayer,
    PagedRequests,
    PositionScale,
)

__all__ = [
    "LayerMask",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedLayer",
    "PagedRequests",
    "PositionScale",
]
