"""Copying many tensors in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpass import compat

__all__ = ["copy_each"]


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source, of its target's shape and dtype, in about as many launches as there are dtypes.

    Torch's fused copy takes a whole list tensor by tensor where two dtypes differ, or the layouts of one pair.
    """
    alike: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = (target.dtype, target.is_contiguous() and source.is_contiguous())
        of_kind = alike.get(kind)
        if of_kind is None:
            of_kind = alike[kind] = ([], [])
        of_kind[0].append(target)
        of_kind[1].append(source)
    for of_kind in alike.values():
        compat.foreach_copy_(*of_kind)
