"""Stock vision towers over real graphs on a GPU: bfloat16 through flash attention, float32 through masked attention."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphpass.encoder import attention as att
from graphpass.encoder.adapters import adapter_for
from graphpass.encoder.attention import Pieces
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from tests.e2e.hugging_face import CUDA, difference
from tests.e2e.test_encoder_adapters import assert_same, results_of
from tests.e2e.towers import EACH_TOWER, Tower
from tests.unit.encoder.test_encoder_attention import padded_pieces

pytestmark = pytest.mark.cuda

BUDGETS = (8, 20, 64, 128)


def captured(stock: Tower, tower: Any, budgets: Sequence[int], **options: Any) -> EncoderCudaGraphManager:
    given = {"costs": None, "max_items_per_batch": min(6, budgets[0]), **options}
    manager = EncoderCudaGraphManager.from_model(
        tower, options=EncoderOptions(token_budgets=budgets, **given), **stock.options
    )
    manager.capture()
    return manager


def budgets_of(stock: Tower, tower: Any) -> Sequence[int]:
    if stock.has_grids:
        return BUDGETS
    rows = adapter_for(tower, **stock.options).get_encoder_cudagraph_budget_range()[0]
    return (rows, 3 * rows, 6 * rows)


@pytest.mark.parametrize("head_dim", [8, 20, 72, 80, 128, 256])
def test_the_kernel_pads_heads_and_leaves_padding_alone(head_dim: int, cuda: torch.device) -> None:
    lengths, padding = [1, 130, 64, 0, 7, 700], 50
    real = sum(lengths)
    seeded = torch.Generator(cuda).manual_seed(0)
    packed = [
        torch.randn(real + padding, 3, head_dim, device=cuda, generator=seeded, dtype=torch.bfloat16) for _ in range(3)
    ]
    for tensor in packed:
        tensor[real:] = torch.nan
    assert att.why_not_flash(cuda, torch.bfloat16, head_dim) is None
    pieces = Pieces(*(part.to(cuda) for part in padded_pieces(lengths, unused=2)))
    found = att.packed_attention(*packed, pieces, scale=0.2, is_flash=True)
    assert not found[real:].any()
    start = 0
    for length in lengths:
        own = [tensor[start : start + length].float().transpose(0, 1).unsqueeze(0) for tensor in packed]
        if length:
            alone = F.scaled_dot_product_attention(*own, scale=0.2)[0].transpose(0, 1)
            assert difference(found[start : start + length].float(), alone) < CUDA.tolerance
        start += length


@EACH_TOWER
def test_bfloat16_rounds_as_the_stock_tower_does(stock: Tower) -> None:
    """The errors against float32 of the same weights, over all results."""
    tower = stock.build(CUDA)
    manager, exact = captured(stock, tower, budgets_of(stock, tower), compile=False), copy.deepcopy(tower).float()
    errors = {"ours": 0.0, "stock": 0.0}
    for seed in range(40):
        items = stock.items(tower, stock.random_sizes(random.Random(seed)), seed)
        wide = {name: given.float() if given.is_floating_point() else given for name, given in items.items()}
        expected = stock.stock(exact, wide)
        for name, found in (("ours", results_of(manager.execute(items))), ("stock", stock.stock(tower, items))):
            for result, of_exact in zip(found, expected, strict=True):
                errors[name] += sum(difference(a.float(), b) for a, b in zip(result, of_exact, strict=True))
    assert 0 < errors["ours"] <= 1.5 * errors["stock"]
    manager.clear()


@EACH_TOWER
def test_compiled_once_by_inductor(stock: Tower) -> None:
    """One artifact for all layers and budgets, and measured costs."""
    tower = stock.build(CUDA)
    manager = captured(stock, tower, budgets_of(stock, tower), compile=True, costs="measured")
    for seed in range(4):
        items = stock.items(tower, stock.random_sizes(random.Random(seed)), seed)
        assert_same(manager.execute(items), stock.stock(tower, items), CUDA.tolerance)
    assert manager.runtime.compiled() == (1 if stock.has_grids else 2), "a batch of one image has its own code"
    manager.clear()
