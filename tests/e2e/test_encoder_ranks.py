"""Ranks over gloo share the items of a request, and differ in what they have captured or in that one of them fails."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from graphpass import EncoderCudaGraphManager, EncoderOptions
from graphpass.encoder import PackingCosts, balance_items, sharding
from graphpass.encoder.protocol import EncoderItems, EncoderOutput
from graphpass.errors import AgreementError, EncoderConfigError
from tests.unit.encoder import toy
from tests.unit.encoder.toy import assert_same

NUM_RANKS = 3
TIMEOUT_S = 10
PAUSE_S = 2
SIZES = (4, 8, 2, 40, 64, 30, 2, 0, 12)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"token_budgets": [4, 8, 16, 32], "costs": None},
    {"token_budgets": [32], "costs": PackingCosts({32: 1.0}, lambda tokens: 100.0)},
    {"enable": False},
)


class FailsOnRank(toy.ToyEncoder):
    """Its eager call finds no memory, on one rank."""

    fails = False

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("no memory")
        return super().encoder_eager_forward(items)


def manager_of(encoder: toy.ToyEncoder, options: dict[str, Any]) -> EncoderCudaGraphManager:
    given = {"device": "cpu", "dtype": torch.float32, "group": dist.group.WORLD}
    return EncoderCudaGraphManager(encoder, options=EncoderOptions(**options), **given)


def captured_apart(rank: int) -> Any:
    """One rank captures late, in between two requests; each has other budgets, and one has none."""
    manager, items = manager_of(toy.ToyEncoder(), OPTIONS[rank]), toy.images(SIZES)
    found = []
    for request in range(2):
        if request == rank:
            manager.capture()
        found.append(manager.execute(items))
    stats = manager.get_cumulative_stats()
    return found, (stats.hits, stats.misses)


def failed_on_one(rank: int) -> Any:
    """The result of each request, or what the rank was told. Rank 0 fails in the first."""
    encoder = FailsOnRank()
    encoder.fails = rank == 0
    manager, found = manager_of(encoder, OPTIONS[0]), []
    for seed in range(2):
        try:
            result: Any = manager.execute(toy.images((8,) * NUM_RANKS, seed=seed))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        found.append(result)
        if rank == 0:
            time.sleep(PAUSE_S)
    return found


def given_other_items(rank: int) -> Any:
    """One rank is given other items in the first request."""
    manager = manager_of(toy.ToyEncoder(), OPTIONS[0])
    sizes = (8,) * NUM_RANKS
    try:
        manager.execute(toy.images((8, 8, 4) if rank == 1 else sizes))
    except AgreementError as error:
        return str(error), manager.execute(toy.images(sizes))
    return "accepted", None


def on_rank(rank: int, folder: str, of_rank: Any, num_ranks: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    sharding.LEAST_SAVED = 0  # the images here are small
    store = dist.FileStore(f"{folder}/store", num_ranks)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        torch.save(of_rank(rank), f"{folder}/{rank}.pt")
        while not all(Path(f"{folder}/{other}.pt").exists() for other in range(num_ranks)):
            time.sleep(0.1)  # a rank that goes early would end the others' waiting
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def by_rank(folder: Path, of_rank: Any, num_ranks: int = NUM_RANKS, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What ``of_rank(rank)`` returns in each process: one imports torch, and ranks part before it has any thread."""
    multiprocessing.set_forkserver_preload(["graphpass", "torch.distributed", of_rank.__module__])
    given = (str(folder), of_rank, num_ranks, timeout_s)
    mp.start_processes(on_rank, args=given, nprocs=num_ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def test_a_capture_is_local_to_its_rank(tmp_path: Path) -> None:
    encoder, items = toy.ToyEncoder(), toy.images(SIZES)
    expected = toy.one_by_one(encoder, items)
    results = by_rank(tmp_path, captured_apart)
    for found, _ in results:
        for one in found:
            assert_same(one, expected)
    hits, misses = zip(*(counts for _, counts in results), strict=True)
    assert [count > 0 for count in hits] == [True, True, False]
    assert sum(hits) + sum(misses) == 2 * sum(size > 0 for size in SIZES), "items of no tokens are neither"


def test_a_rank_that_fails_leaves_none_waiting_and_none_wrong(tmp_path: Path) -> None:
    """The others learn of it, instead of taking what it sends with the next request for its share of this one.

    One that waited for its time-out would be told of that.
    """
    told = by_rank(tmp_path, failed_on_one)
    first, second = zip(*told, strict=True)
    assert first[0] == "OutOfMemoryError: no memory"
    for result in first[1:]:
        assert "rank 0 could not encode its share" in result
        assert "OutOfMemoryError: no memory" in result
    expected = toy.one_by_one(toy.ToyEncoder(), toy.images((8,) * NUM_RANKS, seed=1))
    for result in second:
        assert_same(result, expected)


def test_ranks_with_other_items_encode_alone_and_report_it(tmp_path: Path) -> None:
    expected = toy.one_by_one(toy.ToyEncoder(), toy.images((8,) * NUM_RANKS))
    for text, result in by_rank(tmp_path, given_other_items):
        assert "the ranks encode other items" in text
        assert_same(result, expected)


# Four ranks, each with a share of the items and some without any, have what one rank has, bit for bit.


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


def whole_manager(levels: int, group: Any, dtype: torch.dtype = torch.float32) -> EncoderCudaGraphManager:
    options = EncoderOptions(token_budgets=[4, 8, 16, 32], costs=None)
    encoder = toy.ToyEncoder(WholeNumbers(levels))
    return EncoderCudaGraphManager(encoder, options=options, device="cpu", dtype=dtype, group=group)


def results(group: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Of every request on one and on two outputs, before the capture and after; and (replays, misses) of each."""
    found, counts = [], []
    for levels in (1, 2):
        manager = whole_manager(levels, group)
        found.append(manager.execute(items_of(REQUESTS[0], 99)))
        manager.capture()
        found += [manager.execute(items_of(sizes, seed)) for seed, sizes in enumerate(REQUESTS)]
        stats = manager.get_cumulative_stats()
        counts.append((stats.hits, stats.misses))
    return found, counts


def refusal_of_another_dtype() -> str:
    """All ranks have an item, so that none waits for the others."""
    manager = whole_manager(1, dist.group.WORLD, torch.float64)
    try:
        manager.execute(items_of((4,) * 4, 0))
    except EncoderConfigError as error:
        return str(error)
    return "accepted"


def of_rank(_: int) -> Any:
    return (*results(dist.group.WORLD), refusal_of_another_dtype())


def test_four_ranks_have_what_one_has(tmp_path: Path) -> None:
    each_rank = by_rank(tmp_path, of_rank, 4, timeout_s=1800)
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
    shares = [balance_items(sizes, 4).counts for sizes in REQUESTS]
    assert [share.count(0) for share in shares] == [0, 3, 2, 1, 4, 0]
