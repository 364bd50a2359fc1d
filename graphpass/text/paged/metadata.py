"""The metadata of a step over a paged KV cache: tables, which are filled on the host and copied to the device.

A slot is a position in a layer's cache, ``page * page_size + offset``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphpass.errors import ShapeError
from graphpass.text.paged.kvcache import (
    FIRST_LIVE_PAGE,
    NULL_PAGE,
    SCRATCH_PAGE,
    LayerMask,
    LayerMemory,
    PagedKVCache,
    PagedLayer,
    PagedRequests,
)

_Ints = npt.NDArray[np.integer[Any]]


def pinned_memory(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for one copy to or from ``device``, which torch keeps until the copy is done."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one step, checked against the cache."""

    query_lens: _Ints  #: tokens of each request in this step, [requests]
    seq_lens: _Ints  #: length of each request after this step, [requests]
    num_pages: _Ints  #: pages in use of each request, [requests]
    pages: _Ints  #: the page numbers of all requests, concatenated
    num_tokens: int  #: of all requests

    @classmethod
    def of(cls, requests: PagedRequests, cache: PagedKVCache) -> Step:
        """Read and check requests."""
        query_lens, seq_lens = (np.asarray(n, dtype=np.int64) for n in (requests.query_lens, requests.seq_lens))
        if not len(query_lens) == len(seq_lens) == len(requests.block_tables):
            raise ShapeError(
                "the lists of a step's requests differ in length",
                expected="one query length, one sequence length and one block table a request",
                found=f"{len(query_lens)}, {len(seq_lens)} and {len(requests.block_tables)}",
                remedy="give every request an entry in each list",
            )
        if len(query_lens) == 0:
            return cls(query_lens, seq_lens, seq_lens, seq_lens, 0)
        # Reductions of ufuncs take half the time of the methods of arrays.
        if np.minimum.reduce(np.minimum(query_lens - 1, seq_lens - query_lens)) < 0:
            at = int(np.argmax((query_lens < 1) | (seq_lens < query_lens)))
            raise ShapeError(
                f"request {at} of the step has invalid lengths",
                expected="at least one token in this step, and a sequence that includes them",
                found=f"{query_lens[at]} tokens, a sequence of {seq_lens[at]}",
                remedy="seq_lens are the lengths after the step; leave requests without tokens out",
            )
        num_pages = -(-seq_lens // cache.page_size)
        pages = _used_pages(requests.block_tables, num_pages, cache.page_size)
        _check_pages(pages, num_pages, cache.num_pages, requests.is_scratch)
        return cls(query_lens, seq_lens, num_pages, pages, int(np.add.reduce(query_lens)))


def _used_pages(block_tables: Any, num_pages: _Ints, page_size: int) -> _Ints:
    """The pages in use, grouped by request."""
    is_array = isinstance(block_tables, np.ndarray)
    if is_array:
        lengths = np.full(len(num_pages), block_tables.shape[1])
    else:
        lengths = np.fromiter(map(len, block_tables), np.int64, len(num_pages))
    spare = lengths - num_pages
    if np.minimum.reduce(spare) < 0:
        at = int(np.argmax(spare < 0))
        raise ShapeError(
            f"request {at} of the step has too few pages",
            expected=f"{num_pages[at]} pages of {page_size} positions for its sequence",
            found=f"{lengths[at]}",
            remedy="allocate pages before the step that needs them",
        )
    if is_array:
        used: _Ints = block_tables[np.arange(block_tables.shape[1]) < num_pages[:, None]]
        return used
    if np.logical_or.reduce(spare):
        block_tables = [table[:count] for table, count in zip(block_tables, num_pages.tolist(), strict=True)]
    return np.fromiter(chain.from_iterable(block_tables), np.int64, int(np.add.reduce(num_pages)))


def _check_pages(pages: _Ints, num_pages: _Ints, num_live: int, is_scratch: bool) -> None:
    lowest, highest = (SCRATCH_PAGE, SCRATCH_PAGE) if is_scratch else (FIRST_LIVE_PAGE, num_live + FIRST_LIVE_PAGE - 1)
    if lowest <= np.minimum.reduce(pages) and np.maximum.reduce(pages) <= highest:
        return
    entry = int(np.argmax((pages < lowest) | (pages > highest)))
    request = int(np.searchsorted(np.cumsum(num_pages), entry, side="right"))
    reserved = {
        NULL_PAGE: "the null page, which is never written",
        SCRATCH_PAGE: "the scratch page, which is never read",
    }
    page = int(pages[entry])
    raise ShapeError(
        f"request {request} of the step has an invalid page",
        expected="only the scratch page" if is_scratch else f"pages {lowest} to {highest}",
        found=f"{page}" + (f", {reserved[page]}" if page in reserved else ""),
        remedy="use the pages that PageAllocator.allocate() returned",
    )


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The sizes of one metadata object's tables: first the int64 slot mapping, then the int32 tables."""

    num_tokens: int  #: real ones, in FULL the key's
    num_reqs: int  #: likewise
    query_len: int | None  #: tokens of each request in a uniform batch
    max_query_len: int  #: most tokens of a request
    limit: int  #: the longest sequence
    max_seq_len: int  #: ``limit``, rounded up to whole pages
    num_keys: int  #: packed keys; 0 if keys are not packed
    page_size: int
    has_positions: bool

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        is_mixed, num_ends = self.query_len is None, self.num_reqs + 1
        return {
            "block_tables": (self.num_reqs, self.max_seq_len // self.page_size),
            "seq_lens": (self.num_reqs,),
            "query_start_loc": (num_ends,),
            "first_positions": (self.num_reqs,),
            "token_rows": (self.num_tokens if is_mixed else 0,),
            "key_start_loc": (num_ends if self.num_keys else 0,),
            "key_slots": (self.num_keys,),
            "positions": (self.num_tokens if self.has_positions else 0,),
        }

    def num_int32(self) -> int:
        """Of the flat memory."""
        return 2 * self.num_tokens + sum(map(math.prod, self._shapes().values()))

    def views(self, flat: Any, int64: Any) -> dict[str, Any]:
        """The tables in ``flat``, of which ``int64`` is the 64-bit dtype."""
        start = 2 * self.num_tokens
        views = {"slot_mapping": flat[:start].view(int64)}
        for name, shape in self._shapes().items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views

    def check(self, step: Step) -> None:
        """Raise ShapeError if the step does not fit."""
        check_fits(step, num_reqs=self.num_reqs, num_tokens=self.num_tokens, max_seq_len=self.limit)
        if self.query_len is not None and np.logical_or.reduce(step.query_lens != self.query_len):
            raise ShapeError(
                "a step is not the uniform batch of its key",
                expected=f"{self.query_len} tokens of every request",
                found=f"{step.query_lens.min()} to {step.query_lens.max()}",
                remedy="dispatch with uniform_decode=False",
            )

    def fill(self, tables: Mapping[str, _Ints], step: Step) -> None:
        """Write a step that fits into tables on the host."""
        count, num_tokens, page_size = len(step.query_lens), step.num_tokens, self.page_size
        block_tables, starts = tables["block_tables"], tables["query_start_loc"]
        block_tables.fill(NULL_PAGE)
        block_tables[:count][np.arange(block_tables.shape[1]) < step.num_pages[:, None]] = step.pages
        first_positions = step.seq_lens - step.query_lens
        for table, values in ((tables["seq_lens"], step.seq_lens), (tables["first_positions"], first_positions)):
            table[:count] = values
            table[count:] = 0
        starts[0] = 0
        starts[1 : count + 1] = step.query_lens.cumsum()
        starts[count + 1 :] = num_tokens
        requests, within = self._places(step, starts)
        slots, padding = tables["slot_mapping"], np.arange(self.num_tokens - num_tokens)
        positions = first_positions[requests] + within
        slots[:num_tokens] = self._slots(block_tables, requests, positions)
        slots[num_tokens:] = SCRATCH_PAGE * page_size + padding % page_size
        if self.query_len is None:
            tables["token_rows"][:num_tokens] = requests * self.max_query_len + within
            tables["token_rows"][num_tokens:] = -1
        if self.has_positions:
            tables["positions"][:num_tokens] = positions
            tables["positions"][num_tokens:] = 0
        if self.num_keys:
            self._fill_keys(tables, step)

    def _places(self, step: Step, starts: _Ints) -> tuple[_Ints, _Ints | int]:
        """For each token its request, and its position among the request's tokens of this step."""
        count, tokens = len(step.query_lens), np.arange(step.num_tokens)
        if self.query_len == 1:
            return tokens, 0
        if self.query_len is not None:
            return tokens // self.query_len, tokens % self.query_len
        requests = np.repeat(np.arange(count), step.query_lens)
        return requests, tokens - starts[requests]

    def _slots(self, block_tables: _Ints, requests: _Ints, positions: _Ints) -> _Ints:
        pages, offsets = np.divmod(positions, self.page_size)
        return block_tables[requests, pages] * self.page_size + offsets

    def _fill_keys(self, tables: Mapping[str, _Ints], step: Step) -> None:
        count, num_keys = len(step.seq_lens), int(step.seq_lens.sum())
        starts = tables["key_start_loc"]
        starts[0] = 0
        starts[1 : count + 1] = step.seq_lens.cumsum()
        starts[count + 1 :] = num_keys
        requests = np.repeat(np.arange(count), step.seq_lens)
        tables["key_slots"][:num_keys] = self._slots(
            tables["block_tables"], requests, np.arange(num_keys) - starts[requests]
        )
        tables["key_slots"][num_keys:] = NULL_PAGE * self.page_size


def check_fits(step: Step, *, num_reqs: int, num_tokens: int, max_seq_len: int) -> None:
    """Raise ShapeError if the step exceeds these bounds."""
    for what, found, limit in (
        ("requests", len(step.query_lens), num_reqs),
        ("tokens", step.num_tokens, num_tokens),
        ("positions in its longest sequence", int(np.maximum.reduce(step.seq_lens, initial=0)), max_seq_len),
    ):
        if found > limit:
            raise ShapeError(
                f"a step has too many {what}",
                expected=f"at most {limit}, the bound of its key or of PagedAttention",
                found=str(found),
                remedy="dispatch with the step's own sizes, PagedAttention.extra() among them, or schedule less",
            )


# -- what the op calls and reads ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the op ``graphpass::paged_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    layer: int
    window: int  #: the sliding window that the layer passes; 0: it passes none
    scale: float  #: factor of the products of queries and keys
    softcap: float  #: the scaled products x become ``softcap * tanh(x / softcap)``; 0: none
    sinks: torch.Tensor | None  #: a score of each query head that takes part in the softmax and has no value, [heads]

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products and nothing else."""
        return not self.softcap and self.sinks is None


class PagedStep(ABC):
    """What the forward context must contain as ``attn_metadata`` for the op."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> None:
        """Serve one call of the op: write to ``call.out``."""


NewTensor = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""``f(name, shape, dtype)``: uninitialised memory."""


@dataclass(eq=False, kw_only=True)
class PagedMetadata(PagedStep):
    """The metadata of one step. A FULL key has one object, and each step refills its tables."""

    layout: TableLayout
    cache: PagedKVCache
    longest: int  #: the longest sequence of any step
    masks: tuple[LayerMask, ...]  #: the different masks of the layers, within ``longest``
    mask_of: tuple[int, ...]  #: for each layer the index of its mask
    numbers: torch.Tensor  #: 0, 1, 2..., int32
    value_offsets: torch.Tensor  #: 0, and the number of slots; int64 [2, 1, 1]
    new: InitVar[NewTensor]  #: allocates what the way to the keys needs
    is_padded: bool  #: tokens at the end may be padding, whose results are zero
    writes_in_one_kernel: bool
    #: slot that each token's key and value are written to, int64 [tokens]; scratch for padding
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor  #: page numbers, [requests, pages]; null after the last
    seq_lens: torch.Tensor  #: lengths after the step, [requests]; 0 for unused requests
    #: index of each request's first token, and then the number of real tokens, [requests + 1]
    query_start_loc: torch.Tensor
    #: position of each request's first token of this step, [requests]; 0 for unused ones
    first_positions: torch.Tensor
    #: of mixed batches: place of each token in [requests, max_query_len], [tokens]; -1 for padding
    token_rows: torch.Tensor
    key_start_loc: torch.Tensor  #: of packed keys: index of each request's first key, [requests + 1]
    #: of packed keys: the slot of each position of each request, [keys]; null after the last
    key_slots: torch.Tensor
    positions: torch.Tensor  #: of layers that scale queries: position of each token, [tokens]; 0 for padding
    #: the layer whose op runs first and prepares the step for all; learned from the first call
    first_layer: int | None = None

    def attend(self, call: AttentionCall) -> None:
        """Write the step's keys and values into the cache, then attend over each request's pages."""
        num_tokens = self.layout.num_tokens
        layer, memory = self.cache.layer(call.layer)
        self._check(call, layer)
        if call.out.shape[0] > num_tokens:
            call.out[num_tokens:].zero_()
        if num_tokens == 0:
            return
        new_keys, new_values = call.key[:num_tokens], call.value[:num_tokens]
        memory.write(self.slot_mapping, new_keys, new_values, in_one_kernel=self.writes_in_one_kernel)
        if self.first_layer is None:
            self.first_layer = call.layer
        if self.first_layer == call.layer:
            self._prepare()
        query = call.query[:num_tokens]
        if layer.query_scale is not None:  # guard: paged_position_scale
            query = (query * layer.query_scale.of(self.positions).view(-1, 1, 1)).to(query.dtype)
        attended = self._attended(call, query, memory, self.mask_of[call.layer])
        real = call.out[:num_tokens]
        if attended.dim() == 5:
            real = real.unflatten(1, attended.shape[2:4]).unflatten(0, attended.shape[:2])
        real.copy_(attended)
        if self.is_padded:
            real.masked_fill_((self.token_rows < 0).view(-1, 1, 1), 0.0)

    def _check(self, call: AttentionCall, layer: PagedLayer) -> None:
        _check_tensors(call, layer, self.cache.dtype, self.layout.num_tokens)
        declared = self.masks[self.mask_of[call.layer]].window
        passed = call.window if call.window < self.longest else 0
        if (call.window and passed != declared) or (layer.is_plain and not call.is_plain):
            raise ShapeError(
                f"layer {call.layer} computes other scores than its cache was created for",
                expected=f"a sliding window of {declared}" + (", no soft cap and no sinks" if layer.is_plain else ""),
                found=f"a sliding window of {call.window}, a soft cap of {call.softcap:g}, "
                f"{'no sinks' if call.sinks is None else 'sinks'}; 0 is none",
                remedy="create the cache with the layer as it is: PagedLayer(..., mask=LayerMask(window=4096), "
                "is_plain=False)",
            )

    @abstractmethod
    def _prepare(self) -> None:
        """Compute the tensors of this step on the device."""

    @abstractmethod
    def _attended(self, call: AttentionCall, query: torch.Tensor, memory: LayerMemory, mask: int) -> torch.Tensor:
        """Attention over a layer with the mask of this index, [tokens, heads, value_dim].

        Of a uniform batch it may be [requests, query_len, kv heads, group, value_dim].
        """


def _check_tensors(call: AttentionCall, layer: PagedLayer, dtype: torch.dtype, num_tokens: int) -> None:
    query, key, value, out, sinks = call.query, call.key, call.value, call.out, call.sinks
    num_kv_heads, head_dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.dim_of_values
    fits = (
        query.dim() == 3
        and query.shape[0] >= num_tokens
        and query.shape[1] % num_kv_heads == 0
        and query.shape[2] == head_dim
        and key.shape == (query.shape[0], num_kv_heads, head_dim)
        and value.shape == (query.shape[0], num_kv_heads, value_dim)
        and out.shape == (*query.shape[:2], value_dim)
        and (sinks is None or sinks.shape == query.shape[1:2])
        and query.dtype == key.dtype == value.dtype == out.dtype == dtype
    )
    if not fits:
        raise ShapeError(
            "paged attention got tensors that do not fit its cache or step",
            expected=f"key [at least {num_tokens}, {num_kv_heads}, {head_dim}], value [..., {num_kv_heads}, "
            f"{value_dim}], query and out of as many rows and a multiple of the heads, of {dtype}; one sink a head",
            found=", ".join(f"{list(t.shape)} {t.dtype}" for t in (query, key, value, out))
            + " (q, k, v, out)"
            + ("" if sinks is None else f", {list(sinks.shape)} sinks"),
            remedy="create the cache for the model's heads, head_dim and dtype, and dispatch with the step's sizes",
        )
