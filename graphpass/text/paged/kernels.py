"""The attention of a step's tokens over their keys: the ways to the same result, and the choice between them.

*Flash attention* reads the keys in place if each request has one page, and otherwise a concatenated copy of the keys of
all requests. *Batched*, each request's keys are copied into a row of the longest length, and one attention with a mask
serves all rows, every layer and every device; heads that share keys are folded into the query dimension.

Copies of positions that a request has not reached come from the null page: its last page contains what another owner
wrote, and a weight of zero does not keep a NaN out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

from graphpass.compat import operators
from graphpass.ops import kernel_fault
from graphpass.report import KernelUse
from graphpass.text.paged.kvcache import LayerMask, LayerMemory, PagedKVCache, PagedLayer
from graphpass.text.paged.metadata import AttentionCall, NewTensor, PagedMetadata

# -- ways to the keys --------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class BatchedKeys(PagedMetadata):
    """Gathers the keys of each request into a row, padded to the longest length."""

    #: slots of keys and of values, int64 [2, requests, length]; the null page's first slot for positions not reached
    slots: torch.Tensor = field(init=False)
    #: added to scores, 0 or -inf, in the cache's dtype [masks, requests, max_query_len, length]
    bias: torch.Tensor = field(init=False)
    query_rows: torch.Tensor = field(
        init=False
    )  #: of mixed batches: token in each place, int64 [requests, max_query_len]
    token_places: torch.Tensor = field(init=False)  #: of mixed batches: the place of each token, int64 [tokens]

    def __post_init__(self, new: NewTensor) -> None:
        layout = self.layout
        reqs, queries, length = layout.num_reqs, layout.max_query_len, layout.max_seq_len
        is_mixed = layout.query_len is None
        self.slots = new("slots", (2, reqs, length), torch.int64)
        self.bias = new("bias", (len(self.masks), reqs, queries, length), self.cache.dtype)
        self.query_rows = new("query_rows", (reqs, queries) if is_mixed else (0, 0), torch.int64)
        self.token_places = new("token_places", (layout.num_tokens if is_mixed else 0,), torch.int64)

    def _prepare(self) -> None:
        numbers = self.numbers
        _, num_reqs, length = self.slots.shape
        positions = numbers[:length]
        page_size = self.layout.page_size
        slots = torch.add(numbers[:page_size], self.block_tables.unsqueeze(-1), alpha=page_size).view(num_reqs, length)
        slots.mul_(positions < self.seq_lens.unsqueeze(1))  # guard: paged_null_page
        torch.add(slots, self.value_offsets, out=self.slots)
        places = numbers[: self.bias.shape[2]]
        # Unused requests see the null page: a softmax over nothing would be NaN.
        own = (self.first_positions.unsqueeze(1) + places).unsqueeze(-1)
        for bias, mask in zip(self.bias, self.masks, strict=True):
            bias.fill_(-math.inf).masked_fill_(mask.visible(own, positions), 0.0)
        if self.layout.query_len is None:
            torch.add(self.query_start_loc[:-1].unsqueeze(1), places, out=self.query_rows)
            self.query_rows.clamp_(max=self.layout.num_tokens - 1)
            self.token_places.copy_(self.token_rows).clamp_(min=0)

    def _attended(self, call: AttentionCall, query: torch.Tensor, memory: LayerMemory, mask: int) -> torch.Tensor:
        num_reqs, queries = self.bias.shape[1:3]
        keys, values = memory.gather(self.slots)
        is_mixed = self.layout.query_len is None
        if is_mixed:
            query = query.index_select(0, self.query_rows.view(-1))
        num_kv_heads = keys.shape[2]
        grouped = query.unflatten(1, (num_kv_heads, -1)).unflatten(0, (num_reqs, queries))
        group = grouped.shape[3]
        # [requests, kv heads, group * queries, head_dim]: with one query a request this is a view.
        folded = grouped.permute(0, 2, 3, 1, 4).reshape(num_reqs, num_kv_heads, group * queries, -1)
        bias = self.bias[mask].unsqueeze(1)
        if queries > 1 and group > 1:
            bias = bias.repeat(1, 1, group, 1)
        attended = masked_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), bias, call.scale, call.softcap, call.sinks
        )
        unfolded: torch.Tensor = attended.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
        if not is_mixed:
            return unfolded
        by_place: torch.Tensor = unfolded.reshape(num_reqs * queries, num_kv_heads * group, -1)
        return by_place.index_select(0, self.token_places)


@dataclass(eq=False, kw_only=True)
class FlashKeys(PagedMetadata):
    """Flash attention over the keys of each request, copied or in their page; for plain scores only."""

    #: slots of the keys to copy, and of their values, int64 [2, keys]; None: keys are read in place
    slots: torch.Tensor | None = field(init=False)
    #: of keys in place: slot of each request's first key, and a 0, int32 [requests + 1]
    starts: torch.Tensor = field(init=False)
    #: of uniform batches: index of each request's first token, unused requests included, int32 [requests + 1]
    query_bounds: torch.Tensor = field(init=False)

    def __post_init__(self, new: NewTensor) -> None:
        num_keys, count = self.layout.num_keys, self.layout.num_reqs + 1
        self.slots = new("slots", (2, num_keys), torch.int64) if num_keys else None
        self.starts = new("starts", (0 if num_keys else count,), torch.int32)
        self.query_bounds = new("query_bounds", (0 if self.layout.query_len is None else count,), torch.int32)

    def _prepare(self) -> None:
        layout = self.layout
        if self.slots is not None:
            torch.add(self.key_slots, self.value_offsets.view(2, 1), out=self.slots)
            return
        self.starts.zero_()
        torch.mul(self.block_tables[:, 0], layout.page_size, out=self.starts[:-1])
        if layout.query_len is not None:
            torch.mul(self.numbers[: len(self.query_bounds)], layout.query_len, out=self.query_bounds)

    def _attended(self, call: AttentionCall, query: torch.Tensor, memory: LayerMemory, mask: int) -> torch.Tensor:
        """Rows of unused requests of a uniform batch are zero, padded rows of a mixed batch undefined."""
        layout = self.layout
        # guard: paged_unused_in_place
        bounds = self.query_start_loc if layout.query_len is None else self.query_bounds
        if self.slots is None:
            keys, values, starts, longest = memory.keys, memory.values, self.starts, layout.limit
        else:
            (keys, values), starts, longest = memory.gather(self.slots), self.key_start_loc, layout.max_seq_len
        sequences = operators.PackedSequences(bounds, starts, self.seq_lens, layout.max_query_len, longest)
        window = self.masks[mask].window
        return operators.flash_attention(query, keys, values, sequences, scale=call.scale, causal_window=window)


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with a mask; with a soft cap or sinks at least in float32, since no kernel of torch computes those.

    ``query`` and the result are [requests, kv heads, group * queries, size], ``keys`` and ``values`` [requests, kv
    heads, length, size]. ``bias``, 0 or -inf, is broadcast to the scores.
    """
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
    dtype = torch.promote_types(query.dtype, torch.float32)
    products = torch.matmul(query.to(dtype), keys.to(dtype).transpose(-1, -2)) * scale
    if softcap:  # guard: paged_softcap
        products = torch.tanh(products / softcap) * softcap
    products = products + bias
    if sinks is not None:
        num_kv_heads, rows = query.shape[1:3]
        of_heads = sinks.to(dtype).view(1, num_kv_heads, -1, 1)
        sinks = of_heads.expand(len(query), -1, -1, rows // of_heads.shape[2]).reshape(
            len(query), num_kv_heads, rows, 1
        )
        weights = torch.cat([products, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = products.softmax(-1)
    return torch.matmul(weights, values.to(dtype)).to(values.dtype)


# -- the choice --------------------------------------------------------------------------------------------------------


def kernels_of(cache: PagedKVCache, max_seq_len: int) -> tuple[bool, bool, tuple[KernelUse, ...]]:
    """Whether flash attention serves the layers, whether it reads the pages, and which kernel serves what."""
    of_flash = flash_obstacle(cache.layers, max_seq_len, cache.dtype, cache.device)
    of_pages = of_flash or _page_obstacle(cache, max_seq_len)
    if of_pages is None:
        packed = masked = ("none", "flash attention over pages copies no keys")
    elif of_flash is None:
        packed = "prompts and mixed steps", "serves the layers, and computes no masked products"
        masked = "steps with the same number of tokens in every request", "serves the steps of equal lengths"
    else:
        packed, masked = ("none", of_flash), ("all steps", "serves every layer on every device")
    in_place = ("all steps", "each sequence lies in one page") if of_pages is None else ("none", of_pages)
    uses = (
        KernelUse("varlen_attn over pages (block_table)", "none", _block_table_obstacle()),
        KernelUse("flash attention over pages of whole sequences", *in_place),
        KernelUse("flash attention over packed keys", *packed),
        KernelUse("scaled_dot_product_attention over gathered keys", *masked),
    )
    return of_flash is None, of_pages is None, uses


def _block_table_obstacle() -> str:
    """Why no kernel reads pages through a table.

    ``varlen_attn`` has block tables from torch 2.13 on. A page may contain NaN of its last owner after a sequence's
    end, and nothing says that these kernels do not multiply it by a weight of zero.
    """
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if "block_table" not in inspect.signature(function).parameters:
        return f"torch {torch.__version__} has none"
    return "it may read stale values of a page's last owner after the end of a sequence"


def flash_obstacle(
    layers: Sequence[PagedLayer | None], max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why torch's flash attention cannot serve these layers; None if it can."""
    for layer in layers:
        if layer is None:
            continue
        dim, value_dim = layer.head_dim, layer.dim_of_values
        if (reason := operators.flash_obstacle(device, dtype, dim)) is not None:
            return reason
        if layer.mask.within(max_seq_len).chunk:
            return "it has no chunked attention"
        if not layer.is_plain:
            return "it has neither a soft cap nor sinks"
        if value_dim != dim:
            return f"keys and values differ in size: {dim} and {value_dim}"
        if dim % 8:
            return f"it takes heads of a multiple of 8, a layer has {dim}"
    return None


def _page_obstacle(cache: PagedKVCache, max_seq_len: int) -> str | None:
    """Why flash attention cannot read the pages; None if it can."""
    if cache.page_size < max_seq_len:
        return f"a page has {cache.page_size} positions, a sequence up to {max_seq_len}: its keys are apart"
    faults = [fault_in_place(cache.device, cache.dtype, layer.head_dim) for layer in cache.layers if layer is not None]
    return next((fault for fault in faults if fault is not None), None)  # guard: paged_kernel_tried


@functools.cache
def fault_in_place(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Test flash attention over pages on this device; why it cannot be used, or None.

    Torch documents the kernel for consecutive keys. Here sequences lie in any order, with NaN between them.
    """
    lengths, query_lens, places, page_size, num_kv_heads = (70, 0, 5, 129), (3, 1, 1, 129), (3, 0, 1, 2), 160, 2
    seeded = torch.Generator().manual_seed(0)
    pages = torch.full((2, 4, page_size, num_kv_heads, head_dim), torch.nan)
    for place, length in zip(places, lengths, strict=True):
        pages[:, place, :length] = torch.randn(2, length, num_kv_heads, head_dim, generator=seeded)
    tokens = torch.randn(sum(query_lens), 2 * num_kv_heads, head_dim, generator=seeded)
    (keys, values), scale = pages.to(device, dtype).flatten(1, 2), head_dim**-0.5
    rows, slots = (torch.arange(count, device=device) for count in (len(tokens), len(keys)))
    for window in (0, 4):
        for counts in (query_lens, (1,) * len(lengths)):
            query = tokens[: sum(counts)].to(device, dtype)
            bounds, starts, used, new = (
                torch.tensor(numbers, dtype=torch.int32, device=device)
                for numbers in (
                    [0, *accumulate(counts)],
                    [*(place * page_size for place in places), 0],
                    lengths,
                    counts,
                )
            )
            sequences = operators.PackedSequences(bounds, starts, used, max(counts), page_size)
            owners = torch.repeat_interleave(new)
            positions = (rows[: len(query)] + (used - bounds[1:])[owners]).unsqueeze(1)
            offsets = slots - starts[owners].unsqueeze(1)
            visible = (offsets >= 0) & LayerMask(window).visible(positions, offsets)
            q, k, v = (t.float().nan_to_num().transpose(0, 1) for t in (query, keys, values))
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
            # A sequence without keys has the result 0.
            expected = expected.transpose(0, 1).masked_fill(~visible.any(-1).view(-1, 1, 1), 0.0)
            run = functools.partial(
                operators.flash_attention, query, keys, values, sequences, scale=scale, causal_window=window
            )
            fault = kernel_fault(run, expected)
            if fault is not None:
                return fault
    return None


@functools.cache
def write_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test the one kernel that writes keys and values on this device; why it cannot be used, or None."""
    if device.type != "cuda":
        return f"none for {device.type}"
    layer, seeded = PagedLayer(2, 24, value_dim=16), torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, dim, generator=seeded).to(device, dtype) for dim in (24, 16))
    slots = torch.tensor([9, 4, 11], device=device)
    written = []
    try:
        for in_one_kernel in (False, True):
            memory = PagedKVCache([layer], num_pages=1, page_size=4, dtype=dtype, device=device).memories[0]
            assert memory is not None
            memory.write(slots, keys, values, in_one_kernel=in_one_kernel)
            written.append(torch.cat([memory.keys.flatten(), memory.values.flatten()]))
        return None if torch.equal(*written) else "it writes other rows"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no compiler for its launcher, no support of this GPU
        return f"{type(error).__name__}: {error}"
