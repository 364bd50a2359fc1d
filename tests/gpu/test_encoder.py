"""EncoderCudaGraphManager over real graphs: results, padding, pools, streams."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from graphpass.encoder.protocol import EncoderGraphKey, EncoderOutput
from tests.unit.encoder import toy

pytestmark = pytest.mark.cuda

MIB = 1 << 20
made = functools.partial(toy.made, device="cuda")
assert_same = functools.partial(toy.assert_same, tolerance=1e-4)


def on_gpu(sizes: Sequence[int], *, seed: int = 1, **lists: Any) -> dict[str, Any]:
    items = toy.images(sizes, seed=seed, **lists)
    return {**items, "patches": items["patches"].cuda()}


class SlowEncoder(toy.ToyEncoder):
    """Its graphs read their buffers late."""

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        torch.cuda._sleep(20_000_000)
        return super().encoder_cudagraph_forward(buffers, key)


def test_streams_wait_for_each_other() -> None:
    """No item runs eagerly: that would wait for the host's copies, and with them for the replay before."""
    encoder = SlowEncoder()
    manager = made(encoder)
    requests = [on_gpu((4, 8, 2, 40, 64, 2, 12), seed=seed) for seed in range(6)]
    expected = [toy.one_by_one(encoder, items) for items in requests]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for index, items in enumerate(requests):
        with torch.cuda.stream(streams[index % 3]):
            found.append(manager.execute(items))
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert manager.get_cumulative_stats().misses == 0
    manager.clear()


def test_the_ladder_takes_little_more_than_its_largest_budget_and_as_estimated() -> None:
    ladder = [64 * step for step in range(1, 17)]
    alone = made(toy.ToyEncoder(budget_range=(1, 1024)), token_budgets=[1024])
    largest = alone.get_cumulative_stats()
    alone.clear()
    manager = made(toy.ToyEncoder(budget_range=(1, 1024)), capture=False, token_budgets=ladder)
    estimate = manager.estimate()
    manager.capture()
    stats = manager.get_cumulative_stats()
    assert len(stats.budgets) == len(ladder)
    assert stats.pool_bytes <= 1.15 * largest.pool_bytes
    assert stats.buffer_bytes == estimate.buffer_bytes
    assert abs(estimate.pool_bytes - stats.pool_bytes) <= max(0.1 * stats.pool_bytes, 32 * MIB)
    manager.clear()
    assert manager.get_cumulative_stats().pool_bytes == 0


@pytest.mark.parametrize("replaces_weights", [False, True])
def test_a_pool_is_shared(caplog: pytest.LogCaptureFixture, *, replaces_weights: bool) -> None:
    """Also after weights were replaced, unless torch refuses a pool without graphs, as 2.11 does, with a warning."""
    pool = torch.cuda.graph_pool_handle()
    encoder = toy.ToyEncoder()
    manager = made(encoder, capture=False)
    manager.capture(graph_pool=pool)
    count = len(manager.get_cumulative_stats().budgets)
    items = on_gpu(toy.MIXED)
    assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    if replaces_weights:
        encoder.tower.embed.weight = torch.nn.Parameter(encoder.tower.embed.weight.detach() * 2)
        assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    is_refused = "takes no more graphs" in caplog.text
    assert is_refused is (tuple(pool) not in pools)
    assert not is_refused or (replaces_weights and torch.__version__ < "2.13")
    assert len(manager.get_cumulative_stats().budgets) == count
    manager.clear()
    if is_refused:
        pytest.xfail("a segment of the refused pool stays allocated, see docs/testing.md")
