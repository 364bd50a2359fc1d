"""What captures are done in: torch's state, and the bar that counts keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

__all__ = ["capture_progress", "quietly", "steadily", "without_cached_casts"]

Key = TypeVar("Key")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without autograd and outside of inference mode: how everything is compiled, captured and run."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Autocast keeps the weights it has cast for the rest of its block: a graph would read those, not the weights."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextlib.contextmanager
def steadily() -> Iterator[None]:
    """:func:`quietly`, and with autocast as while a graph is captured: what is compiled inside serves captures, too."""
    with without_cached_casts(), quietly():
        yield


def capture_progress(keys: Sequence[Key]) -> tqdm[Key]:
    """A bar over what is captured, on the first rank alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_first = not distributed or torch.distributed.get_rank() == 0
    return tqdm(keys, desc="capturing", unit="graph", leave=False, disable=not is_first)
