"""CudaGraphManager over real graphs: every size, buffers, memory, what waits for the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphpass import Batch, CudaGraphManager
from tests.gpu import shared
from tests.gpu.shared import WIDTH
from tests.gpu.shared import rows_of as rows
from tests.unit.models import Rowwise

pytestmark = pytest.mark.cuda

managed = functools.partial(shared.managed, device="cuda")


@contextlib.contextmanager
def captured_rows(mode: str = "FULL", **given: Any) -> Iterator[tuple[CudaGraphManager, Rowwise]]:
    model = Rowwise(WIDTH).eval().cuda()
    with managed(model, mode, **given) as manager:
        manager.capture()
        yield manager, model


def run(manager: CudaGraphManager, x: torch.Tensor, **given: Any) -> Any:
    return manager.run(Batch(x.shape[0], inputs={"x": x}, **given))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_step_waits_for_nothing_on_the_host(mode: str, cuda: torch.device) -> None:
    with captured_rows(mode) as (manager, model):
        batches = [(num_tokens, rows(num_tokens)) for num_tokens in (3, 8, 1, 4)]
        run(manager, rows(2))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [run(manager, x).clone() for _, x in batches]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for (_, x), result in zip(batches, got, strict=True):
            torch.testing.assert_close(result, model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_steps_take_no_memory(mode: str, cuda: torch.device) -> None:
    with captured_rows(mode) as (manager, _):
        inputs = [rows(num_tokens) for num_tokens in range(1, 9)]
        for x in inputs:
            run(manager, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            for x in inputs:
                run(manager, x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_results_of_all_sizes_lie_in_the_same_buffers_outside_of_the_pool(mode: str, cuda: torch.device) -> None:
    with managed(lambda x: {"hidden": x + 1, "other": (x * 2, x[:, 0])}, mode) as manager:
        manager.capture()
        addresses = set()
        for num_tokens in (1, 8, 3, 10, 9, 4):
            for uniform in (False, True):
                got = run(manager, rows(num_tokens), uniform_decode=uniform)
                addresses.add((got["hidden"].data_ptr(), *(tensor.data_ptr() for tensor in got["other"])))
        (address,) = addresses
        owners = {
            tuple(segment["segment_pool_id"])
            for segment in torch.cuda.memory_snapshot()
            for place in address
            if segment["address"] <= place < segment["address"] + segment["total_size"]
        }
        assert owners == {(0, 0)}
