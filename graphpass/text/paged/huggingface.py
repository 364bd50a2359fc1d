"""Paged attention as an attention implementation of Hugging Face's decoders."""

from __future__ import annotations

from typing import Any

import torch

from graphpass.attentionlayers import by_token, refuse_unserved, register_attention
from graphpass.text.paged.op import NO_WINDOW

__all__ = ["HUGGING_FACE_NAME", "paged_attention_of_layer", "register_with_hugging_face", "scales_by_row"]

HUGGING_FACE_NAME = "graphpass_paged"

_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "s_aux",
        "softcap",
        "use_cache",
    }
)
"""Arguments of Hugging Face's attention functions that this function reads, or that do not change the result."""


def register_with_hugging_face() -> str:
    """Register paged attention with transformers; returns the name to pass as ``attn_implementation``.

    Once or often, it is the same.
    """
    register_attention(HUGGING_FACE_NAME, paged_attention_of_layer)
    return HUGGING_FACE_NAME


def scales_by_row(module: Any) -> bool:
    """Whether a layer multiplies its queries by a factor of their row, which it takes for their position (Llama 4)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def paged_attention_of_layer(
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
        value: [1, kv heads, tokens, value_dim].
        attention_mask: none: who sees what is in the metadata.
        dropout: none.
        scaling: of the scores, ``head_dim ** -0.5`` if not given.
        sliding_window: positions that a token sees, or None.
        kwargs: what else transformers passes: ``softcap`` and ``s_aux`` (sinks) are served.

    Returns:
        [1, tokens, heads, value_dim], and no weights.

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
    is_causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    asked = {"attention_mask": attention_mask is not None, "dropout": bool(dropout), "is_causal=False": not is_causal}
    # guard: paged_unknown_arguments
    unknown = {name: argument is not None for name, argument in kwargs.items() if name not in _HARMLESS}
    refuse_unserved(
        module,
        {**asked, **unknown, "attn_temperature_tuning": scales_by_row(module)},  # guard: paged_scale_by_row
        what="paged attention",
        expected="causal attention, with or without a sliding window, chunks, a soft cap or sinks",
        remedy="use PagedAttention.for_model(model, ...); leave masks and dropout out (model.eval()); other attention "
        "needs a backend of its own",
    )
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    window = NO_WINDOW if sliding_window is None else sliding_window
    softcap = kwargs.get("softcap") or 0.0
    torch.ops.graphpass.paged_attention(
        query, key, value, out, module.layer_idx, scale, window, softcap, kwargs.get("s_aux")
    )
    return out.unsqueeze(0), None
