"""What the attention functions that Hugging Face's layers call have in common, for text and for vision."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphpass.errors import OptionError, ShapeError

__all__ = ["by_token", "refuse_unserved", "register_attention"]


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known to transformers as ``attn_implementation=name``. Once or often, it is the same.

    Layers call it as ``function(module, query, key, value, attention_mask, dropout=..., scaling=..., **more)``, with
    tensors [batch, heads, tokens, head_dim]. It returns [batch, tokens, heads, head_dim] and the weights, or None.
    """
    importlib.import_module("transformers").AttentionInterface.register(name, function)


def by_token(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scaling: float | None, *, what: str, remedy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Query, key and value [1, heads, tokens, head_dim] as [tokens, heads, head_dim], and the scale of the scores.

    Args:
        tensors: query, key and value.
        scaling: None is ``head_dim ** -0.5``.
        what: of the error: what takes all tokens in one row.
        remedy: of the error.

    Raises:
        ShapeError: a batch of other than one row.
    """
    query, key, value = tensors
    if query.shape[0] != 1:
        raise ShapeError(what, expected="a batch of one row", found=f"a batch of {query.shape[0]} rows", remedy=remedy)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale


def refuse_unserved(module: Any, asked: Mapping[str, bool], *, what: str, expected: str, remedy: str) -> None:
    """Refuse a layer that asks for something that the attention does not do.

    Args:
        module: the layer.
        asked: {name of an argument: the layer uses it}; none of them is served.
        what: the attention, first words of the error.
        expected: what it does.
        remedy: of the error.

    Raises:
        OptionError: something of ``asked`` is true.
    """
    unserved = [name for name, is_asked in asked.items() if is_asked]
    if unserved:
        raise OptionError(
            f"{what} does not do what {type(module).__name__} asks for",
            expected=expected,
            found=", ".join(unserved),
            remedy=remedy,
        )
