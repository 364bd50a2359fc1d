"""Settings of torch and Python that captures and replays run under, and state that a warm-up changes and restores."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch

from graphpass.capture.staging import distinct_elements

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


@contextlib.contextmanager
def restoring(
    mutated: Sequence[torch.Tensor], generators: Sequence[torch.Generator], device: torch.device
) -> Iterator[None]:
    """Restore ``mutated``, ``generators`` and the device's default generator after the body, also when it raises."""
    mutated = [distinct_elements(tensor, name="a mutated input") for tensor in mutated]
    saved = [tensor.clone() for tensor in mutated]
    states = [generator.get_state() for generator in generators]
    default = default_random_state(device)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(mutated, saved, strict=True):
                tensor.copy_(copy)  # guard: warm_up_restored
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)  # guard: generators_restored
        if device.type == "cuda":
            torch.cuda.set_rng_state(default, device)
        else:
            torch.set_rng_state(default)  # guard: rng_restored


def default_random_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of ``device``."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
