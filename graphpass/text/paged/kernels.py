"""Kernels of paged attention, and the one place that chooses between them."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from graphpass.compat import operators
from graphpass.report import KernelUse
from graphpass.text.paged.cache import PagedKVCache
from graphpass.text.paged.layers import LayerMask, PagedLayer

__all__ = ["AttentionKernels", "Scores", "fault_in_place", "flash_obstacle", "masked_attention"]

_TOLERANCE = 2e-2
"""Allowed relative norm of the difference between half precision and float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a layer computes its scores.

    Attributes:
        scale: factor of the products of queries and keys.
        softcap: the scaled products x become ``softcap * tanh(x / softcap)``; 0: they stay as they are.
        sinks: one score for each query head that takes part in the softmax and has no value, [heads]; None: no sinks.
    """

    scale: float
    softcap: float
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products and nothing else."""
        return not self.softcap and self.sinks is None


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention with a mask; with a soft cap or sinks at least in float32, since no kernel of torch computes those.

    Args:
        query: [requests, kv heads, group * queries, head_dim], the heads of a group one behind the other.
        keys: [requests, kv heads, length, head_dim].
        values: [requests, kv heads, length, value_dim].
        bias: added to the scores, 0 or -inf, broadcast to [requests, kv heads, group * queries, length].
        scores: how the scores are computed.

    Returns:
        [requests, kv heads, group * queries, value_dim].
    """
    if scores.is_plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scores.scale)
    dtype = torch.promote_types(query.dtype, torch.float32)
    products = torch.matmul(query.to(dtype), keys.to(dtype).transpose(-1, -2)) * scores.scale
    if scores.softcap:  # guard: paged_softcap
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products + bias
    if scores.sinks is not None:
        num_kv_heads, rows = query.shape[1:3]
        of_heads = scores.sinks.to(dtype).view(1, num_kv_heads, -1, 1)
        sinks = of_heads.expand(len(query), -1, -1, rows // of_heads.shape[2]).reshape(
            len(query), num_kv_heads, rows, 1
        )
        weights = torch.cat([products, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = products.softmax(-1)
    return torch.matmul(weights, values.to(dtype)).to(values.dtype)


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels that serve the steps of one cache.

    Attributes:
        has_flash: flash attention serves the layers, at least over copies of their keys that lie one behind the other.
        in_place: flash attention reads the pages themselves and serves all steps.
        reasons: for each candidate why it serves or does not serve steps.
    """

    has_flash: bool
    in_place: bool
    reasons: tuple[tuple[str, str], ...]

    @classmethod
    def choose(cls, cache: PagedKVCache, max_seq_len: int) -> AttentionKernels:
        """Choose by device, layers, page size and the abilities of this torch.

        Args:
            cache: the KV cache.
            max_seq_len: the longest sequence.
        """
        of_flash = flash_obstacle(cache.layers, max_seq_len, cache.dtype, cache.device)
        of_pages = of_flash or _page_obstacle(cache, max_seq_len)
        if of_pages is None:
            packed = masked = "flash attention over pages copies no keys"
        elif of_flash is None:
            packed, masked = "serves the layers, and computes no masked products", "serves the steps of equal lengths"
        else:
            packed, masked = of_flash, "serves every layer on every device"
        return cls(
            has_flash=of_flash is None,
            in_place=of_pages is None,
            reasons=(
                (_BLOCK_TABLES, _block_table_obstacle()),
                (_IN_PLACE, of_pages or "each sequence lies in one page"),
                (_PACKED, packed),
                (_MASKED, masked),
            ),
        )

    def uses(self) -> tuple[KernelUse, ...]:
        """Which kernel serves which steps, and why."""
        if self.in_place:
            served = {_IN_PLACE: "all steps"}
        elif self.has_flash:
            served = {
                _PACKED: "prompts and mixed steps",
                _MASKED: "steps with the same number of tokens in every request",
            }
        else:
            served = {_MASKED: "all steps"}
        return tuple(KernelUse(kernel, served.get(kernel, "none"), reason) for kernel, reason in self.reasons)


_BLOCK_TABLES = "varlen_attn over pages (block_table)"
_IN_PLACE = "flash attention over pages of whole sequences"
_PACKED = "flash attention over packed keys"
_MASKED = "scaled_dot_product_attention over gathered keys"


def _block_table_obstacle() -> str:
    """Why no kernel reads pages through a table.

    ``varlen_attn`` has block tables from torch 2.13 on, which FlashAttention 3 and 4 (packages of their own) and, from
    torch 2.15 on, cuDNN serve. A page may contain NaN of its last owner behind a sequence's end, and it is nowhere
    stated that these kernels do not multiply it by a weight of zero.
    """
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if "block_table" not in inspect.signature(function).parameters:
        return f"torch {torch.__version__} has none"
    return "it is not known to ignore what a page's last owner left behind a sequence's end"


def flash_obstacle(
    layers: Sequence[PagedLayer | None], max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why torch's flash attention cannot serve these layers; None if it can."""
    reasons = (
        operators.flash_obstacle(device, dtype, layer.head_dim) or _layer_obstacle(layer, max_seq_len)
        for layer in layers
        if layer is not None
    )
    return next((reason for reason in reasons if reason is not None), None)


def _layer_obstacle(layer: PagedLayer, max_seq_len: int) -> str | None:
    if layer.mask.within(max_seq_len).chunk:
        return "it has no chunked attention"
    if not layer.is_plain:
        return "it has neither a soft cap nor sinks"
    if layer.dim_of_values != layer.head_dim:
        return f"keys and values differ in size: {layer.head_dim} and {layer.dim_of_values}"
    if layer.head_dim % 8:
        return f"it takes heads of a multiple of 8, a layer has {layer.head_dim}"
    return None


def _page_obstacle(cache: PagedKVCache, max_seq_len: int) -> str | None:
    """Why flash attention cannot read the pages themselves; None if it can."""
    if cache.page_size < max_seq_len:
        return f"a page has {cache.page_size} positions, a sequence up to {max_seq_len}: its keys are apart"
    faults = [fault_in_place(cache.device, cache.dtype, layer.head_dim) for layer in cache.layers if layer is not None]
    return next((fault for fault in faults if fault is not None), None)  # guard: paged_kernel_tried


@functools.cache
def fault_in_place(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Test flash attention over pages on this device; returns the reason why it cannot be used, or None.

    Torch documents the kernel for consecutive keys. Here sequences lie in any order, with NaN between and behind them.
    """
    lengths, query_lens, places, page_size, num_kv_heads = (70, 0, 5, 129), (3, 1, 1, 129), (3, 0, 1, 2), 160, 2
    seeded = torch.Generator().manual_seed(0)
    pages = torch.full((2, 4, page_size, num_kv_heads, head_dim), torch.nan)
    for place, length in zip(places, lengths, strict=True):
        pages[:, place, :length] = torch.randn(2, length, num_kv_heads, head_dim, generator=seeded)
    query = torch.randn(sum(query_lens), 2 * num_kv_heads, head_dim, generator=seeded)
    keys, values = pages.to(device, dtype).flatten(1, 2)
    query, scale = query.to(device, dtype), head_dim**-0.5
    for window in (0, 4):
        for query_len in (None, 1):
            ends = [0, *accumulate(query_lens if query_len is None else (1,) * len(lengths))]
            bounds, starts, used = (
                torch.tensor(numbers, dtype=torch.int32, device=device)
                for numbers in (ends, [*(place * page_size for place in places), 0], lengths)
            )
            sequences = operators.PackedSequences(bounds, starts, used, query_len or max(query_lens), page_size)
            try:
                found = operators.flash_attention(
                    query[: ends[-1]], keys, values, sequences, scale=scale, causal_window=window
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                return str(error)
            expected = _one_by_one(query[: ends[-1]], keys, values, sequences, scale, window)
            if not (found.float() - expected).norm() < _TOLERANCE * expected.norm():
                return f"with heads of width {head_dim} it attends to wrong keys"
    return None


def _one_by_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: operators.PackedSequences,
    scale: float,
    window: int,
) -> torch.Tensor:
    """What flash attention should compute, in float32, sequence by sequence."""
    results = []
    bounds = pairwise(sequences.query_bounds.tolist())
    starts, lengths = sequences.key_starts.tolist()[:-1], sequences.key_lengths.tolist()
    for (begin, end), start, length in zip(bounds, starts, lengths, strict=True):
        of_sequence = query[begin:end].float().transpose(0, 1)
        if not length:
            results.append(torch.zeros_like(query[begin:end], dtype=torch.float32))
            continue
        own, others = (torch.arange(n, device=query.device) for n in (end - begin, length))
        visible = LayerMask(window=window).visible((own + length - len(own)).unsqueeze(1), others)
        key, value = (t[start : start + length].float().transpose(0, 1) for t in (keys, values))
        attended = F.scaled_dot_product_attention(
            of_sequence, key, value, attn_mask=visible, scale=scale, enable_gqa=True
        )
        results.append(attended.transpose(0, 1))
    return torch.cat(results)
