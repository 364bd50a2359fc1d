"""DTensor weights: on a mesh of one rank, and on two ranks with collectives between the captured regions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphpass as gp
from tests.unit.models import module

BETWEEN = ["_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"]


class TwoLayers(nn.Module):
    """The first layer has a part of the hidden width on each rank, and the second adds the parts up."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.group: Any = None
        if mesh is not None:
            from torch.distributed.tensor import Shard, distribute_tensor

            self.group = mesh.get_group()
            for layer, dim in ((self.up, 0), (self.down, 1)):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(dim)]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.down(torch.relu(self.up(x)))
        hidden = torch.relu(x @ self.up.weight.to_local().t())  # type: ignore[operator]
        parts = hidden @ self.down.weight.to_local().t()  # type: ignore[operator]
        added = torch.ops._c10d_functional.all_reduce(parts, "sum", self.group.group_name)
        return torch.ops._c10d_functional.wait_tensor(added)  # type: ignore[no-any-return]


def rows(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_one_rank(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]), requires_grad=False)
    runtime = gp.GraphRuntime()
    options = {"compiler": "aot_eager", "dispatch": "auto", "runtime": runtime}
    fast = torch.compile(
        lambda x: (x @ layer.weight.to_local()).relu(), backend="cgpass", dynamic=True, options=options
    )
    with torch.no_grad():
        for seed, size in enumerate((5, 7, 6, 5, 8)):
            x = rows(size, seed)
            torch.testing.assert_close(fast(x), (x @ weight).relu())
    assert sum(counts.replayed for counts in runtime.counts().values()) == 3


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_saved_start_is_of_the_placement(mesh: Any, compiler: str, tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    told = {0: "nothing was saved for it", 1: "Dynamo traced nothing for them", 2: "module 'layer': tensors differs"}
    for start, placement in enumerate((Replicate(), Replicate(), Shard(0))):
        torch._dynamo.reset()
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(torch.eye(8), mesh, [placement]), requires_grad=False)
        model = module(lambda self, x: (x @ self.layer.weight.to_local()).relu(), layer=layer).eval()
        fast = gp.graphed(model, [8], {"x": 0}, compiler=compiler, warm_start=tmp_path)
        fast.capture(rows(4, 0))
        with torch.no_grad():
            for seed, size in enumerate((5, 7, 6)):
                torch.testing.assert_close(fast(rows(size, seed)), rows(size, seed).relu())
        assert any(told[start] in str(note) for note in fast.runtime.notes)
        assert fast.runtime.compiled() == (not start), "the graph of the local tensor is the same"
        fast.runtime.close()


def test_a_result_of_a_collective_is_waited_for(mesh: Any) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    options = {"compiler": "eager", "dispatch": "auto", "ranks": "lockstep"}
    fast = torch.compile(lambda x: x * 2, backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        for seed in range(4):
            given = all_reduce(rows(4, seed), "sum", mesh.get_group())
            assert isinstance(given, AsyncCollectiveTensor)
            torch.testing.assert_close(fast(given), rows(4, seed) * 2)
            assert given.completed, "a graph reads what has arrived"


def captured_between(rank: int, world_size: int, port: int) -> None:
    """Capture and replay on a rank, all with one key."""
    from torch.distributed.device_mesh import init_device_mesh

    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    whole, runtime = TwoLayers(), gp.GraphRuntime()
    model = TwoLayers(init_device_mesh("cpu", (world_size,)))
    options = {"compiler": "aot_eager", "mode": "PIECEWISE", "splitting_ops": BETWEEN, "runtime": runtime}
    fast = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    key = gp.BatchDescriptor(4)
    with torch.no_grad(), gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.PIECEWISE, batch_descriptor=key):
        with runtime.capturing():
            fast(rows(4, 0))
        for seed in range(3):
            torch.testing.assert_close(fast(rows(4, seed)), whole(rows(4, seed)))
    (counts,) = {counts.replayed for (_, mode, _), counts in runtime.counts().items()}
    assert counts >= 3
    runtime.close()
    dist.destroy_process_group()


@pytest.mark.soak
def test_two_ranks_with_collectives_between_the_regions() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(captured_between, (2, port), 2)  # type: ignore[no-untyped-call]
