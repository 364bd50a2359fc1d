"""Refuses tensors under ``torch.func`` transforms: a graph reads only their memory, not the batch or tangent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphpass.compat import transforms
from graphpass.errors import CaptureError

__all__ = ["refuse_transforms"]


def refuse_transforms(name: str, values: Iterable[Any]) -> None:
    """Refuse a replay if a ``torch.func`` transform is active on one of its arguments.

    Raises:
        CaptureError: one of ``values`` is batched by ``torch.func.vmap``, or carries a tangent or a gradient.
    """
    transform = transforms.transform_over(values)
    if transform is not None:
        raise CaptureError(
            f"{name} cannot replay under {transform}",
            expected="arguments that are plain tensors",
            found=f"{transform} over an argument",
            remedy="call it outside of the transform, or with runtime mode NONE, which runs without graphs",
        )
