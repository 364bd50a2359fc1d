"""A paged KV cache: its memory, the allocation of its pages, and the pages of a step's requests.

A page stores ``page_size`` consecutive positions of one request, in every layer. Two pages belong to no request. The
null page contains zeros and is only read: it fills block tables behind a request's last page. The scratch page is only
written, by padding, warm-up and capture; no real row reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from graphpass.checks import positive
from graphpass.errors import OptionError, OutOfPagesError
from graphpass.text.paged.layers import PagedLayer

__all__ = [
    "FIRST_LIVE_PAGE",
    "NULL_PAGE",
    "SCRATCH_PAGE",
    "LayerMemory",
    "PageAllocator",
    "PagedKVCache",
    "PagedRequests",
    "round_up",
]

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


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Keys and values of one layer, views of the cache's memory.

    Attributes:
        keys: [slots, kv heads, head_dim].
        values: [slots, kv heads, value_dim].
        joined: keys and then values, [2 * slots, kv heads, head_dim]; None if their sizes differ.
    """

    keys: torch.Tensor
    values: torch.Tensor
    joined: torch.Tensor | None

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one key and one value to each slot, int64 [tokens]."""
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values.

        Args:
            slots: int64 [2, ...]: slots of keys, and the same slots plus the number of slots.

        Returns:
            Keys [..., kv heads, head_dim] and values [..., kv heads, value_dim].
        """
        shape = slots.shape[1:]
        if self.joined is None:
            of_keys = slots[0].reshape(-1)
            keys, values = self.keys.index_select(0, of_keys), self.values.index_select(0, of_keys)
        else:
            keys, values = self.joined.index_select(0, slots.view(-1)).chunk(2)
        return keys.unflatten(0, shape), values.unflatten(0, shape)


_ALIGNMENT = 128
"""Each layer's memory starts at a multiple of this many elements."""


class PagedKVCache:
    """Keys and values of all layers in one allocation, so that a graph depends on one address.

    Args:
        layers: the attention layers; the position in the sequence is the layer's number. None: no attention.
        num_pages: live pages of each layer.
        page_size: positions of a page.
        dtype: of keys and values.
        device: of the memory.

    Attributes:
        layers: as passed.
        memories: keys and values of each layer, all zeros at first; None for layers without attention.
        num_slots: positions in each layer, those of the null and the scratch page included.

    Raises:
        OptionError: a size is below 1, or no layer has attention.
    """

    def __init__(
        self,
        layers: Sequence[PagedLayer | None],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        positive(sum(layer is not None for layer in self.layers), "the number of layers of a KV cache")
        self.num_pages = num_pages = positive(num_pages, "num_pages of a KV cache")
        self.page_size = page_size = positive(page_size, "page_size of a KV cache")
        self.num_slots = (num_pages + FIRST_LIVE_PAGE) * page_size
        sizes = [0 if layer is None else self._num_elements(layer) for layer in self.layers]
        starts = [0, *accumulate(sizes)]
        with torch.inference_mode(False):
            self._memory = torch.zeros(starts[-1], dtype=dtype, device=device)
            self.memories = tuple(
                None if layer is None else self._memory_of(layer, self._memory[start:])
                for layer, start in zip(self.layers, starts[:-1], strict=True)
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._memory.dtype

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self._memory.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return self._memory.nbytes

    def _num_elements(self, layer: PagedLayer) -> int:
        """Elements of a layer, rounded up."""
        keys = round_up(self.num_slots * layer.num_kv_heads * layer.head_dim, _ALIGNMENT)
        return keys + round_up(self.num_slots * layer.num_kv_heads * layer.dim_of_values, _ALIGNMENT)

    def _memory_of(self, layer: PagedLayer, memory: torch.Tensor) -> LayerMemory:
        """A layer's views of the memory that starts with it."""
        slots, heads, dim = self.num_slots, layer.num_kv_heads, layer.head_dim
        if layer.dim_of_values == dim:
            joined = memory[: 2 * slots * heads * dim].view(2 * slots, heads, dim)
            return LayerMemory(joined[:slots], joined[slots:], joined)
        keys = memory[: slots * heads * dim].view(slots, heads, dim)
        behind = memory[round_up(keys.numel(), _ALIGNMENT) :]
        values = behind[: slots * heads * layer.dim_of_values].view(slots, heads, layer.dim_of_values)
        return LayerMemory(keys, values, None)


def round_up(size: int, step: int) -> int:
    """The least multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step
