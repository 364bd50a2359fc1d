"""Fills stale outputs and padding under test with values that cannot pass for results."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["fill_with_sentinel"]


def fill_with_sentinel(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite ``tensors`` with NaN; integers with their dtype's least value, or greatest if that is 0; bools True."""
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype is not torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)
            else:
                tensor.fill_(True)
