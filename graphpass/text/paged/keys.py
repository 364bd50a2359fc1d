"""The keys and values of a step, and the attention of the step's tokens over them.

There are three ways to the same result. *In place*: each request has one page, where flash attention reads.
*Packed*: the keys of all requests are copied one behind the other and go to flash attention. *Batched*: each request's
keys are copied into a row of the longest length, and one attention with a mask serves all rows; the heads that share
keys are folded into the query dimension, so that no key is repeated. It serves every layer on every device.

Copies of positions that a request has not reached come from the null page, not from the end of its last page: a page
contains what its last owner wrote, and a weight of zero does not keep a NaN out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphpass.compat import operators
from graphpass.text.paged.cache import LayerMemory
from graphpass.text.paged.kernels import Scores, masked_attention
from graphpass.text.paged.tables import TableLayout

if TYPE_CHECKING:
    from graphpass.text.paged.metadata import PagedMetadata

__all__ = ["BatchedKeys", "KeysInPlace", "NewTensor", "PackedKeys"]

NewTensor = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""``f(name, shape, dtype)``: uninitialised memory."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchedKeys:
    """The keys of each request in a separate row, padded to the longest length.

    Attributes:
        slots: of keys, and of values in the same layer's memory, int64 [2, requests, length]; the null page's first
            slot for positions not reached.
        bias: added to scores, 0 or -inf, in the cache's dtype [masks, requests, max_query_len, length].
        query_rows: of mixed batches: the token in each place, int64 [requests, max_query_len].
        token_places: of mixed batches: where each token stands in those, int64 [tokens].
    """

    slots: torch.Tensor
    bias: torch.Tensor
    query_rows: torch.Tensor
    token_places: torch.Tensor

    @classmethod
    def empty(cls, layout: TableLayout, dtype: torch.dtype, num_masks: int, new: NewTensor) -> BatchedKeys:
        """Memory for steps of one layout."""
        reqs, queries, length = layout.num_reqs, layout.max_query_len, layout.max_seq_len
        is_mixed = layout.query_len is None
        return cls(
            slots=new("slots", (2, reqs, length), torch.int64),
            bias=new("bias", (num_masks, reqs, queries, length), dtype),
            query_rows=new("query_rows", (reqs, queries) if is_mixed else (0, 0), torch.int64),
            token_places=new("token_places", (layout.num_tokens if is_mixed else 0,), torch.int64),
        )

    def prepare(self, metadata: PagedMetadata) -> None:
        """Compute the tensors for this step, on the device."""
        tables, numbers = metadata.tables, metadata.fixed.numbers
        _, num_reqs, length = self.slots.shape
        positions = numbers[:length]
        page_size = metadata.fixed.page_size
        slots = torch.add(numbers[:page_size], tables.block_tables.unsqueeze(-1), alpha=page_size).view(
            num_reqs, length
        )
        slots.mul_(positions < tables.seq_lens.unsqueeze(1))  # guard: paged_null_page
        torch.add(slots, metadata.fixed.value_offsets, out=self.slots)
        places = numbers[: self.bias.shape[2]]
        # Unused requests see the null page: a softmax over nothing would be NaN.
        own = (tables.first_positions.unsqueeze(1) + places).unsqueeze(-1)
        for bias, mask in zip(self.bias, metadata.fixed.masks, strict=True):
            bias.fill_(-math.inf).masked_fill_(mask.visible(own, positions), 0.0)
        if metadata.query_len is None:
            torch.add(tables.query_start_loc[:-1].unsqueeze(1), places, out=self.query_rows)
            self.query_rows.clamp_(max=metadata.num_tokens - 1)
            self.token_places.copy_(tables.token_rows).clamp_(min=0)

    def attend(
        self, metadata: PagedMetadata, memory: LayerMemory, query: torch.Tensor, scores: Scores, mask: int
    ) -> torch.Tensor:
        """Attention of the tokens' queries.

        Args:
            metadata: the metadata that these keys belong to.
            memory: the layer's keys and values.
            query: [tokens, heads, head_dim].
            scores: how scores are computed.
            mask: index of the layer's mask.

        Returns:
            [tokens, heads, value_dim], or [requests, query_len, kv heads, group, value_dim] of a uniform batch.
        """
        num_reqs, queries = self.bias.shape[1:3]
        keys, values = memory.gather(self.slots)
        is_mixed = metadata.query_len is None
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
        attended = masked_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), bias, scores)
        unfolded: torch.Tensor = attended.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
        if not is_mixed:
            return unfolded
        by_place: torch.Tensor = unfolded.reshape(num_reqs * queries, num_kv_heads * group, -1)
        return by_place.index_select(0, self.token_places)


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeys:
    """The keys of all requests, concatenated; for layers with plain scores.

    Attributes:
        slots: of keys, and of values in the same layer's memory, int64 [2, keys].
    """

    slots: torch.Tensor

    @classmethod
    def empty(cls, layout: TableLayout, new: NewTensor) -> PackedKeys:
        """Memory for steps of one layout."""
        return cls(new("slots", (2, layout.num_keys), torch.int64))

    def prepare(self, metadata: PagedMetadata) -> None:
        """Compute the tensors for this step, on the device."""
        torch.add(metadata.tables.key_slots, metadata.fixed.value_offsets.view(2, 1), out=self.slots)

    def attend(
        self, metadata: PagedMetadata, memory: LayerMemory, query: torch.Tensor, scores: Scores, mask: int
    ) -> torch.Tensor:
        """Attention of the tokens' queries, as :meth:`BatchedKeys.attend`; results of padded rows are undefined."""
        keys, values = memory.gather(self.slots)
        tables = metadata.tables
        sequences = operators.PackedSequences(
            tables.query_start_loc,
            tables.key_start_loc,
            tables.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
        )
        window = metadata.fixed.masks[mask].window
        return operators.flash_attention(query, keys, values, sequences, scale=scores.scale, causal_window=window)


@dataclass(frozen=True, slots=True, eq=False)
class KeysInPlace:
    """The keys of each request where they lie, in one page; for layers with plain scores.

    Attributes:
        starts: slot of each request's first key, and a 0, int32 [requests + 1].
        query_bounds: of uniform batches: where each request's tokens begin, unused ones included, int32 [requests + 1].
        max_seq_len: bound on the lengths of sequences.
    """

    starts: torch.Tensor
    query_bounds: torch.Tensor
    max_seq_len: int

    @classmethod
    def empty(cls, layout: TableLayout, new: NewTensor) -> KeysInPlace:
        """Memory for steps of one layout."""
        count = layout.num_reqs + 1
        return cls(
            starts=new("starts", (count,), torch.int32),
            query_bounds=new("query_bounds", (count if layout.query_len is not None else 0,), torch.int32),
            max_seq_len=layout.limit,
        )

    def prepare(self, metadata: PagedMetadata) -> None:
        """Compute the tensors for this step, on the device."""
        self.starts.zero_()
        torch.mul(metadata.tables.block_tables[:, 0], metadata.fixed.page_size, out=self.starts[:-1])
        if metadata.query_len is not None:
            torch.mul(metadata.fixed.numbers[: len(self.query_bounds)], metadata.query_len, out=self.query_bounds)

    def attend(
        self, metadata: PagedMetadata, memory: LayerMemory, query: torch.Tensor, scores: Scores, mask: int
    ) -> torch.Tensor:
        """Attention of the tokens' queries, as :meth:`BatchedKeys.attend`.

        Unused requests of a uniform batch have no keys, so their rows are zero. Results of padded rows of a mixed batch
        are undefined.
        """
        tables = metadata.tables
        # guard: paged_unused_in_place
        bounds = tables.query_start_loc if metadata.query_len is None else self.query_bounds
        sequences = operators.PackedSequences(
            bounds, self.starts, tables.seq_lens, metadata.max_query_len, self.max_seq_len
        )
        window = metadata.fixed.masks[mask].window
        return operators.flash_attention(
            query, memory.keys, memory.values, sequences, scale=scores.scale, causal_window=window
        )
