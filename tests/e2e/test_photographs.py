"""Real photographs, from the model's own processor through whole-encoder graphs: alone, in batches, and as clips."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from graphpass.encoder.adapters import adapter_for
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from tests.e2e.hugging_face import CPU
from tests.e2e.photographs import cut_photographs, processor_of
from tests.e2e.test_encoder_adapters import assert_same
from tests.e2e.towers import EACH_TOWER, Tower

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "window_size": 112},
    "qwen3_vl": {"patch_size": 16},
    "siglip": {"patch_size": 16, "image_size": 64},
    "clip": {"patch_size": 16, "image_size": 64},
}
BATCHES = [
    pytest.param([1, 1, 4, 7], id="few"),
    pytest.param([1] * 20 + [5, 9, 16, 24], id="many", marks=pytest.mark.soak),
]


def captured(stock: Tower, tower: Any) -> EncoderCudaGraphManager:
    """Budgets from one photograph to a batch, and no costs: what fits a graph takes it."""
    least = adapter_for(tower, **stock.options).get_encoder_cudagraph_budget_range()[0]
    budgets = (16, 48, 96) if stock.has_grids else (least, 3 * least, 8 * least)
    options = EncoderOptions(token_budgets=budgets, compile=False, costs=None)
    manager = EncoderCudaGraphManager.from_model(tower, options=options, **stock.options)
    manager.capture()
    return manager


@pytest.mark.parametrize("counts", BATCHES)
@EACH_TOWER
def test_photographs(stock: Tower, counts: Sequence[int]) -> None:
    tower = stock.build(CPU, **CONFIGS[stock.family])
    manager, seeded = captured(stock, tower), random.Random(0)
    processor = processor_of(stock, tower, max_pixels=128 * 128)
    shapes = set()
    for count in counts:
        items: Mapping[str, torch.Tensor] = dict(processor(images=cut_photographs(seeded, count), return_tensors="pt"))
        assert_same(manager.execute(items), stock.stock(tower, items))
        shapes |= set(map(tuple, items["image_grid_thw"].tolist() if stock.has_grids else []))
    stats = manager.get_cumulative_stats()
    assert (stats.hits, stats.misses) == (sum(counts), 0)
    assert len(shapes) > 5 or not stock.has_grids
