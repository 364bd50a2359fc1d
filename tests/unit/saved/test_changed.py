"""A start is not loaded by a model that reads another value, though the value's text may be the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import graphpass as gp
from tests.unit.saved.changed import READS, Reads, held
from tests.unit.saved.stack import INPUTS, example

OPTIONS = {"compiler": "eager", "progress": False}
Called = tuple[gp.GraphRuntime, torch.Tensor]


def graphed(model: nn.Module, folder: Path) -> Called:
    fast = gp.graphed(model, [4], {"x": 0}, mode="FULL", **OPTIONS, warm_start=folder)
    fast.capture(example())
    return fast.runtime, fast(example(3))


def manager(model: nn.Module, folder: Path) -> Called:
    dispatcher = gp.CudagraphDispatcher("FULL", [4], max_num_reqs=4)
    inputs = [gp.InputSpec("x", (4, INPUTS), torch.float32)]
    made = gp.CudaGraphManager(model, dispatcher, inputs, **OPTIONS, warm_start=folder)
    made.capture()
    return made.runtime, made.run(gp.Batch(3, inputs={"x": example(3)})).clone()


def start(by: Callable[[nn.Module, Path], Called], read: Reads, folder: Path, *, is_changed: bool = False) -> list[str]:
    """Start a model and compare with eager; returns the reasons why it was not loaded."""
    torch.compiler.reset()
    counters.clear()
    model = read.model(is_changed)
    with torch.no_grad():
        runtime, result = by(model, folder)
        torch.testing.assert_close(result, model(example(3)))
    return [note for note in runtime.notes if "not loaded" in note or "not saved" in note]


@pytest.mark.parametrize("by", [graphed, manager])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.name)
def test_a_changed_value_is_a_miss(read: Reads, by: Any, tmp_path: Path) -> None:
    start(by, read, tmp_path / "starts")
    assert not start(by, read, tmp_path / "starts")
    assert not counters["frames"]
    notes = start(by, read, tmp_path / "starts", is_changed=True)
    assert counters["frames"]
    assert any("differs" in note for note in notes), notes


@pytest.mark.parametrize("by", [graphed, manager])
def test_a_value_without_a_text_is_not_saved(by: Any, tmp_path: Path) -> None:
    found = held(of=(np.dtype("float32"), None))
    read = Reads("a type of numpy", found, lambda self, x: x * (2.0 if self.box.of == np.float32 else 3.0))
    notes = start(by, read, tmp_path / "starts")
    assert any("objects are compared by identity" in note for note in notes), notes
    assert not list((tmp_path / "starts").glob("*.call"))
