"""Fixtures of several folders: a runtime, and captures that do not look through all of torch for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graphpass import GraphRuntime


@pytest.fixture
def rt() -> Iterator[GraphRuntime]:
    with GraphRuntime() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """``capturing()`` collects garbage at its end; here it need not look at what torch.compile imported."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
