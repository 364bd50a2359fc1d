"""Parts for models: an operator that sets padded rows to zero, and what attention functions of layers have in common.

The attention functions are those of Hugging Face's layers, for text and for vision.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphpass.context import current_context
from graphpass.errors import OptionError, ShapeError

_TOLERANCE = 2e-2
"""Allowed relative norm of the difference between half precision and float32."""


@torch.library.custom_op("graphpass::zero_padding", mutates_args=())
def _zero_padding(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    context = current_context()
    is_padding = None if context is None else context.is_padding
    if is_padding is None:
        return x.clone()
    leading, covered = x.shape[:num_dims], is_padding.dim()
    if is_padding.numel() == leading.numel():
        is_padding, covered = is_padding.view(leading), num_dims
    elif is_padding.shape != leading[:covered]:
        raise ShapeError(
            "zero_padding got a tensor that does not have the rows of the batch",
            expected=f"leading dimensions {tuple(is_padding.shape)}, or as many rows in {num_dims} dimensions",
            found=f"{tuple(leading)}",
            remedy="pass a tensor whose first num_dims dimensions are the tokens, or the requests and their tokens",
        )
    # Trailing dimensions that the mask does not cover have one size in all batches, so they have no padding.
    # guard: zeroed_padding
    return x.clone().masked_fill_(is_padding.view(*is_padding.shape, *[1] * (x.dim() - covered)), 0)  # keeps the layout


@_zero_padding.register_fake
def _(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    return torch.empty_like(x)


def zero_padding(x: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
    """A copy of ``x`` whose padded rows are zero. A mask is not enough, because NaN times zero is NaN.

    Attention calls it on keys and values before it uses them. The op reads ``is_padding`` from the forward context when
    it runs; without a context no row is padding.

    Args:
        x: a tensor whose first ``num_dims`` dimensions are the tokens, or the requests and the tokens of each.
        num_dims: the number of leading dimensions that ``is_padding`` covers, 1 or 2. It may cover only the first of
            two if the other one has the same size in all batches.

    Raises:
        ShapeError: ``x`` does not have the rows of the batch.
    """
    result: torch.Tensor = _zero_padding(x, num_dims)
    return result


# -- attention functions -----------------------------------------------------------------------------------------------


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register an attention function with transformers as ``attn_implementation=name``. It may be repeated.

    It is called as ``function(module, query, key, value, attention_mask, dropout=..., scaling=..., **more)`` with
    tensors [batch, heads, tokens, head_dim], and returns one of [batch, tokens, heads, head_dim], and the weights or
    None.
    """
    importlib.import_module("transformers").AttentionInterface.register(name, function)


def by_token(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scaling: float | None, *, what: str, remedy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Views of query, key and value [1, heads, tokens, head_dim] as [tokens, heads, head_dim], and the scale."""
    query, key, value = tensors
    if query.shape[0] != 1:
        raise ShapeError(what, expected="a batch of one row", found=f"a batch of {query.shape[0]} rows", remedy=remedy)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale


def refuse_unserved(module: Any, used: Mapping[str, bool], *, what: str, expected: str, remedy: str) -> None:
    """Refuse a layer that uses an argument that the attention function does not support, by {argument: is used}."""
    unserved = [name for name, is_used in used.items() if is_used]
    if unserved:
        raise OptionError(
            f"{what} does not support an argument that {type(module).__name__} uses",
            expected=expected,
            found=", ".join(unserved),
            remedy=remedy,
        )


def kernel_fault(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> str | None:
    """Why an attention kernel cannot be used: its error, or wrong keys; None if it can.

    ``run`` returns its result, whose last dimension is the width of a head; ``expected`` is float32.
    """
    try:
        found = run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error)
    is_right = bool((found.float() - expected).norm() < _TOLERANCE * expected.norm())
    return None if is_right else f"with heads of width {expected.shape[-1]} it attends to wrong keys"
