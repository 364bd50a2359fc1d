"""Batch sizes that recur get real graphs, where those are faster; no other graph, result or state changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch
from graphpass.capture.cuda import PROCESS_MEMORY
from graphpass.dispatch.owngraphs import OwnGraphs
from tests.gpu.shared import FULL, PIECEWISE, WIDTH, managed, rows_of
from tests.gpu.test_encoder import assert_same, made, on_gpu
from tests.unit.encoder import toy
from tests.unit.serving.managed import NUM_SLOTS, Attends, SlotBuilder

pytestmark = [pytest.mark.cuda, pytest.mark.alone]
WIDE, MOST = 1024, 4096


class Layers(nn.Module):
    """Layers in which more rows take more time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def run(manager: Any, num_tokens: int, **given: Any) -> torch.Tensor:
    found: torch.Tensor = manager.run(Batch(num_tokens, inputs={"x": rows_of(num_tokens, WIDE)}, **given))
    return found


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_graph_that_is_faster_serves_and_one_that_is_not_is_dropped(compiler: str) -> None:
    model = Layers().cuda().eval()
    with managed(model, "FULL", (2, MOST), rows=MOST, width=WIDE, compiler=compiler) as manager:
        manager.capture()
        for _ in range(3):
            for num_tokens in (64, MOST - 1):
                run(manager, num_tokens)
        stats = manager.runtime.stats()
        assert [key.num_tokens for _, key in manager.adapt()] == [64]
        assert PROCESS_MEMORY.shared(OwnGraphs, manager.buffers["x"].device).num_bytes() < 64 << 20
        captured = manager.runtime.stats().captured
        assert captured == stats.captured + 2, "both sizes were tried"
        assert manager.adapt() == (), "and the slower one is not tried again"
        for num_tokens in (64, MOST - 1, 1, 2, MOST, 65, 64):
            with torch.no_grad():
                expected = model(rows_of(num_tokens, WIDE))
            torch.testing.assert_close(run(manager, num_tokens), expected, rtol=1e-3, atol=1e-3)
        assert manager.last_step is not None
        assert manager.last_step.descriptor.num_tokens == 64
        assert manager.runtime.stats().captured == captured, "graphs of other sizes are still those of before"


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_attention_keeps_what_it_keeps(mode: str, cuda: torch.device) -> None:
    builder, model = SlotBuilder(width=WIDTH, device=cuda), Attends(WIDTH).eval().to(cuda)
    sums = torch.zeros(NUM_SLOTS, WIDTH, device=cuda)

    def step(manager: Any, number: int, num_tokens: int, *, uniform: bool) -> None:
        x, slots = rows_of(num_tokens), [(5 * n + number) % NUM_SLOTS for n in range(num_tokens)]
        with torch.no_grad():
            sums[slots] += model.before(x)
            expected = model.after(sums[slots]).relu() + x
        got = manager.run(Batch(num_tokens, inputs={"x": x}, attention=slots, uniform_decode=uniform))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(builder.sums[:NUM_SLOTS], sums, rtol=1e-4, atol=1e-4)

    with managed(model, mode, (2, 10), compiler="inductor", attention=builder) as manager:
        manager.capture()
        for number in range(6):
            step(manager, number, (1, 3)[number % 2], uniform=number % 2 == 0)
        before = sums.clone()
        adapted = {(mode, key.num_tokens) for mode, key in manager.adapt()}
        assert adapted <= {(FULL, 1), (FULL, 3), (PIECEWISE, 1), (PIECEWISE, 3)}
        torch.testing.assert_close(builder.sums[:NUM_SLOTS], before)
        captured = manager.runtime.stats().captured
        for number, num_tokens in enumerate((1, 3, 10, 2, 5, 1, 3)):
            step(manager, number, num_tokens, uniform=number % 2 == 0)
        assert manager.runtime.stats().captured == captured


def test_an_encoder_adapts(cuda: torch.device) -> None:
    encoder = toy.WithExamples()
    manager = made(encoder)
    for _ in range(3):
        manager.execute(on_gpu([2 * 11]))
    assert manager.adapt() == (11,)
    for seed, sizes in enumerate(([22], [64, 2], [22, 40], [18])):
        items = on_gpu(sizes, seed=seed)
        assert_same(manager.execute(items), toy.one_by_one(encoder, items))
    replays = {
        budget.captured.descriptor.num_tokens: budget.replays for budget in manager.get_cumulative_stats().budgets
    }
    assert replays[11] >= 2
    manager.clear()
