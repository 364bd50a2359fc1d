"""Operators that do several things at once and have no decomposition of torch's that serves: what they consist of.

Averages are sums over the real entries by their number, in float32 at least, as the operators compute. A variance is
that of two passes: the mean is subtracted, and padding is zero again before the squares are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    dtype, wide = x.dtype, _wide(x.dtype)
    for dim, parts in zip((x.dim() - 2, x.dim() - 1), output_size, strict=True):
        size, part = x.shape[dim], torch.arange(parts, device=x.device)[:, None]
        first, end = part * size // parts, ((part + 1) * size + parts - 1) // parts
        at = torch.arange(size, device=x.device)
        inside = ((at >= first) & (at < end)).view(parts, size, *[1] * (x.dim() - 1 - dim))
        number = (end - first).view(parts, *[1] * (x.dim() - 1 - dim))
        x = torch.where(inside, x.unsqueeze(dim), 0).sum(dim + 1, dtype=wide) / number
    return x.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums, which may be beyond float16."""
    return torch.float32 if dtype.itemsize < 4 else dtype  # guard: made_sums_of_16_bits


def _may_be_padded(x: Tensor, dims: Iterable[int]) -> bool:
    return any(isinstance(x.shape[dim], torch.SymInt) for dim in dims)


def _averaged(x: Tensor, dims: list[int], dtype: torch.dtype, less: int = 0, *, keepdim: bool = True) -> Tensor:
    """The sum over some dimensions by the number of entries, which may be less than those that are summed."""
    number: Any = math.prod(x.shape[dim] for dim in dims)
    # guard: made_fewer_than_summed
    number = number if not less else torch.sym_max(number - less, 0)
    result: Tensor = x.sum(dims, keepdim, dtype=_wide(dtype)) / number
    return result


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum, divided by the number of entries."""
    dims, dtype = _dims(x, dim), dtype or x.dtype
    if not dtype.is_floating_point or not _may_be_padded(x, dims):
        return NotImplemented
    return _averaged(x, dims, dtype, keepdim=keepdim).to(dtype)


def _dims(x: Tensor, dim: Any) -> list[int]:
    """The dimensions that are named, all if there are none."""
    return [at % x.dim() for at in dim or range(x.dim())]


def var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """The mean square of what is left after the mean is subtracted, and the mean."""
    dims, less = _dims(x, dim), 1 if correction is None else correction
    if not x.dtype.is_floating_point or less != int(less) or not _may_be_padded(x, dims):
        return NotImplemented
    average = _averaged(x, dims, x.dtype)
    centred = x - average
    moments = _averaged(centred * centred, dims, x.dtype, int(less)), average
    return tuple((of_rows if keepdim else of_rows.squeeze(dims)).to(x.dtype) for of_rows in moments)


def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """The variance alone."""
    found = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else found[0]


def bags_of_rows(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    _by_count: bool = False,
    mode: int = 0,
    _is_sparse: bool = False,
    weights: Tensor | None = None,
    _has_end: bool = False,
    skipped: int = -1,
) -> tuple[Tensor | None, ...]:
    """Bags of equal lengths, one behind the other: the rows that each names, added or averaged, or the greatest."""
    shape = offsets.shape[0], ids.shape[0] // offsets.shape[0]
    ids, wide = ids.view(shape), _wide(table.dtype) if mode == 1 else table.dtype
    rows = F.embedding(ids, table)
    rows = rows if weights is None else rows * weights.view(shape).unsqueeze(-1)
    counts = ids != skipped
    if skipped >= 0:
        rows = rows.masked_fill(~counts.unsqueeze(-1), -math.inf if mode == 2 else 0)  # guard: made_bags
    if mode == 2:
        found = rows.amax(1)
        found = found if skipped < 0 else torch.where(counts.any(1, keepdim=True), found, 0)
    elif mode == 1 and skipped < 0:
        found = _averaged(rows, [1], table.dtype, keepdim=False)
    else:
        found = rows.sum(1, dtype=wide)
        found = found / counts.sum(1, keepdim=True).clamp(min=1) if mode == 1 else found
    return found.to(table.dtype), None, None, None


def average_pool(
    pool: Callable[..., Tensor],
    num_dims: int,
    x: Tensor,
    window: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    counts: bool = True,
    by: Any = None,
) -> Any:
    """The sum in each window by the number of its entries, where the padding of a window does not count."""
    extends = any(padding if isinstance(padding, (list, tuple)) else (padding,))
    dims = range(x.dim() - num_dims, x.dim())
    if by is not None or (extends and counts) or not (extends or ceil) or not _may_be_padded(x, dims):
        return NotImplemented
    wide = x.to(_wide(x.dtype))
    ones = wide.new_ones([*(1 for _ in range(dims.start)), *(x.shape[dim] for dim in dims)])
    summed, number = (pool(one, window, stride, padding, ceil, counts, 1) for one in (wide, ones))
    return (summed / number).to(x.dtype)


PARTS: Mapping[str, Callable[..., Any]] = {
    "aten::_transformer_encoder_layer_fwd": transformer_layer,
    "aten::_native_multi_head_attention": multi_head_attention,
    "aten::_adaptive_avg_pool2d": adaptive_pool,
}
"""Qualified name -> a function of the operator's arguments."""

REPAIRED: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten::mean", "aten::mean.dim"), mean),
    "aten::var.correction": var,
    "aten::var_mean.correction": var_mean,
    "aten::avg_pool2d": partial(average_pool, torch.ops.aten.avg_pool2d, 2),
    "aten::avg_pool3d": partial(average_pool, torch.ops.aten.avg_pool3d, 3),
}
"""The same of operators that stay whole where no padding is made; NotImplemented of a call that always does."""
