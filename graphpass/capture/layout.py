"""Tensor layouts: the bytes and distinct elements of a view, and the same view over other memory."""

from __future__ import annotations

import torch

from graphpass.errors import ShapeError

__all__ = ["WIDEST_ELEMENT_BYTES", "distinct_elements", "extent", "same_view", "storage_id"]

WIDEST_ELEMENT_BYTES = 16
"""complex128. Memory that several views share is moved by multiples of this, so views of every dtype stay aligned."""


def storage_id(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage: equal for tensors that share a storage.

    0 for an empty storage, and for a tensor that consists of others (nested, sparse).
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range [first, last) of a tensor in its storage; (0, 0) without elements."""
    if not tensor.numel():
        return (0, 0)
    first = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.element_size()
    return (first * width, (first + reach + 1) * width)


def distinct_elements(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """The view in which every element of ``tensor`` appears once: expanded dimensions are cut to size 1.

    Raises:
        ShapeError: elements overlap in another way, so that copying into the layout is not defined.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    reach = 0
    for stride, size in sorted((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride <= reach:  # guard: self_overlap
            raise ShapeError(
                f"{name} overlaps itself in memory",
                expected="a layout in which each element has a distinct address, or expanded dimensions",
                found=f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                remedy="pass tensor.contiguous()",
            )
        reach += (size - 1) * stride
    return tensor


def same_view(memory: torch.Tensor, like: torch.Tensor, *, byte_offset: int) -> torch.Tensor:
    """``like``'s shape, strides and dtype over another tensor's storage, starting ``byte_offset`` into it."""
    view = torch.empty(0, dtype=like.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), byte_offset // like.element_size(), like.shape, like.stride())
