"""Progress bars: of captures, of tuning, and of text that is generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

Key = TypeVar("Key")


def capture_progress(keys: Sequence[Key], progress: bool | None = None) -> tqdm[Key]:
    """A progress bar over ``keys``, shown on rank 0 only."""
    return progress_bar(keys, progress, desc="capturing", unit="graph")


def progress_bar(steps: Sequence[Key] | None, progress: bool | None, **options: Any) -> tqdm[Key]:
    """A progress bar on stderr, shown on rank 0 only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_first = not distributed or torch.distributed.get_rank() == 0
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not is_first or progress is False or (progress is None and not is_terminal):
        options["disable"] = True
    elif progress:
        options["disable"] = False  # also against TQDM_DISABLE, which tqdm reads where nothing is passed
    return tqdm(steps, leave=False, **options)
