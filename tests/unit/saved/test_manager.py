"""A manager that starts again from what another one saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import graphpass as gp
from tests.unit.saved.stack import INPUTS, Plain, Stack, example, stack


def manager(model: Stack, folder: Path, sizes: Sequence[int] = (2, 4)) -> gp.CudaGraphManager:
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, max_num_reqs=4)
    inputs = [gp.InputSpec("x", (4, INPUTS), torch.float32)]
    return gp.CudaGraphManager(model, dispatcher, inputs, compiler="eager", progress=False, warm_start=folder)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 2, 4)])
def test_a_manager_loads_what_another_one_saved(
    sizes: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "starts"
    first = manager(stack(Plain), folder, sizes)
    first.capture()
    first.close()
    torch.compiler.reset()
    counters.clear()
    for name in ("partition", "RegionCompiler", "dispatched"):
        monkeypatch.setattr(f"cgpass.pipeline.{name}", None)
    model = stack(Plain, seed=3)
    second = manager(model, folder, sizes)
    second.capture()
    for rows in (4, 3, 2, 1):
        x = example(rows)
        torch.testing.assert_close(second.run(gp.Batch(rows, inputs={"x": x})), model(x))
    assert not counters["frames"], second.runtime.notes
    assert second.runtime.compiled() == 0
