"""Kernels of paged attention, and the one place that chooses between them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from graphpass.report import Table
from graphpass.text.paged.cache import PagedKVCache
from graphpass.text.paged.layers import LayerMask, PagedLayer

__all__ = ["AttentionKernels", "Scores", "Varlen", "masked_attention", "torch_varlen"]

Varlen = Callable[..., torch.Tensor]
"""``f(query, keys, values, query_starts, key_starts, max_query_len, max_seq_len, scale, window)``: causal attention of
packed sequences."""


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
    """Attention with a mask; with a soft cap or sinks in float32, since no kernel of torch computes those.

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
    products = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scores.scale
    if scores.softcap:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products + bias
    if scores.sinks is not None:
        num_kv_heads, rows = query.shape[1:3]
        of_heads = scores.sinks.float().view(1, num_kv_heads, -1, 1)
        sinks = of_heads.expand(len(query), -1, -1, rows // of_heads.shape[2]).reshape(
            len(query), num_kv_heads, rows, 1
        )
        weights = torch.cat([products, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = products.softmax(-1)
    return torch.matmul(weights, values.float()).to(values.dtype)


def torch_varlen(*, has_windows: bool) -> Varlen | None:
    """Torch's variable-length attention, causal; None if this torch does not support it.

    Its signature has changed from release to release: ``is_causal`` became ``window_size``, ``enable_gqa`` came later
    (the kernel itself has always let heads share keys).

    Args:
        has_windows: whether a layer has a sliding window.
    """
    names = _varlen_parameters()
    if "scale" not in names:
        return None
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in names else {}
    if "window_size" in names:

        def windowed(*args: Any) -> Any:
            *tensors_and_bounds, scale, window = args
            return varlen_attn(*tensors_and_bounds, scale=scale, window_size=(window - 1, 0), **options)

        return windowed
    if "is_causal" not in names or has_windows:
        return None

    def causal(*args: Any) -> Any:
        *tensors_and_bounds, scale, _ = args
        return varlen_attn(*tensors_and_bounds, is_causal=True, scale=scale, **options)

    return causal


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels that serve the steps of one cache.

    Attributes:
        varlen: attends over packed keys, for steps whose requests have different numbers of tokens; None: gathered keys
            and a mask serve those steps too.
        reasons: for each candidate why it serves or does not serve such steps.
    """

    varlen: Varlen | None
    reasons: tuple[tuple[str, str], ...]

    @classmethod
    def choose(cls, cache: PagedKVCache, masks: tuple[LayerMask, ...]) -> AttentionKernels:
        """Choose by device, layers and the abilities of this torch.

        Args:
            cache: the KV cache.
            masks: the masks of its layers, without limits that no sequence reaches.
        """
        varlen = torch_varlen(has_windows=any(mask.window for mask in masks))
        obstacle = _varlen_obstacle(cache, masks)
        if obstacle is None and varlen is None:
            obstacle = f"varlen_attn of torch {torch.__version__} has no scale, or no windows for the sliding layers"
        return cls(
            varlen=None if obstacle else varlen,
            reasons=(
                (_PAGES, _block_table_obstacle()),
                (_VARLEN, obstacle or "serves the layers, and computes no masked products"),
                (_MASKED, "serves every layer on every device" if obstacle else "serves the steps of equal lengths"),
            ),
        )

    def table(self) -> Table:
        """Which kernel serves which steps, and why."""
        mixed = _MASKED if self.varlen is None else _VARLEN
        rows = [(kernel, _STEPS[kernel == mixed, kernel == _MASKED], reason) for kernel, reason in self.reasons]
        return Table("paged attention", ("kernel", "serves", "why"), tuple(rows))


_PAGES = "varlen_attn over pages (block_table)"
_VARLEN = "varlen_attn over packed keys"
_MASKED = "scaled_dot_product_attention over gathered keys"
_STEPS = {
    (True, True): "all steps",
    (True, False): "prompts and mixed steps",
    (False, True): "steps with the same number of tokens in every request",
    (False, False): "none",
}


def _varlen_parameters() -> Mapping[str, Any]:
    """The parameters of torch's ``varlen_attn``; none if this torch does not have it."""
    try:
        return inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters
    except ImportError:
        return {}


def _block_table_obstacle() -> str:
    """Why no kernel reads the pages in place.

    ``varlen_attn`` has block tables from torch 2.13 on, which FlashAttention 3 and 4 (packages of their own) and, from
    torch 2.15 on, cuDNN serve. A page may contain NaN of its last owner behind a sequence's end, and it is nowhere
    stated that these kernels do not multiply it by a weight of zero.
    """
    if "block_table" not in _varlen_parameters():
        return f"torch {torch.__version__} has none"
    return "it is not known to ignore what a page's last owner left behind a sequence's end"


def _varlen_obstacle(cache: PagedKVCache, masks: tuple[LayerMask, ...]) -> str | None:
    """Why flash attention, which ``varlen_attn`` calls, cannot serve the layers of this cache; None if it can."""
    if cache.device.type != "cuda":
        return f"it runs on CUDA, the cache is on {cache.device.type}"
    if cache.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the cache has {cache.dtype}"
    capability = torch.cuda.get_device_capability(cache.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    if any(mask.chunk for mask in masks):
        return "it has no chunked attention"
    reasons = (_layer_obstacle(layer) for layer in cache.layers if layer is not None)
    return next((reason for reason in reasons if reason is not None), None)


def _layer_obstacle(layer: PagedLayer) -> str | None:
    if not layer.is_plain:
        return "it has neither a soft cap nor sinks"
    if layer.dim_of_values != layer.head_dim:
        return f"keys and values differ in size: {layer.head_dim} and {layer.dim_of_values}"
    if layer.head_dim % 8 or layer.head_dim > 256:
        return f"it takes heads of a multiple of 8 up to 256, a layer has {layer.head_dim}"
    return None
