"""Settings of torch and Python that captures and replays run under."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

__all__ = [
    "capture_settings",
    "frozen_objects",
    "replay_settings",
    "without_cached_casts",
    "without_collections",
]

# Python 3.12 counts the few hundred immortal objects of a process among the frozen ones.
_FROZEN_BY_PYTHON = 10_000


@contextlib.contextmanager
def replay_settings() -> Iterator[None]:
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
def capture_settings() -> Iterator[None]:
    """:func:`replay_settings` without autocast's cache, as in a capture: compiled code serves captures, too."""
    with without_cached_casts(), replay_settings():
        yield


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector out of a capture: it would free device memory in the middle of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the garbage collector from looking at what is alive now; a process that froze its own keeps them frozen."""
    freezes = gc.get_freeze_count() < _FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
