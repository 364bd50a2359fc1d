"""A manager that starts again from what another one saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import graphpass as gp
from graphpass.saved.calls import SavedCalls
from tests.unit.saved.stack import INPUTS, Plain, Stack, example, stack


def manager(
    model: Stack, folder: Path, sizes: Sequence[int] = (2, 4), mode: str = "FULL_AND_PIECEWISE", max_num_reqs: int = 4
) -> gp.CudaGraphManager:
    dispatcher = gp.CudagraphDispatcher(mode, sizes, max_num_reqs=max_num_reqs)
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


def test_an_engine_for_one_request_loads_what_larger_batches_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(Plain)
    first = manager(model, tmp_path, (1,), max_num_reqs=1)
    first.capture()
    served(first, 1, 3, model=model)
    first.close()
    torch.compiler.reset()
    counters.clear()
    for name in ("cgpass.pipeline.partition", "graphpass.serving.tokenmixing.partition"):
        monkeypatch.setattr(name, None)
    second = manager(model, tmp_path, (1,), max_num_reqs=1)
    second.capture()
    served(second, 1, 3, 1, 4, model=model)
    assert not counters["frames"], second.runtime.notes
    assert "uncompiled" not in "".join(second.runtime.notes)
    second.close()


def served(made: gp.CudaGraphManager, *sizes: int, model: Stack) -> None:
    for rows in sizes:
        x = example(rows)
        torch.testing.assert_close(made.run(gp.Batch(rows, inputs={"x": x})), model(x))


def tokens(made: gp.CudaGraphManager) -> list[int]:
    """Of the captured keys, in the order of capture."""
    return [key.captured.descriptor.num_tokens for key in made.stats().keys]


def test_sizes_that_recurred_are_keys_of_the_next_start(tmp_path: Path) -> None:
    folder, model = tmp_path / "starts", stack(Plain)
    first = manager(model, folder)
    first.capture()
    served(first, 1, 3, 1, 3, 1, 3, model=model)
    assert {key.num_tokens for _, key in first.adapt()} == {1, 3}
    served(first, 1, 2, model=model)  # 3 serves no step
    first.close()
    torch.compiler.reset()
    counters.clear()
    second = manager(model, folder)
    second.capture()
    assert sorted(tokens(second)) == [1, 2, 2, 4, 4]
    served(second, 4, 3, 2, 1, model=model)
    assert not counters["frames"], second.runtime.notes
    second.close()
    third = manager(model, folder)  # of which nobody asked anything
    third.capture()
    third.close()
    fourth = manager(model, folder)
    fourth.capture()
    assert 1 in tokens(fourth)


def test_the_call_of_a_callable_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    of_call = SavedCalls.save
    monkeypatch.setattr(SavedCalls, "save", lambda *given: (saved.append(len(given[4]["x"])), of_call(*given)))
    first = manager(stack(Plain), tmp_path / "starts", (1, 2, 4))
    first.capture()
    assert saved == [4, 1]  # the first run, and single tokens
    first.close()


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls


def test_the_steps_that_are_compared_are_undone(tmp_path: Path) -> None:
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        model, eager = stack(Counting), stack(Counting)
        made = manager(model, tmp_path / "starts")
        made.buffers["x"].copy_(example(4))
        made.capture()
        assert torch.equal(made.buffers["x"], example(4))
        for rows in (4, 1):
            served(made, rows, model=eager)
            assert torch.equal(model.calls, eager.calls)
        assert "other bits" not in "".join(made.runtime.notes)
        made.close()
    assert not counters["frames"]
