"""Attention over a paged cache of keys and values."""

from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PageAllocator, PagedKVCache, PagedRequests

__all__ = ["PageAllocator", "PagedAttention", "PagedKVCache", "PagedRequests"]
