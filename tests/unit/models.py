"""Small models of tests: parts and a function of them, which a test writes where it needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module whose forward is ``forward(self, ...)``; tensors among the parts become buffers.

    Models of one function of a file have one class; nothing else makes or unpickles it.
    """
    model: nn.Module = (_class_of if "<" not in forward.__qualname__ else _class_of.__wrapped__)(forward)()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            model.register_buffer(name, part)
        else:
            setattr(model, name, part)
    return model


@functools.cache
def _class_of(forward: Callable[..., Any]) -> type[nn.Module]:
    return type("Model", (nn.Module,), {"forward": forward})


def linear(width: int = 6, out: int | None = None, seed: int = 0) -> nn.Linear:
    """A layer that has the same weights each time."""
    torch.manual_seed(seed)
    return nn.Linear(width, out or width)


class Rowwise(nn.Module):
    """Rows do not mix: a batch of it is padded."""

    def __init__(self, width: int = 6, out: int | None = None) -> None:
        super().__init__()
        self.inner = linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()
