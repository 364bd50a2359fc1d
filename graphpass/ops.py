"""Operators for models: ``zero_padding`` sets padded rows to zero, so that they do not affect real rows."""

from __future__ import annotations

import torch

from graphpass.context import current_context
from graphpass.errors import ShapeError


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
