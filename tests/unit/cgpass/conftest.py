"""Ops with Python bodies that count their calls, and a short way to say "run this at that key"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime

PYTHON_CALLS: list[str] = []


@torch.library.custom_op("cgpasstest::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    PYTHON_CALLS.append("attend")
    return x.flip(0) * 2


attend.register_fake(torch.empty_like)


@torch.library.custom_op("cgpasstest::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    PYTHON_CALLS.append("scale")
    return x * 3


scale.register_fake(torch.empty_like)


@pytest.fixture
def python_calls() -> Iterator[list[str]]:
    """Every call of a Python op body in this test, by the op's name."""
    PYTHON_CALLS.clear()
    yield PYTHON_CALLS
    PYTHON_CALLS.clear()


@pytest.fixture
def at_key() -> Callable[..., Any]:
    """``at_key(compiled, mode, size, *args)``: one call at that key; ``capture=True`` opens the runtime for it."""

    def run(
        compiled: Callable[..., Any],
        mode: str,
        size: int | BatchDescriptor,
        *args: Any,
        capture: GraphRuntime | None = None,
        **kwargs: Any,
    ) -> Any:
        descriptor = size if isinstance(size, BatchDescriptor) else BatchDescriptor(size)
        context = gp.set_forward_context(runtime_mode=CUDAGraphMode.parse(mode), batch_descriptor=descriptor)
        with torch.no_grad(), context:
            if capture is None:
                return compiled(*args, **kwargs)
            with capture.capturing():
                return compiled(*args, **kwargs)

    return run


@pytest.fixture
def tally() -> Callable[..., dict[tuple[str, int], tuple[int, int]]]:
    """``tally(rt, mode)``: {(region, tokens): (captured, replayed)} of the keys of one mode."""

    def count(runtime: GraphRuntime, mode: str) -> dict[tuple[str, int], tuple[int, int]]:
        return {
            (region, key.num_tokens): (c.captured, c.replayed)
            for (region, at, key), c in runtime.counts().items()
            if at is CUDAGraphMode.parse(mode)
        }

    return count
