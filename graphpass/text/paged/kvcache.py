"""A paged KV cache: its layers, its memory, the allocation of its pages, and the pages of a step's requests.

A page stores ``page_size`` consecutive positions of one request, in every layer. Two pages belong to no request. The
null page contains zeros and is only read: it fills block tables after a request's last page. The scratch page is only
written, by padding, warm-up and capture; no real row reads it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from graphpass.dispatch.grid import round_up
from graphpass.errors import OptionError, OutOfPagesError, ShapeError, is_integer, positive

NULL_PAGE, SCRATCH_PAGE, FIRST_LIVE_PAGE = 0, 1, 2


@dataclass(frozen=True, slots=True, order=True)
class LayerMask:
    """The keys that a query attends to: those up to its own position, within these limits.

    Raises:
        OptionError: a limit is negative or no integer.
    """

    window: int = 0  #: number of positions, the query's own included (sliding window); 0: no limit
    chunk: int = 0  #: positions from the last multiple of this number on (chunked attention); 0: no limit

    def __post_init__(self) -> None:
        if not all(is_integer(limit, at_least=0) for limit in (self.window, self.chunk)):
            raise OptionError(
                "the mask of an attention layer is not valid",
                expected="a window and a chunk of at least 1 position, 0 for none",
                found=f"window={self.window!r}, chunk={self.chunk!r}",
                remedy="leave out a limit that the layer does not have",
            )

    def within(self, max_seq_len: int) -> LayerMask:
        """The same mask for sequences up to this length."""
        return LayerMask(
            window=self.window if self.window < max_seq_len else 0, chunk=self.chunk if self.chunk < max_seq_len else 0
        )

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions attend to keys at these; shapes are broadcast."""
        seen = keys <= queries
        if self.window:
            seen = seen & (keys > queries - self.window)
        if self.chunk:  # guard: paged_chunks
            seen = seen & (keys >= queries - queries % self.chunk)
        return seen


@dataclass(frozen=True, slots=True)
class PositionScale:
    """A query at position p is multiplied by ``1 + factor * log(1 + floor((p + 1) / interval))``, as in Llama 4."""

    interval: float  #: positions with the same scale
    factor: float  #: strength

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The scales of queries at these positions, float32."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.interval)) * self.factor + 1.0


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention layer over a paged cache.

    Raises:
        OptionError: a size is below 1.
    """

    num_kv_heads: int  #: heads of keys and values
    head_dim: int  #: size of a query and a key
    value_dim: int = 0  #: size of a value; 0: ``head_dim``
    mask: LayerMask = LayerMask()  #: the keys that a query attends to
    is_plain: bool = True  #: the scores are scaled products, without a soft cap or sinks
    query_scale: PositionScale | None = None  #: scale of queries by position; None: none

    def __post_init__(self) -> None:
        sizes = (self.num_kv_heads, self.head_dim)
        if not all(is_integer(size, at_least=1) for size in sizes) or not is_integer(self.value_dim, at_least=0):
            raise OptionError(
                "the sizes of an attention layer are not valid",
                expected="num_kv_heads and head_dim of at least 1, and a value_dim of at least 1 or 0 for head_dim",
                found=f"{self.num_kv_heads!r}, {self.head_dim!r} and {self.value_dim!r}",
                remedy="pass the sizes of the model's attention",
            )

    @property
    def dim_of_values(self) -> int:
        """Size of a value."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class PagedRequests:
    """The requests of one step, in the order of their tokens."""

    query_lens: Sequence[int]  #: tokens of each request in this step
    seq_lens: Sequence[int]  #: length of each request after this step, its tokens included
    #: page numbers of each request, in order; extra ones are ignored. An integer array is read faster than lists
    block_tables: Sequence[Sequence[int]]
    is_scratch: bool = False  #: a placeholder batch for warm-up and capture: all its pages are the scratch page


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
        positive(count, "a number of pages to allocate", at_least=0, remedy="give pages back with free(pages)")
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
            OptionError: one of them is not allocated, or is listed twice; no page is freed then.
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
    """Keys and values of one layer, views of the cache's memory."""

    keys: torch.Tensor  #: [slots, kv heads, head_dim]
    values: torch.Tensor  #: [slots, kv heads, value_dim]
    joined: torch.Tensor | None  #: keys and then values, [2 * slots, kv heads, head_dim]; None if their sizes differ

    def write(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, in_one_kernel: bool = False
    ) -> None:
        """Write one key and one value to each slot, int64 [tokens]; in one kernel with Triton, which needs CUDA."""
        if not in_one_kernel:
            self.keys.index_copy_(0, slots, keys)
            self.values.index_copy_(0, slots, values)
            return
        num_slots, num_heads, dim = self.keys.shape
        value_dim = self.values.shape[2]
        block = 1 << (max(dim, value_dim) - 1).bit_length()
        rows = (keys, *keys.stride(), self.keys, dim), (values, *values.stride(), self.values, value_dim)
        with torch.cuda.device_of(self.keys):
            _row_writer()[len(slots), num_heads](slots, num_slots, num_heads, *rows[0], *rows[1], block, num_warps=1)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values in ``slots``, int64 [2, ...]: those of keys, and these plus the number of slots."""
        shape = slots.shape[1:]
        if self.joined is None:
            of_keys = slots[0].reshape(-1)
            keys, values = self.keys.index_select(0, of_keys), self.values.index_select(0, of_keys)
        else:
            keys, values = self.joined.index_select(0, slots.view(-1)).chunk(2)
        return keys.unflatten(0, shape), values.unflatten(0, shape)


@functools.cache
def _row_writer() -> Any:
    """The Triton kernel that writes the key and the value of one head of one token."""
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

    def write_rows(  # type: ignore[no-untyped-def]
        slots,
        num_slots,
        num_heads,
        keys,
        key_row,
        key_head,
        key_entry,
        stored_keys,
        dim: tl.constexpr,  # type: ignore[name-defined]
        values,
        value_row,
        value_head,
        value_entry,
        stored_values,
        value_dim: tl.constexpr,  # type: ignore[name-defined]
        block: tl.constexpr,  # type: ignore[name-defined]
    ):
        row, head, entries = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, block)
        slot = tl.load(slots + row)
        is_slot = (slot >= 0) & (slot < num_slots)
        place = slot * num_heads + head
        is_key, is_value = is_slot & (entries < dim), is_slot & (entries < value_dim)
        key = tl.load(keys + row * key_row + head * key_head + entries * key_entry, mask=is_key)
        value = tl.load(values + row * value_row + head * value_head + entries * value_entry, mask=is_value)
        tl.store(stored_keys + place * dim + entries, key, mask=is_key)
        tl.store(stored_values + place * value_dim + entries, value, mask=is_value)

    return triton.jit(write_rows)


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
        #: positions in each layer, those of the null and the scratch page included
        self.num_slots = (num_pages + FIRST_LIVE_PAGE) * page_size
        sizes = [0 if layer is None else self._num_elements(layer) for layer in self.layers]
        starts = [0, *accumulate(sizes)]
        with torch.inference_mode(False):
            self._memory = torch.zeros(starts[-1], dtype=dtype, device=device)
            self.dtype, self.device = dtype, self._memory.device
            #: keys and values of each layer, all zeros at first; None for layers without attention
            self.memories = tuple(
                None if layer is None else self._memory_of(layer, self._memory[start:])
                for layer, start in zip(self.layers, starts[:-1], strict=True)
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return self._memory.nbytes

    def layer(self, number: int) -> tuple[PagedLayer, LayerMemory]:
        """A layer, and its keys and values.

        Raises:
            ShapeError: the cache has no such layer.
        """
        is_known = 0 <= number < len(self.layers)
        layer, memory = (self.layers[number], self.memories[number]) if is_known else (None, None)
        if layer is None or memory is None:
            raise ShapeError(
                "the KV cache has no such layer",
                expected=f"one of layers {[n for n, known in enumerate(self.layers) if known is not None]}",
                found=str(number),
                remedy="create the cache with as many layers as the model has",
            )
        return layer, memory

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
        after = memory[round_up(keys.numel(), _ALIGNMENT) :]
        values = after[: slots * heads * layer.dim_of_values].view(slots, heads, layer.dim_of_values)
        return LayerMemory(keys, values, None)
