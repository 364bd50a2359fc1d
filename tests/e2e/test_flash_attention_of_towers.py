"""Towers through what they hand to flash attention, with an operator of its contract in the kernel's place.

The operator reads bounds as the kernel does, leaves rows of no piece as they were (here: NaN), and is as opaque to a
compiler: wrong tables, rows that are read though nobody wrote them, and sizes for which a block is compiled once more
show up without a GPU.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphpass.compat import operators
from graphpass.encoder import attention as att
from graphpass.encoder.adapters import adapter_for
from tests.e2e.hugging_face import CPU
from tests.e2e.test_encoder_adapters import GRID_BUDGETS, assert_same, captured, poisoned, run_eagerly
from tests.e2e.towers import QWEN2_5_VL, QWEN3_VL, Tower

GRIDS = pytest.mark.parametrize("stock", [QWEN2_5_VL, QWEN3_VL], ids=str)


@torch.library.custom_op("graphpass_tests::attend_in_pieces", mutates_args=())
def attend_in_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_starts: torch.Tensor,
    key_lengths: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> torch.Tensor:
    assert len(query_bounds) == len(key_starts) == len(key_lengths) + 1
    rows = torch.arange(len(query), dtype=torch.int32)
    at = torch.searchsorted(query_bounds, rows, right=True) - 1
    piece = at.clamp(max=len(key_lengths) - 1)
    is_written = (at < len(key_lengths)) & (rows - query_bounds[piece] < max_query_len)
    first, count = key_starts[piece][:, None], key_lengths[piece][:, None]
    is_seen = (rows >= first) & (rows < first + count)
    is_read = (is_seen & is_written[:, None]).any(0)[:, None, None]
    key, value = (torch.where(is_read, tensor, 0.0) for tensor in (key, value))
    rows_last = (tensor.transpose(0, 1) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(*rows_last, attn_mask=is_seen | ~is_written[:, None], scale=scale)
    return torch.where(is_written[:, None, None], attended.transpose(0, 1), torch.nan).contiguous()


attend_in_pieces.register_fake(lambda query, *_: query.new_empty(query.shape))


@pytest.fixture(autouse=True)
def flash_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequences: operators.PackedSequences,
        *,
        scale: float,
    ) -> torch.Tensor:
        *bounds, max_query_len, _ = sequences
        attended: torch.Tensor = attend_in_pieces(query, key, value, *bounds, max_query_len, scale)
        return attended

    def reads_all(*args: object, **named: object) -> object:
        """Torch 2.11's Dynamo guards the sizes of whatever the layer passes on, read or not."""
        for tensor in (*args, *named.values()):
            assert not isinstance(tensor, torch.Tensor) or len(tensor)
        return of_layer(*args, **named)

    of_layer: Any = att._packed_of_layer
    monkeypatch.setattr(att, "_packed_of_layer", reads_all)
    monkeypatch.setattr(att, "why_not_flash", lambda *_: None)
    monkeypatch.setattr(att.operators, "flash_attention", flash_attention)


@GRIDS
def test_random_sets(stock: Tower) -> None:
    tower = stock.build(CPU)
    manager = captured(poisoned(stock, tower), token_budgets=GRID_BUDGETS)
    for seed in range(20):
        items = stock.items(tower, stock.random_sizes(random.Random(seed)), seed)
        assert_same(manager.execute(items), stock.stock(tower, items))
    assert manager.get_cumulative_stats().hits > 20
    manager.clear()


def test_the_block_is_compiled_once() -> None:
    """In the first call the windows are as many as their pieces, whose numbers vary apart."""
    tower = QWEN2_5_VL.build(CPU)
    adapter = adapter_for(tower, **QWEN2_5_VL.options)
    manager = captured(adapter, token_budgets=GRID_BUDGETS, compile=True, compiler="eager")
    for sizes in ([(1, 2, 2)], [(1, 14, 14), (3, 16, 16)], [(1, 2, 4)] * 9):
        items = QWEN2_5_VL.items(tower, sizes)
        assert_same(manager.execute(items), QWEN2_5_VL.stock(tower, items))
        assert_same(run_eagerly(adapter, items), QWEN2_5_VL.stock(tower, items))
    assert manager.runtime.compiled() == 1
    assert len(manager.runtime.callables()) == 1
    manager.clear()
