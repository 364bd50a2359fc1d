"""Changes of what is no argument of a model and yet decides what it computes; undone at the end of each block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@contextlib.contextmanager
def autocast(model: nn.Module) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextlib.contextmanager
def default_dtype(model: nn.Module) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def matmul_precision(model: nn.Module) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENT_CHANGES = (training, autocast, default_dtype, matmul_precision, deterministic)
"""Each has the name that errors give to what it changes."""
