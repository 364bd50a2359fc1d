"""DTensor weights: on a mesh of one rank, and on two ranks with collectives between the captured regions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphpass as gp
from tests.unit.models import module


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


class Words(nn.Module):
    """An embedding that is cut by words: its result remembers which ids are another rank's until it is summed."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.mesh, self.replicated = mesh, [Replicate()]
        self.table = nn.Parameter(distribute_tensor(torch.arange(64.0).view(16, 4), mesh, [Shard(0)]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        ids = DTensor.from_local(ids, self.mesh, self.replicated, run_check=False)
        words: Any = nn.functional.embedding(ids, self.table)
        return words.redistribute(placements=self.replicated).to_local() * 2  # type: ignore[no-any-return]


def test_an_embedding_that_is_cut_by_words_is_summed_where_it_is_made() -> None:
    """One of two ranks, which exchange nothing: each id of the other's words counts as zero."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Words(init_device_mesh("cpu", (2,))).eval()
        fast = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
        with torch.no_grad():
            for size in (5, 7, 6):
                ids = torch.randint(0, 16, (2, size))
                torch.testing.assert_close(fast(ids), model(ids))
    finally:
        dist.destroy_process_group()
