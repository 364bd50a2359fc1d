"""The op for attention over a paged KV cache, and the metadata that it reads. It calls torch's attention kernels.

Two ways to the same result. *Batched*: each request's keys are gathered from its pages into a row of the longest
length, and one ``scaled_dot_product_attention`` with a mask serves all rows; the heads that share keys are folded into
the query dimension, so that no key is repeated. It serves uniform decode, and everything where the other way does not
exist. *Packed*: the keys of all requests lie one behind the other and go to ``varlen_attn``, for prefill and mixed
batches on CUDA in half precision.

Positions that a request has not reached are read from the null page, not from the end of its last page: a page holds
what its last owner left, and a weight of zero does not keep a NaN out.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from graphpass.context import get_forward_context
from graphpass.errors import ContextError, ShapeError
from graphpass.regions.padding import register_padding_rule
from graphpass.text.paddingrules import paged_attention_by_row
from graphpass.text.paged.tables import TableLayout, Tables

__all__ = [
    "NO_WINDOW",
    "PAGED_ATTENTION",
    "BatchedKeys",
    "NewTensor",
    "PackedKeys",
    "PagedMetadata",
    "Varlen",
    "causal_varlen",
]

PAGED_ATTENTION = "graphpass::paged_attention"
NO_WINDOW = -1

Varlen = Callable[..., torch.Tensor]
NewTensor = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""``f(name, shape, dtype)``: uninitialised memory."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchedKeys:
    """The keys of each request in a separate row, padded to the longest length.

    Attributes:
        slots: of keys, and of values in the same layer's memory, int64 [2, requests, length]; the null page's first
            slot for positions not reached.
        bias: added to scores, 0 or -inf, in the cache's dtype [windows, requests, max_query_len, length].
        query_rows: of mixed batches: the token in each place, int64 [requests, max_query_len].
        token_places: of mixed batches: where each token stands in those, int64 [tokens].
    """

    slots: torch.Tensor
    bias: torch.Tensor
    query_rows: torch.Tensor
    token_places: torch.Tensor

    @classmethod
    def empty(cls, layout: TableLayout, dtype: torch.dtype, num_windows: int, new: NewTensor) -> BatchedKeys:
        """Memory for steps of one layout."""
        reqs, queries, length = layout.num_reqs, layout.max_query_len, layout.max_seq_len
        is_mixed = layout.query_len is None
        return cls(
            slots=new("slots", (2, reqs, length), torch.int64),
            bias=new("bias", (num_windows, reqs, queries, length), dtype),
            query_rows=new("query_rows", (reqs, queries) if is_mixed else (0, 0), torch.int64),
            token_places=new("token_places", (layout.num_tokens if is_mixed else 0,), torch.int64),
        )

    def prepare(self, metadata: PagedMetadata) -> None:
        """Compute the tensors for this step, on the device."""
        tables, numbers = metadata.tables, metadata.numbers
        _, num_reqs, length = self.slots.shape
        positions = numbers[:length]
        offsets = numbers[: metadata.page_size]
        slots = torch.add(offsets, tables.block_tables.unsqueeze(-1), alpha=metadata.page_size).view(num_reqs, length)
        slots.mul_(positions < tables.seq_lens.unsqueeze(1))
        torch.add(slots, metadata.value_offsets, out=self.slots)
        places = numbers[: self.bias.shape[2]]
        # Unused requests see the null page: a softmax over nothing would be NaN.
        own = (tables.first_positions.unsqueeze(1) + places).unsqueeze(-1)
        seen = positions <= own
        if len(metadata.windows) > 1 or metadata.windows[0] != NO_WINDOW:
            seen = seen & (positions > own - metadata.window_lengths)
        self.bias.fill_(-math.inf).masked_fill_(seen, 0.0)
        if metadata.query_len is None:
            torch.add(tables.query_start_loc[:-1].unsqueeze(1), places, out=self.query_rows)
            self.query_rows.clamp_(max=metadata.num_tokens - 1)
            self.token_places.copy_(tables.token_rows).clamp_(min=0)

    def attend(
        self, metadata: PagedMetadata, rows: torch.Tensor, query: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Attention of the tokens' queries.

        Args:
            metadata: this one's.
            rows: the layer's keys and values, [2 * slots, kv heads, head_dim].
            query: [tokens, heads, head_dim].
            scale: of the scores.
            window: index among the metadata's windows.

        Returns:
            Shaped like ``query``, or [requests, query_len, kv heads, group, head_dim] of a uniform batch.
        """
        num_reqs, queries, length = self.bias.shape[1:]
        keys, values = rows.index_select(0, self.slots.view(-1)).view(2, num_reqs, length, *rows.shape[1:])
        is_mixed = metadata.query_len is None
        if is_mixed:
            query = query.index_select(0, self.query_rows.view(-1))
        grouped = query.unflatten(1, (rows.shape[1], -1)).unflatten(0, (num_reqs, queries))
        group = grouped.shape[3]
        # [requests, kv heads, group * queries, head_dim]: with one query a request this is a view.
        folded = grouped.permute(0, 2, 3, 1, 4).reshape(num_reqs, rows.shape[1], group * queries, -1)
        bias = self.bias[window].unsqueeze(1)
        if queries > 1 and group > 1:
            bias = bias.repeat(1, 1, group, 1)
        attended = F.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias, scale=scale
        )
        unfolded: torch.Tensor = attended.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
        if not is_mixed:
            return unfolded
        by_place: torch.Tensor = unfolded.reshape(query.shape)
        return by_place.index_select(0, self.token_places)


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeys:
    """The keys of all requests, concatenated.

    Attributes:
        slots: of keys, and of values in the same layer's memory, int64 [2, keys].
        varlen: attends causally, ``f(query, keys, values, query_starts, key_starts, max_query_len, max_seq_len, scale,
            window)``.
    """

    slots: torch.Tensor
    varlen: Varlen

    @classmethod
    def empty(cls, layout: TableLayout, varlen: Varlen, new: NewTensor) -> PackedKeys:
        """Memory for steps of one layout."""
        return cls(new("slots", (2, layout.num_keys), torch.int64), varlen)

    def prepare(self, metadata: PagedMetadata) -> None:
        """Compute the tensors for this step, on the device."""
        torch.add(metadata.tables.key_slots, metadata.value_offsets.view(2, 1), out=self.slots)

    def attend(
        self, metadata: PagedMetadata, rows: torch.Tensor, query: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Attention of the tokens' queries, as :meth:`BatchedKeys.attend`; results of padded rows are undefined."""
        keys, values = rows.index_select(0, self.slots.view(-1)).view(2, -1, *rows.shape[1:])
        starts, key_starts = metadata.tables.query_start_loc, metadata.tables.key_start_loc
        longest = (metadata.max_query_len, metadata.max_seq_len)
        return self.varlen(query, keys, values, starts, key_starts, *longest, scale, metadata.windows[window])


@dataclass(slots=True, eq=False)
class PagedMetadata:
    """The metadata of one step, which the op reads. A FULL key has one object, and each step refills its tables.

    Attributes:
        num_tokens: rows of the model's tensors that count: real ones, in FULL the key's.
        num_reqs: requests, in FULL the key's.
        query_len: tokens of each request in a uniform batch, None in a mixed one.
        max_query_len: bound on the tokens of a request.
        max_seq_len: bound on the lengths of sequences.
        tables: on the device.
        rows: of the cache.
        num_slots: of one layer's keys.
        num_layers: of the cache.
        page_size: of the cache.
        is_padded: tokens at the end may be padding, whose rows of the result are to be zero.
        windows: sliding windows that layers may have, -1 for none.
        longest: windows of this length and above are none.
        numbers: 0, 1, 2..., int32.
        value_offsets: where keys and values begin in a layer's rows, int64 [2, 1, 1].
        window_lengths: int32 [windows, 1, 1, 1].
        keys: how they are gathered.
        first_layer: the layer whose op runs first and prepares the step for all; learned from the first call.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None
    max_query_len: int
    max_seq_len: int
    tables: Tables[torch.Tensor]
    rows: torch.Tensor
    num_slots: int
    num_layers: int
    page_size: int
    is_padded: bool
    windows: tuple[int, ...]
    longest: int
    numbers: torch.Tensor
    value_offsets: torch.Tensor
    window_lengths: torch.Tensor
    keys: BatchedKeys | PackedKeys
    first_layer: int | None = None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slot that each token's key and value are written to, int64 [tokens]."""
        return self.tables.slot_mapping

    @property
    def block_tables(self) -> torch.Tensor:
        """Page numbers, int32 [requests, pages]."""
        return self.tables.block_tables

    @property
    def seq_lens(self) -> torch.Tensor:
        """Lengths after the step, int32 [requests]; 0 for unused requests."""
        return self.tables.seq_lens

    @property
    def query_start_loc(self) -> torch.Tensor:
        """Index of each request's first token, and the number of all tokens at the end; int32 [requests + 1]."""
        return self.tables.query_start_loc

    def layer_rows(self, layer: int) -> torch.Tensor:
        """Keys and then values of one layer, [2 * slots, kv heads, head_dim].

        Raises:
            ShapeError: the cache has no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise ShapeError(
                "the KV cache has no such layer",
                expected=f"a layer from 0 to {self.num_layers - 1}",
                found=str(layer),
                remedy="make the cache with as many layers as the model has",
            )
        return self.rows.narrow(0, 2 * layer * self.num_slots, 2 * self.num_slots)

    def window_index(self, window: int) -> int:
        """Index of ``window`` among the prepared windows.

        Raises:
            ShapeError: it is none of them.
        """
        window = window if 0 <= window < self.longest else NO_WINDOW
        if window not in self.windows:
            raise ShapeError(
                "a layer has a sliding window that the step was not prepared for",
                expected=f"one of {self.windows}",
                found=str(window),
                remedy="list every window that layers have: PagedAttention(..., windows=(-1, 4096))",
            )
        return self.windows.index(window)


torch.library.define(
    PAGED_ATTENTION,
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int layer, float scale, int window) -> ()",
)


@torch.library.impl(PAGED_ATTENTION, "default")
@torch.no_grad()
def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> None:
    """Write the step's keys and values into the cache, then attend causally over each request's pages, into ``out``.

    Args:
        query: [rows, heads, head_dim].
        key: [rows, kv heads, head_dim].
        value: like ``key``.
        out: like ``query``. Rows behind the metadata's tokens, which are not read either, become zero, and so do
            padded rows of a FULL key (in a uniform one, where their query is finite).
        layer: of the cache.
        scale: of the scores.
        window: positions that a token sees, itself included; -1 for all before it.
    """
    metadata = _metadata_in_context()
    num_tokens = metadata.num_tokens
    rows = metadata.layer_rows(layer)
    _check_tensors(query, key, value, out, rows, num_tokens)
    window = metadata.window_index(window)
    if query.shape[0] > num_tokens:
        out[num_tokens:].zero_()
    if num_tokens == 0:
        return
    slots, num_slots = metadata.tables.slot_mapping, metadata.num_slots
    rows.narrow(0, 0, num_slots).index_copy_(0, slots, key[:num_tokens])
    rows.narrow(0, num_slots, num_slots).index_copy_(0, slots, value[:num_tokens])
    if metadata.first_layer is None:
        metadata.first_layer = layer
    if metadata.first_layer == layer:
        metadata.keys.prepare(metadata)
    attended = metadata.keys.attend(metadata, rows, query[:num_tokens], scale, window)
    real = out[:num_tokens]
    if attended.dim() == 5:
        real = real.unflatten(1, attended.shape[2:4]).unflatten(0, attended.shape[:2])
    real.copy_(attended)
    if metadata.is_padded:
        real.masked_fill_((metadata.tables.token_rows < 0).view(-1, 1, 1), 0.0)


def _writes_out_only(*_: Any) -> None:
    """The fake implementation: the op writes to ``out`` and returns nothing."""


torch.library.register_fake(PAGED_ATTENTION, _writes_out_only)
register_padding_rule(PAGED_ATTENTION, paged_attention_by_row)


def _metadata_in_context() -> PagedMetadata:
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, PagedMetadata):
        raise ContextError(
            "paged attention has no metadata",
            expected="the result of PagedAttention.build() as attn_metadata of the forward context",
            found=type(metadata).__name__,
            remedy="pass attn_metadata=attention.build(requests, key) to set_forward_context; in PIECEWISE the op has "
            f"to stay outside of captured regions: splitting_ops=[{PAGED_ATTENTION!r}]",
        )
    return metadata


def _check_tensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
) -> None:
    _, num_kv_heads, head_dim = rows.shape
    fits = (
        query.dim() == 3
        and query.shape == out.shape
        and key.shape == value.shape == (query.shape[0], num_kv_heads, head_dim)
        and query.shape[2] == head_dim
        and query.shape[1] % num_kv_heads == 0
        and query.shape[0] >= num_tokens
        and query.dtype == key.dtype == value.dtype == rows.dtype
    )
    if not fits:
        raise ShapeError(
            "paged attention got tensors that do not fit its cache or step",
            expected=f"key and value [at least {num_tokens}, {num_kv_heads}, {head_dim}] and query and out of as many "
            f"rows and a multiple of the heads, of {rows.dtype}",
            found=", ".join(f"{list(t.shape)} {t.dtype}" for t in (query, key, value, out)) + " (q, k, v, out)",
            remedy="make the cache for the model's heads, head_dim and dtype, and dispatch with the step's sizes",
        )


def causal_varlen(windows: Sequence[int]) -> Varlen | None:
    """Torch's variable-length attention, causal with these sliding windows; None if this torch does not support it.

    Its signature has changed from release to release: ``is_causal`` became ``window_size``, ``enable_gqa`` came later
    (the kernel itself has always let heads share keys).
    """
    try:
        varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in names else {}
    if "scale" not in names:
        return None
    if "window_size" in names:

        def windowed(*args: Any) -> Any:
            *tensors_and_bounds, scale, window = args
            before = NO_WINDOW if window == NO_WINDOW else window - 1
            return varlen_attn(*tensors_and_bounds, scale=scale, window_size=(before, 0), **options)

        return windowed
    if "is_causal" not in names or tuple(windows) != (NO_WINDOW,):
        return None

    def causal(*args: Any) -> Any:
        *tensors_and_bounds, scale, _ = args
        return varlen_attn(*tensors_and_bounds, is_causal=True, scale=scale, **options)

    return causal
