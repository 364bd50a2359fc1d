"""Patch embedding as a matrix product: each patch is the whole input of the convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["WholePatches"]


class WholePatches(TorchFunctionMode):
    """A mode that replaces ``conv3d`` by a matrix product if the input has the shape of the kernel.

    The convolution is slow: in bfloat16, 1024 patches of 1536 values take 366 µs on an H100. Float32 convolutions on a
    GPU are not replaced, because torch rounds them differently from matrix products (TF32). The calling module, its
    hooks and autocast work as before.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or the matrix product instead of ``conv3d``."""
        kwargs = kwargs or {}
        product = _product(*args, **kwargs) if func is F.conv3d else None
        return func(*args, **kwargs) if product is None else product


def _product(
    input: torch.Tensor,  # noqa: A002  # the name of conv3d's argument
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: object = 1,
    padding: Any = 0,
    dilation: object = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """The convolution of [patches, *kernel] as [patches, width, 1, 1, 1]; None if it is not a matrix product."""
    paddings = [padding] if isinstance(padding, int | str) else padding
    if input.shape[1:] != weight.shape[1:] or groups != 1 or any(side not in (0, "valid") for side in paddings):
        return None
    if dilation not in (1, (1, 1, 1)):  # the kernel reads inputs beyond its shape
        return None
    if input.is_cuda and input.dtype is torch.float32:
        return None
    return F.linear(input.flatten(1), weight.flatten(1), bias)[..., None, None, None]
