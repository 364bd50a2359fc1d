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
    """Autograd and inference mode off: the modes in which everything is compiled, captured and run."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Turn off autocast's cache of cast weights: a graph would read the cached casts instead of the weights."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # guard: autocast_cache
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """:func:`replay_settings` and :func:`without_cached_casts`; compilation uses them too, to match captures."""
    with without_cached_casts(), replay_settings():
        yield


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Turn off the garbage collector during a capture, where it could free device memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Freeze all live objects (``gc.freeze``) for the body; does nothing if the process has frozen objects itself."""
    freezes = gc.get_freeze_count() < _FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
