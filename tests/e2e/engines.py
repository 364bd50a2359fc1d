"""Engines for text, each made once for all tests of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphpass.text import CausalLM

Engines = Callable[..., CausalLM]


@contextlib.contextmanager
def engines_made() -> Iterator[Engines]:
    """``make(make_model, name, device, **options)``: an engine that is captured; all are closed at the end."""
    made: dict[str, CausalLM] = {}

    def make(make_model: Callable[..., torch.nn.Module], name: str, device: str = "cpu", **options: Any) -> CausalLM:
        key = repr((name, device, sorted(options.items())))
        if key not in made:
            made[key] = CausalLM(make_model(name, device), **options)
            if made[key].manager.needs_capture():
                made[key].capture()
        return made[key]

    yield make
    for lm in made.values():
        lm.close()
