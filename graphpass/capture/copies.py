"""Copies many tensors in few kernel launches.

torch's fused copy falls back to one launch for each tensor if a list mixes dtypes, or contains a pair of different
layouts. Lists are therefore split into groups first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpass.compat import memory

__all__ = ["copied_together", "copy_each"]


def copied_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Groups of pairs, by index, that one launch can copy; every pair is in exactly one group.

    Args:
        targets: the tensors to write.
        sources: the tensors to read, each of its target's shape and dtype.
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, kind in enumerate(map(_kind, targets, sources)):
        groups.setdefault(kind, []).append(index)
    return tuple(map(tuple, groups.values()))


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source, of its target's shape and dtype, in about as many launches as there are dtypes."""
    if len(set(map(_kind, targets, sources))) == 1:
        memory.foreach_copy_(targets, sources)
        return
    for group in copied_together(targets, sources):
        memory.foreach_copy_([targets[index] for index in group], [sources[index] for index in group])


def _kind(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.dtype, bool]:
    return target.dtype, target.is_contiguous() and source.is_contiguous()
