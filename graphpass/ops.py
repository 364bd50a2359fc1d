"""Operators of graphpass that models call: one sets padded rows to zero, so that none reaches a real row."""

from __future__ import annotations

import torch

from graphpass.context import current_context

__all__ = ["zero_padding"]


@torch.library.custom_op("graphpass::zero_padding", mutates_args=())
def _zero_padding(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    context = current_context()
    is_padding = None if context is None else context.is_padding
    if is_padding is None:
        return x.clone()
    rows = is_padding.view(x.shape[:num_dims])
    return x.clone().masked_fill_(rows.view(*rows.shape, *[1] * (x.dim() - num_dims)), 0)  # in the layout of x


@_zero_padding.register_fake
def _(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    return torch.empty_like(x)


def zero_padding(x: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
    """``x`` with its padded rows set to zero, whatever they hold; NaN times zero is NaN, so a mask alone is not enough.

    Attention calls it on keys and values before they are used. Which rows are padding is the forward context's
    ``is_padding``, read when the op runs; without one nothing is padding. The result is a new tensor.

    Args:
        x: its first ``num_dims`` dimensions are those that ``is_padding`` is about: one of tokens, or requests and
            tokens of each.
        num_dims: how many.
    """
    result: torch.Tensor = _zero_padding(x, num_dims)
    return result
