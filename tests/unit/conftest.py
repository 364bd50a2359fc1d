"""A runtime, and models compiled for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphpass import GraphRuntime
from tests.unit.compiled import Compiled


@pytest.fixture
def rt() -> Iterator[GraphRuntime]:
    with GraphRuntime() as runtime:
        yield runtime


@pytest.fixture
def compiled() -> Iterator[Callable[..., Compiled]]:
    """``compiled(model, **options)``: for a runtime of its own under auto dispatch, nothing compiled before."""
    made: list[GraphRuntime] = []

    def compile_model(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Compiled:
        torch.compiler.reset()
        made.append(GraphRuntime())
        return Compiled(made[-1], model, dynamic=dynamic, **{"dispatch": "auto", **options})

    yield compile_model
    for runtime in made:
        runtime.close()


@pytest.fixture
def keyed(rt: GraphRuntime) -> Callable[..., Compiled]:
    """``keyed(model, **options)``: for the test's runtime, called at keys."""
    return functools.partial(Compiled, rt)
