"""The op for attention over a paged KV cache. It calls torch's attention kernels."""

from __future__ import annotations

from typing import Any

import torch

from graphpass.context import get_forward_context
from graphpass.errors import ContextError
from graphpass.regions.padding import register_padding_rule
from graphpass.text.paddingrules import paged_attention_by_row
from graphpass.text.paged.kernels import Scores
from graphpass.text.paged.metadata import AttentionCall, PagedStep

__all__ = ["NO_WINDOW", "PAGED_ATTENTION"]

PAGED_ATTENTION = "graphpass::paged_attention"
NO_WINDOW = -1


torch.library.define(
    PAGED_ATTENTION,
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int layer, float scale, int window, "
    "float softcap=0.0, Tensor? sinks=None) -> ()",
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
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the step's keys and values into the cache, then attend causally over each request's pages, into ``out``.

    Args:
        query: [rows, heads, head_dim].
        key: [rows, kv heads, head_dim].
        value: [rows, kv heads, value_dim].
        out: [rows, heads, value_dim]. Rows behind the metadata's tokens, which are not read either, become zero, and
            so do padded rows of a FULL key (in a uniform one, where their query is finite).
        layer: of the cache; its :class:`PagedLayer` says which keys a token sees.
        scale: of the scores.
        window: positions that a token sees, itself included, if the layer passes them: they must be those of the
            cache's layer; -1: the layer passes none.
        softcap: scores x become ``softcap * tanh(x / softcap)``; 0: they stay as they are.
        sinks: a score for each head that takes part in the softmax and has no value, [heads].
    """
    scores = Scores(scale, softcap, sinks)
    _step_in_context().attend(AttentionCall(query, key, value, out, layer, scores, max(window, 0)))


def _writes_out_only(*_: Any, **__: Any) -> None:
    """The fake implementation: the op writes to ``out`` and returns nothing."""


torch.library.register_fake(PAGED_ATTENTION, _writes_out_only)
register_padding_rule(PAGED_ATTENTION, paged_attention_by_row)


def _step_in_context() -> PagedStep:
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, PagedStep):
        raise ContextError(
            "paged attention has no metadata",
            expected="the result of PagedAttention.build() as attn_metadata of the forward context",
            found=type(metadata).__name__,
            remedy="pass attn_metadata=attention.build(requests, key) to set_forward_context; in PIECEWISE the op has "
            f"to stay outside of captured regions: splitting_ops=[{PAGED_ATTENTION!r}]",
        )
    return metadata
