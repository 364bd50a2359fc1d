"""Saving and restoring what a warm-up changes: mutated tensors and random number generators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from graphpass.capture.layout import distinct_elements

__all__ = ["default_random_state", "restoring"]


@contextmanager
def restoring(
    mutated: Sequence[torch.Tensor], generators: Sequence[torch.Generator], device: torch.device
) -> Iterator[None]:
    """Restore ``mutated``, ``generators`` and the device's default generator after the body, also when it raises.

    The saved copies are outside any graph pool and are freed after the body.
    """
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
