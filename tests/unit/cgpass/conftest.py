"""Ops with Python bodies that count their calls, and models that are split at one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from graphpass import GraphRuntime
from tests.unit.cgpass.attended import ATTEND
from tests.unit.compiled import Compiled

PYTHON_CALLS: list[str] = []


@torch.library.custom_op("cgpasstest::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    PYTHON_CALLS.append("attend")
    return x.flip(0) * 2


@torch.library.custom_op("cgpasstest::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    PYTHON_CALLS.append("scale")
    return x * 3


for op in (attend, scale):
    op.register_fake(torch.empty_like)


@pytest.fixture
def python_calls() -> Iterator[list[str]]:
    """Every call of a Python op body in this test, by the op's name."""
    PYTHON_CALLS.clear()
    yield PYTHON_CALLS
    PYTHON_CALLS.clear()


@pytest.fixture
def keyed(rt: GraphRuntime) -> Callable[..., Compiled]:
    """``keyed(model, **options)``: split at ``attend``, for the test's runtime, called at keys."""
    return functools.partial(Compiled, rt, splitting_ops=[ATTEND])
