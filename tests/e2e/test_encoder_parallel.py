"""Four ranks over gloo, each with a share of the items and some without any, have what one rank has, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphpass import EncoderCudaGraphManager, EncoderOptions
from graphpass.encoder import balance_items
from graphpass.errors import EncoderConfigError
from tests.e2e.test_encoder_ranks_apart import by_rank
from tests.unit.encoder import toy

NUM_RANKS = 4
REQUESTS = (
    (4, 8, 2, 40, 64, 70, 2, 0, 12),  # shares of different sizes, one item above the largest budget
    (64,),  # three ranks without items
    (2, 70),  # two ranks without
    (0, 0, 0),  # rows for nobody
    (),
    (16,) * 8,
)


class WholeNumbers(toy.ToyTower):
    """Weights and activations are small whole numbers, of which every sum is exact in whatever order it is taken.

    A floating-point product of matrices depends on how many rows it has; what is asked here is whether the right rows
    arrive.
    """

    def __init__(self, levels: int) -> None:
        super().__init__(levels=levels)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randint(-2, 3, weight.shape, generator=generator))
        self.blocks = torch.nn.ModuleList([WholeBlock(), WholeBlock()])


class WholeBlock(torch.nn.Module):
    """Each patch takes the sum of its item's patches."""

    def forward(self, x: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        same = (item[:, None] == item[None, :]) & (item >= 0)[:, None]
        return torch.remainder(x + same.to(x.dtype) @ x.masked_fill((item < 0)[:, None], 0), 17)


def items_of(sizes: tuple[int, ...], seed: int) -> dict[str, Any]:
    items = toy.images(sizes, seed=seed)
    return {**items, "patches": items["patches"].mul(3).round()}


def manager_of(levels: int, group: Any, dtype: torch.dtype = torch.float32) -> EncoderCudaGraphManager:
    options = EncoderOptions(token_budgets=[4, 8, 16, 32], costs=None)
    encoder = toy.ToyEncoder(WholeNumbers(levels))
    return EncoderCudaGraphManager(encoder, options=options, device="cpu", dtype=dtype, group=group)


def results(group: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Of every request on one and on two outputs, before the capture and after; and (replays, misses) of each."""
    found, counts = [], []
    for levels in (1, 2):
        manager = manager_of(levels, group)
        found.append(manager.execute(items_of(REQUESTS[0], 99)))
        manager.capture()
        found += [manager.execute(items_of(sizes, seed)) for seed, sizes in enumerate(REQUESTS)]
        stats = manager.get_cumulative_stats()
        counts.append((stats.hits, stats.misses))
    return found, counts


def refusal_of_another_dtype() -> str:
    """All ranks have an item, so that none waits for the others."""
    manager = manager_of(1, dist.group.WORLD, torch.float64)
    try:
        manager.execute(items_of((4,) * NUM_RANKS, 0))
    except EncoderConfigError as error:
        return str(error)
    return "accepted"


def of_rank(_: int) -> Any:
    return (*results(dist.group.WORLD), refusal_of_another_dtype())


def test_four_ranks_have_what_one_has(tmp_path: Path) -> None:
    each_rank = by_rank(tmp_path, of_rank, NUM_RANKS, timeout_s=1800)
    expected, counts_of_one = results(None)
    for found, _, refused in each_rank:
        assert "expected torch.float64; found torch.float32" in refused
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    for which in range(2):
        each = [counts[which] for _, counts, _ in each_rank]
        assert [sum(values) for values in zip(*each, strict=True)] == list(counts_of_one[which])
    assert any(tensor.any() for result in expected for tensor in result if isinstance(tensor, torch.Tensor))
    shares = [balance_items(sizes, NUM_RANKS).counts for sizes in REQUESTS]
    assert [share.count(0) for share in shares] == [0, 3, 2, 1, 4, 0]
