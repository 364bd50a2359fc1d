"""Stock towers that somebody has changed before they were captured: attention of their own, hooks, other levels."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphpass.encoder.adapters import adapter_for
from tests.e2e.hugging_face import CPU
from tests.e2e.test_encoder_adapters import assert_same, captured, run_eagerly
from tests.e2e.towers import QWEN2_5_VL, QWEN3_VL, SIGLIP, Grid, Tower

GRIDS = pytest.mark.parametrize("stock", [QWEN2_5_VL, QWEN3_VL], ids=str)
SIZES: list[Grid] = [(1, 16, 16), (1, 4, 4), (2, 12, 14)]
"""Frames of more than one piece among them."""


def assert_as_stock(stock: Tower, tower: Any, *, has_graphs: bool = True) -> None:
    """Eagerly, and in graphs as far as there can be any."""
    items = stock.items(tower, SIZES)
    adapter = adapter_for(tower, **stock.options)
    assert_same(run_eagerly(adapter, items), stock.stock(tower, items))
    manager = captured(adapter, token_budgets=(64, 256))
    assert_same(manager.execute(items), stock.stock(tower, items))
    assert (manager.get_cumulative_stats().misses == 0) == has_graphs
    manager.clear()


def with_own_attention(attention: Any) -> type[torch.nn.Module]:
    """The class of ``attention``, attending between the bounds that it is called with."""
    kind = type(attention)
    rotated = importlib.import_module(kind.__module__).apply_rotary_pos_emb_vision

    class Own(kind):  # type: ignore[misc, valid-type]
        def forward(
            self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any, **_: Any
        ) -> torch.Tensor:
            rows = hidden_states.shape[0]
            qkv = self.qkv(hidden_states).reshape(rows, 3, self.num_heads, -1).permute(1, 0, 2, 3)
            query, key = rotated(qkv[0], qkv[1], *position_embeddings)
            sequence = torch.searchsorted(cu_seqlens, torch.arange(rows, dtype=cu_seqlens.dtype), right=True)
            mask = sequence[:, None] == sequence[None]
            attended = F.scaled_dot_product_attention(
                *(t.transpose(0, 1) for t in (query, key, qkv[2])), attn_mask=mask
            )
            projected: torch.Tensor = self.proj(attended.transpose(0, 1).reshape(rows, -1))
            return projected

    return Own


@GRIDS
def test_attention_of_its_own_is_told_the_bounds_of_sequences(stock: Tower) -> None:
    tower = stock.build(CPU)
    for block in tower.blocks:
        block.attn.__class__ = with_own_attention(block.attn)
    assert_as_stock(stock, tower)


@GRIDS
def test_a_wrapped_forward_of_attention(stock: Tower) -> None:
    """It stays bound to the stock block, which splits by lengths on the host."""
    tower = stock.build(CPU)
    for block in tower.blocks:
        inner = block.attn.forward
        block.attn.forward = lambda *args, inner=inner, **named: 1.2 * inner(*args, **named)
    assert_as_stock(stock, tower, has_graphs=False)


@pytest.mark.parametrize("levels", [[0, 2], [2, 0], [2, 1, 0], [1, 1], [7, 1], []])
def test_deepstack_levels_in_any_order(levels: list[int]) -> None:
    """Features come in the order of layers, by the merger at the level's place; of a level twice, the first."""
    assert_as_stock(QWEN3_VL, QWEN3_VL.build(CPU, deepstack_visual_indexes=levels))


class Scales:
    """A hook of an object that cannot be copied."""

    def __init__(self) -> None:
        self.calls, self.lock = 0, threading.Lock()

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 1.3 * output


@pytest.mark.parametrize("stock", [QWEN2_5_VL, QWEN3_VL, SIGLIP], ids=str)
@pytest.mark.parametrize("comes_late", [False, True])
def test_hooks_of_blocks_are_the_towers(stock: Tower, comes_late: bool) -> None:
    tower, hook = stock.build(CPU), Scales()
    layers = tower.blocks if stock.has_grids else tower.encoder.layers
    first = layers[0].mlp
    if not comes_late:
        first.register_forward_hook(hook)
    adapter = adapter_for(tower, **stock.options)
    if comes_late:
        first.register_forward_hook(hook)
    items = stock.items(tower, [(1, 4, 4)])
    expected = stock.stock(tower, items)
    assert hook.calls == 1
    assert_same(run_eagerly(adapter, items), expected)
    assert hook.calls == 2


@GRIDS
def test_another_default_device(stock: Tower) -> None:
    tower = stock.build(CPU)
    adapter, items = adapter_for(tower, **stock.options), stock.items(tower, SIZES)
    expected = stock.stock(tower, items)
    with torch.device("meta"):
        manager = captured(adapter, token_budgets=(64, 256))
        found = manager.execute(items)
        chosen = adapter.select_encoder_cudagraph_items(items, [2, 0])
    assert_same(found, expected)
    assert chosen["grid_thw"].tolist() == [[2, 12, 14], [1, 16, 16]]
    manager.clear()


def test_images_and_clips_are_not_copied_to_choose_among_them() -> None:
    tower = QWEN3_VL.build(CPU)
    images, clips = (QWEN3_VL.items(tower, sizes) for sizes in ([(1, 4, 4), (1, 0, 4), (1, 2, 2)], [(2, 4, 4)]))
    items = {**images, "pixel_values_videos": clips["pixel_values"], "video_grid_thw": clips["image_grid_thw"]}
    adapter = adapter_for(tower, **QWEN3_VL.options)
    of = [adapter.select_encoder_cudagraph_items(items, [index])["pixel_values"] for index in range(4)]
    assert [len(patches) for patches in of] == [16, 0, 4, 32]
    starts = [patches.data_ptr() for patches in of if len(patches)]
    width = images["pixel_values"].stride(0) * images["pixel_values"].element_size()
    first, clip = images["pixel_values"].data_ptr(), clips["pixel_values"].data_ptr()
    assert starts == [first, first + 16 * width, clip]
