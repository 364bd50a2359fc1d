"""Paged attention as an attention implementation of Hugging Face's decoders."""

from __future__ import annotations

from typing import Any

import torch

from graphpass.attentionlayers import by_token, refuse_unserved, register_attention
from graphpass.text.paged.op import NO_WINDOW

__all__ = ["HUGGING_FACE_NAME", "register_with_hugging_face"]

HUGGING_FACE_NAME = "graphpass_paged"


def register_with_hugging_face() -> str:
    """Register paged attention with transformers; returns the name to pass as ``attn_implementation``.

    Once or often, it is the same.
    """
    register_attention(HUGGING_FACE_NAME, _hugging_face_attention)
    return HUGGING_FACE_NAME


_UNSERVED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of Hugging Face's attention functions that change the result and that this function refuses."""


def _hugging_face_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer of a stock model, with the signature that transformers calls.

    Args:
        module: the attention layer; its ``layer_idx`` is the cache's layer.
        query: [1, heads, tokens, head_dim], all requests one behind the other.
        key: [1, kv heads, tokens, head_dim].
        value: like ``key``.
        attention_mask: none: who sees what is in the metadata.
        dropout: none.
        scaling: of the scores, ``head_dim ** -0.5`` if not given.
        sliding_window: positions that a token sees, or None.
        kwargs: what else transformers passes.

    Returns:
        [1, tokens, heads, head_dim], and no weights.

    Raises:
        ShapeError: a batch of other than one row.
        OptionError: the layer asks for something that paged attention does not do.
    """
    query, key, value, scale = by_token(
        (query, key, value),
        scaling,
        what="paged attention takes the tokens of all requests in one row: input_ids and position_ids [1, tokens]",
        remedy="put the requests one behind the other; which tokens are whose is in the metadata",
    )
    asked = {"attention_mask": attention_mask is not None, "dropout": bool(dropout)}
    unknown = {name: kwargs.get(name) is not None for name in _UNSERVED}
    refuse_unserved(
        module,
        {**asked, **unknown, "is_causal=False": not getattr(module, "is_causal", True)},
        what="paged attention",
        expected="causal attention, with or without a sliding window",
        remedy="leave masks and dropout out (model.eval()); other attention needs a backend of its own",
    )
    out = query.new_empty(query.shape)
    window = NO_WINDOW if sliding_window is None else sliding_window
    torch.ops.graphpass.paged_attention(query, key, value, out, module.layer_idx, scale, window)
    return out.unsqueeze(0), None
