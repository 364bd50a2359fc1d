"""Batch sizes that recur get real graphs, where those are faster; no other graph, result or state changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch
from graphpass.dispatch.owngraphs import OwnGraphs
from tests.gpu.shared import managed, rows_of

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
        assert OwnGraphs.on(manager.buffers["x"].device).num_bytes() < 64 << 20
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
