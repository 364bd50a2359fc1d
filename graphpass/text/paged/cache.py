"""A paged KV cache: its memory, the allocation of its pages, and the pages of a step's requests.

A page stores ``page_size`` consecutive positions of one request, in every layer. Two pages belong to no request. The
null page contains zeros and is only read: it fills block tables behind a request's last page. The scratch page is only
written, by padding, warm-up and capture; no real row reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphpass.checks import positive
from graphpass.errors import OptionError, OutOfPagesError

__all__ = ["FIRST_LIVE_PAGE", "NULL_PAGE", "SCRATCH_PAGE", "PageAllocator", "PagedKVCache", "PagedRequests"]

NULL_PAGE, SCRATCH_PAGE, FIRST_LIVE_PAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PagedRequests:
    """The requests of one step, in the order of their tokens.

    Attributes:
        query_lens: tokens of each request in this step.
        seq_lens: length of each request after this step, its tokens included.
        block_tables: page numbers of each request, in the order of its positions; more than it needs is fine. A
            two-dimensional integer array, one row a request, is read faster than lists.
        is_scratch: nobody's requests, to warm up and capture with: all their pages are the scratch page.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    is_scratch: bool = False


class PageAllocator:
    """Allocates the pages of a cache to requests; the page that was freed last is allocated first.

    Args:
        num_pages: live pages of the cache.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages + FIRST_LIVE_PAGE - 1, FIRST_LIVE_PAGE - 1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages; they contain the values that their last owner wrote.

        Raises:
            OptionError: ``count`` is negative.
            OutOfPagesError: fewer are free; none is taken then.
        """
        if count < 0:
            raise OptionError(
                "pages cannot be allocated",
                expected="a count of at least 0",
                found=str(count),
                remedy="give pages back with free(pages)",
            )
        if count > len(self._free):
            raise OutOfPagesError(
                "the KV cache has too few free pages",
                expected=f"{count} free pages",
                found=f"{len(self._free)} of {self.num_pages}",
                remedy="finish or preempt a request, or create the cache with more pages",
            )
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free pages.

        Raises:
            OptionError: one of them is not taken, or stands there twice; none is given back then.
        """
        given = list(pages)
        if len(set(given)) != len(given) or not self._taken.issuperset(given):
            wrong = sorted({page for page in given if page not in self._taken or given.count(page) > 1})
            raise OptionError(
                "pages cannot be freed",
                expected="pages that allocate() returned, each once",
                found=str(wrong),
                remedy="free each request's pages once, when it ends",
            )
        self._taken.difference_update(given)
        self._free.extend(reversed(given))


class PagedKVCache:
    """Keys and values of all layers in one tensor, so that a graph depends on one address.

    Attributes:
        tensor: [layers, 2 (keys, values), pages + 2, page_size, kv heads, head_dim]; zeros at first.
        rows: the same memory as [layers * 2 * slots, kv heads, head_dim].
        num_slots: of one layer's keys, those of the null and the scratch page included.

    Raises:
        OptionError: a size is below 1.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers = positive(num_layers, "num_layers of a KV cache")
        self.num_pages = num_pages = positive(num_pages, "num_pages of a KV cache")
        self.page_size = page_size = positive(page_size, "page_size of a KV cache")
        self.num_kv_heads = num_kv_heads = positive(num_kv_heads, "num_kv_heads of a KV cache")
        self.head_dim = head_dim = positive(head_dim, "head_dim of a KV cache")
        shape = (num_layers, 2, num_pages + FIRST_LIVE_PAGE, page_size, num_kv_heads, head_dim)
        with torch.inference_mode(False):
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.rows = self.tensor.view(-1, num_kv_heads, head_dim)
        self.num_slots = (num_pages + FIRST_LIVE_PAGE) * page_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self.tensor.device
