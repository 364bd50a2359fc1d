"""Stock vision towers over real graphs on a GPU: bfloat16 through flash attention, float32 through masked attention."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from graphpass.encoder import attention as att
from graphpass.encoder.adapters import adapter_for
from graphpass.encoder.attention import Pieces
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from tests.e2e.hugging_face import CUDA, difference
from tests.e2e.test_encoder_adapters import assert_same, budgets_of
from tests.e2e.towers import EACH_TOWER, Tower
from tests.unit.encoder.test_encoder_attention import padded_pieces

pytestmark = pytest.mark.cuda


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
def test_compiled_once_by_inductor(stock: Tower) -> None:
    """One artifact for all layers and budgets, and measured costs."""
    tower = stock.build(CUDA)
    budgets = budgets_of(stock, adapter_for(tower, **stock.options))
    most = min(6, budgets[0])
    options = EncoderOptions(token_budgets=budgets, max_items_per_batch=most, compile=True, costs="measured")
    manager = EncoderCudaGraphManager.from_model(tower, options=options, **stock.options)
    manager.capture()
    for seed in range(4):
        items = stock.items(tower, stock.random_sizes(random.Random(seed)), seed)
        assert_same(manager.execute(items), stock.stock(tower, items), CUDA.tolerance)
    assert manager.runtime.compiled() == (1 if stock.has_grids else 2), "a batch of one image has its own code"
    manager.clear()
