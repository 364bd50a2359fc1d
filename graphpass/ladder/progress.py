"""The progress bar of a capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

__all__ = ["capture_progress"]

Key = TypeVar("Key")


def capture_progress(keys: Sequence[Key]) -> tqdm[Key]:
    """A progress bar over ``keys``, shown on rank 0 only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_first = not distributed or torch.distributed.get_rank() == 0
    return tqdm(keys, desc="capturing", unit="graph", leave=False, disable=not is_first)
