"""Stock towers that somebody has changed before they were captured: attention of their own, hooks, other levels."""

from __future__ import annotations

import importlib
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphpass as gp
from graphpass.encoder.adapters import adapter_for
from tests.e2e.hugging_face import CPU
from tests.e2e.test_encoder_adapters import assert_same, captured, run_eagerly
from tests.e2e.towers import CLIP, EACH_TOWER, QWEN2_5_VL, QWEN3_VL, SIGLIP, TOWERS, Grid, Tower

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
def test_custom_attention_receives_the_bounds_of_sequences(stock: Tower) -> None:
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
    hook.calls = 0
    items = stock.items(tower, [(1, 4, 4)])
    expected = stock.stock(tower, items)
    assert hook.calls == 1
    assert_same(run_eagerly(adapter, items), expected)
    assert hook.calls == 2


class OwnImageAttention(torch.nn.Module):
    """An attention of somebody's own, over all rows of an image."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, hidden_states: torch.Tensor, attention_mask: None = None, **_: Any) -> tuple[torch.Tensor, None]:
        stock = self.stock
        heads = (*hidden_states.shape[:-1], stock.num_heads, -1)
        query, key, value = (
            project(hidden_states).view(heads).transpose(1, 2) for project in (stock.q_proj, stock.k_proj, stock.v_proj)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden_states.shape)
        return stock.out_proj(attended), None


def own_attention(layer: Any) -> None:
    layer.self_attn = OwnImageAttention(layer.self_attn)


def hook_on_the_first_position(layer: Any) -> None:
    def zero_first(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 0] = 0
        return output

    layer.mlp.register_forward_hook(zero_first)


@pytest.mark.parametrize("stock", [pytest.param(SIGLIP, marks=pytest.mark.soak), CLIP], ids=str)
@pytest.mark.parametrize("change", [own_attention, hook_on_the_first_position], ids=lambda f: f.__name__)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["plain", "compiled"])
def test_images_of_a_changed_tower_do_not_see_each_other(stock: Tower, change: Any, compiles: bool) -> None:
    """What somebody has put into a block may look at all rows that it is given: those of one image."""
    tower = stock.build(CPU)
    for layer in tower.encoder.layers:
        change(layer)
    items = stock.items(tower, [(1, 1, 1)] * 3)
    adapter = adapter_for(tower, **stock.options)
    if compiles:
        adapter.compile_encoder("eager", gp.GraphRuntime())  # type: ignore[attr-defined]
    assert_same(run_eagerly(adapter, items), stock.stock(tower, items))
    manager = captured(adapter)
    assert_same(manager.execute(items), stock.stock(tower, items))
    assert manager.get_cumulative_stats().hits == 3


def blocks_of(stock: Tower, tower: Any) -> tuple[Any, str]:
    """Who has the blocks, under which name."""
    return (tower, "blocks") if stock.has_grids else (tower.encoder, "layers")


def set_layers(owner: Any, name: str, layers: Any) -> None:
    setattr(owner, name, torch.nn.ModuleList(layers))


CHANGES: dict[str, Any] = {
    "pruned": lambda owner, name: setattr(owner, name, getattr(owner, name)[:-1]),
    "turned_round": lambda owner, name: set_layers(owner, name, reversed(getattr(owner, name))),
    "appended": lambda owner, name: getattr(owner, name).append(getattr(owner, name)[0]),
    "inserted": lambda owner, name: getattr(owner, name).insert(0, getattr(owner, name)[1]),
    "removed": lambda owner, name: getattr(owner, name).__delitem__(-1),
}
IN_EVERY_RUN = [*((CLIP, change) for change in CHANGES), (QWEN3_VL, "appended"), (QWEN2_5_VL, "turned_round")]


@pytest.mark.parametrize(
    ("stock", "change"),
    [
        pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.soak, id=f"{case[1]}-{case[0]}")
        for case in itertools.product(TOWERS, CHANGES)
    ],
)
def test_another_list_of_blocks_is_followed(stock: Tower, change: str) -> None:
    """Eagerly, and in graphs, which are captured anew."""
    tower = stock.build(CPU, **({"deepstack_visual_indexes": [0]} if stock is QWEN3_VL else {}))
    items = stock.items(tower, [(1, 4, 4), (1, 2, 6)])
    adapter = adapter_for(tower, **stock.options)
    manager = captured(adapter)
    manager.execute(items)
    CHANGES[change](*blocks_of(stock, tower))
    expected = stock.stock(tower, items)
    assert_same(run_eagerly(adapter, items), expected)
    assert_same(manager.execute(items), expected)
    assert manager.get_cumulative_stats().misses == 0


def derived(tower: Any) -> None:
    forward = {"forward": lambda self, *args: super(type(self), self).forward()}
    tower.__class__ = type("Derived", (type(tower),), forward)


ON_THE_TOWER: dict[str, Any] = {
    "hooked": lambda tower: tower.register_forward_hook(lambda module, args, output: output),
    "hooked_before": lambda tower: tower.register_forward_pre_hook(lambda module, args: args),
    "derived": derived,
    "wrapped": lambda tower: setattr(tower, "forward", lambda *args: args),
    "attends_otherwise": lambda tower: setattr(tower.config, "_attn_implementation_internal", "somebodys_own"),
}


@EACH_TOWER
@pytest.mark.parametrize("change", ON_THE_TOWER)
def test_what_sits_on_the_tower_itself_is_refused(stock: Tower, change: str) -> None:
    """A copy of the tower would not have it, or hand it padding."""
    tower = stock.build(CPU)
    ON_THE_TOWER[change](tower)
    with pytest.raises(gp.errors.EncoderConfigError, match="there is no adapter for this"):
        adapter_for(tower, **stock.options)


def test_a_hook_that_reads_padding_is_refused() -> None:
    tower = QWEN3_VL.build(CPU)
    tower.blocks[0].mlp.register_forward_hook(lambda module, args, output: output + output.mean(0, keepdim=True))
    with pytest.raises(gp.errors.EncoderConfigError, match="results that differ"):
        adapter_for(tower, **QWEN3_VL.options)
