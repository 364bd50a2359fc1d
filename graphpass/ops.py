"""Operators for models: ``zero_padding`` sets padded rows to zero, so that they do not affect real rows."""

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
    return x.clone().masked_fill_(rows.view(*rows.shape, *[1] * (x.dim() - num_dims)), 0)  # clone keeps the layout of x


@_zero_padding.register_fake
def _(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    return torch.empty_like(x)


def zero_padding(x: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
    """A copy of ``x`` whose padded rows are zero. A mask is not enough, because NaN times zero is NaN.

    Attention calls it on keys and values before it uses them. The op reads ``is_padding`` from the forward context when
    it runs; without a context no row is padding.

    Args:
        x: a tensor whose first ``num_dims`` dimensions are the tokens, or the requests and the tokens of each.
        num_dims: the number of leading dimensions that ``is_padding`` covers, 1 or 2.
    """
    result: torch.Tensor = _zero_padding(x, num_dims)
    return result
