"""Operators that do several things at once and have no decomposition of torch's that serves: what they consist of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _attended(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, *, has_weights: bool) -> Any:
    if hidden is None and not has_weights:
        return F.scaled_dot_product_attention(query, key, value), None
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    # A row that hides all keys is NaN, as the operator makes it.
    weights = (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)
    return weights @ value, weights


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention`` in eval mode."""
    if query is key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        of_each = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        projected = tuple(F.linear(x, weight, bias) for x, weight, bias in of_each)
    query, key, value = (x.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2) for x in projected)
    hidden = None if mask is None else (mask != 0)[:, None, None] if mask_type == 1 else mask != 0
    mixed, weights = _attended(query, key, value, hidden, has_weights=need_weights)
    result = F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return result, weights.mean(1) if need_weights and average_attn_weights else weights


def transformer_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``nn.TransformerEncoderLayer`` in eval mode."""
    projections = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias

    def attends(x: Tensor) -> Tensor:
        return multi_head_attention(x, x, x, *projections, mask, need_weights=False, mask_type=mask_type)[0]

    def feeds_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    x, norms = src, ((attends, norm_weight_1, norm_bias_1), (feeds_forward, norm_weight_2, norm_bias_2))
    for block, weight, bias in norms:
        inner = F.layer_norm(x, (embed_dim,), weight, bias, eps) if norm_first else x
        x = x + block(inner)
        x = x if norm_first else F.layer_norm(x, (embed_dim,), weight, bias, eps)
    return x


def adaptive_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Averages over parts of the last two dimensions. Torch's decomposition asks whether the traced sizes divide."""
    for dim, parts in zip((x.dim() - 2, x.dim() - 1), output_size, strict=True):
        size, part = x.shape[dim], torch.arange(parts, device=x.device)[:, None]
        first, end = part * size // parts, ((part + 1) * size + parts - 1) // parts
        at = torch.arange(size, device=x.device)
        inside = ((at >= first) & (at < end)).view(parts, size, *[1] * (x.dim() - 1 - dim))
        number = (end - first).view(parts, *[1] * (x.dim() - 1 - dim))
        x = torch.where(inside, x.unsqueeze(dim), 0).sum(dim + 1) / number
    return x


PARTS: Mapping[str, Callable[..., Any]] = {
    "aten::_transformer_encoder_layer_fwd": transformer_layer,
    "aten::_native_multi_head_attention": multi_head_attention,
    "aten::_adaptive_avg_pool2d": adaptive_pool,
}
"""Qualified name -> a function of the operator's arguments."""
