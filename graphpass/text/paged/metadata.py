"""The metadata of paged attention: what the op reads from the forward context in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from graphpass.errors import ShapeError
from graphpass.text.paged.cache import LayerMemory, PagedKVCache
from graphpass.text.paged.kernels import Scores
from graphpass.text.paged.keys import BatchedKeys, KeysInPlace, PackedKeys
from graphpass.text.paged.layers import LayerMask, PagedLayer
from graphpass.text.paged.tables import Tables

__all__ = ["AttentionCall", "FixedMetadata", "PagedMetadata", "PagedStep"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the op.

    Attributes:
        query: [rows, heads, head_dim].
        key: [rows, kv heads, head_dim].
        value: [rows, kv heads, value_dim].
        out: [rows, heads, value_dim].
        layer: number of the layer.
        scores: how scores are computed.
        window: the sliding window that the layer passes; 0: it passes none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    layer: int
    scores: Scores
    window: int


class PagedStep(ABC):
    """What the forward context must contain as ``attn_metadata`` for the op."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> None:
        """Serve one call of the op: write to ``call.out``."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedMetadata:
    """What all steps over one cache have in common.

    Attributes:
        cache: the KV cache.
        longest: the longest sequence; a limit of a mask at least as large is none.
        masks: the different masks of the layers, within ``longest``.
        mask_of: for each layer the index of its mask.
        numbers: 0, 1, 2..., int32.
        value_offsets: 0, and the number of slots; int64 [2, 1, 1].
    """

    cache: PagedKVCache
    longest: int
    masks: tuple[LayerMask, ...]
    mask_of: tuple[int, ...]
    numbers: torch.Tensor
    value_offsets: torch.Tensor

    @classmethod
    def of(cls, cache: PagedKVCache, longest: int, numbers: torch.Tensor) -> FixedMetadata:
        """For sequences of at most ``longest`` tokens over this cache."""
        of_layers = [LayerMask() if layer is None else layer.mask.within(longest) for layer in cache.layers]
        masks = tuple(sorted({mask for mask, layer in zip(of_layers, cache.layers, strict=True) if layer is not None}))
        return cls(
            cache=cache,
            longest=longest,
            masks=masks,
            mask_of=tuple(masks.index(mask) if mask in masks else 0 for mask in of_layers),
            numbers=numbers,
            value_offsets=torch.tensor([0, cache.num_slots], device=cache.device).view(2, 1, 1),
        )

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.cache.page_size

    def layer(self, number: int) -> tuple[PagedLayer, LayerMemory]:
        """A layer, and its keys and values.

        Raises:
            ShapeError: the cache has no such layer.
        """
        layers = self.cache.layers
        layer, memory = (layers[number], self.cache.memories[number]) if 0 <= number < len(layers) else (None, None)
        if layer is None or memory is None:
            raise ShapeError(
                "the KV cache has no such layer",
                expected=f"one of layers {[n for n, known in enumerate(layers) if known is not None]}",
                found=str(number),
                remedy="create the cache with as many layers as the model has",
            )
        return layer, memory

    def check(self, call: AttentionCall, layer: PagedLayer, num_tokens: int) -> None:
        """Check one call of the op against its layer.

        Raises:
            ShapeError: tensors, sliding window or scores are not those of the layer.
        """
        _check_tensors(call, layer, self.cache.dtype, num_tokens)
        declared = self.masks[self.mask_of[call.layer]].window
        passed = call.window if call.window < self.longest else 0
        if call.window and passed != declared:
            raise ShapeError(
                f"layer {call.layer} passes a sliding window that its cache was not created for",
                expected=f"{declared}" if declared else "none",
                found=str(call.window),
                remedy="create the cache with the layer's mask: PagedLayer(..., mask=LayerMask(window=4096))",
            )
        if layer.is_plain and not call.scores.is_plain:
            raise ShapeError(
                f"layer {call.layer} uses a soft cap or sinks that its cache was not created for",
                expected="scores that are scaled products",
                found="softcap" if call.scores.softcap else "sinks",
                remedy="create the cache with PagedLayer(..., is_plain=False) for this layer",
            )


@dataclass(slots=True, eq=False)
class PagedMetadata(PagedStep):
    """The metadata of one step, which the op reads. A FULL key has one object, and each step refills its tables.

    Attributes:
        num_tokens: rows of the model's tensors that count: real ones, in FULL the key's.
        num_reqs: requests, in FULL the key's.
        query_len: tokens of each request in a uniform batch, None in a mixed one.
        max_query_len: bound on the tokens of a request.
        max_seq_len: bound on the lengths of sequences.
        tables: on the device.
        is_padded: tokens at the end may be padding, whose rows of the result are to be zero.
        fixed: what all steps have in common.
        keys: how they are gathered.
        first_layer: the layer whose op runs first and prepares the step for all; learned from the first call.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None
    max_query_len: int
    max_seq_len: int
    tables: Tables[torch.Tensor]
    is_padded: bool
    fixed: FixedMetadata
    keys: BatchedKeys | KeysInPlace | PackedKeys
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

    def attend(self, call: AttentionCall) -> None:
        """Write the step's keys and values into the cache, then attend over each request's pages, into ``call.out``."""
        num_tokens = self.num_tokens
        layer, memory = self.fixed.layer(call.layer)
        self.fixed.check(call, layer, num_tokens)
        if call.out.shape[0] > num_tokens:
            call.out[num_tokens:].zero_()
        if num_tokens == 0:
            return
        memory.write(self.tables.slot_mapping, call.key[:num_tokens], call.value[:num_tokens])
        if self.first_layer is None:
            self.first_layer = call.layer
        if self.first_layer == call.layer:
            self.keys.prepare(self)
        query = call.query[:num_tokens]
        if layer.query_scale is not None:  # guard: paged_position_scale
            query = (query * layer.query_scale.of(self.tables.positions).view(-1, 1, 1)).to(query.dtype)
        attended = self.keys.attend(self, memory, query, call.scores, self.fixed.mask_of[call.layer])
        real = call.out[:num_tokens]
        if attended.dim() == 5:
            real = real.unflatten(1, attended.shape[2:4]).unflatten(0, attended.shape[:2])
        real.copy_(attended)
        if self.is_padded:
            real.masked_fill_((self.tables.token_rows < 0).view(-1, 1, 1), 0.0)


def _check_tensors(call: AttentionCall, layer: PagedLayer, dtype: torch.dtype, num_tokens: int) -> None:
    query, key, value, out, sinks = call.query, call.key, call.value, call.out, call.scores.sinks
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
