"""Stock vision towers over whole-encoder graphs: each image gets what the untouched tower returns for it alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics

import graphpass as gp
from graphpass.encoder.adapters import adapter_for
from graphpass.encoder.costs import PackingCosts
from graphpass.encoder.manager import EncoderCudaGraphManager
from graphpass.encoder.options import EncoderOptions
from graphpass.encoder.protocol import EncoderGraphKey, EncoderOutput
from graphpass.errors import OptionError
from tests.e2e.hugging_face import CPU, difference
from tests.e2e.towers import CLIP, EACH_TOWER, QWEN2_5_VL, QWEN3_VL, SIGLIP, TOWERS, Grid, Result, Tower

GRID_BUDGETS = (8, 20, 64, 128)
A_TOWER_OF_EACH_KIND = pytest.mark.parametrize(
    "stock", [pytest.param(t, marks=() if t in (QWEN3_VL, CLIP) else pytest.mark.soak) for t in TOWERS], ids=str
)
SETS = [pytest.param(range(10), id="10-sets"), pytest.param(range(10, 200), id="190-sets", marks=pytest.mark.soak)]


def results_of(outputs: Sequence[EncoderOutput]) -> list[Result]:
    """Always as tuples."""
    return [flat(output) for output in outputs]


def flat(output: EncoderOutput) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else output


def run_eagerly(adapter: Any, items: Mapping[str, torch.Tensor]) -> Sequence[EncoderOutput]:
    """The adapter's eager call, item by item."""
    outputs = flat(adapter.encoder_eager_forward(items))
    results: Sequence[EncoderOutput] = adapter.postprocess_encoder_output(
        outputs, adapter.get_encoder_cudagraph_item_specs(items)
    )
    return results


def assert_same(found: Sequence[EncoderOutput], expected: Sequence[Result], tolerance: float = CPU.tolerance) -> None:
    """Relative norm, result by result and output by output."""
    for one, other in zip(results_of(found), expected, strict=True):
        assert len(one) == len(other)
        for mine, stock in zip(one, other, strict=True):
            assert difference(mine, stock) < tolerance


def poison(padding: torch.Tensor) -> torch.Tensor:
    """NaN, or another valid index than zero."""
    return torch.full_like(padding, math.nan if padding.is_floating_point() else 1)


def filled_keys(adapter: Any) -> set[str]:
    """Buffers with a row for each patch, whose padding may hold anything."""
    tables = getattr(adapter, "_tables", None)
    return (
        {"pixel_values", *(name for name, table in tables.kinds.items() if table.kind == "rows")}
        if tables
        else {"pixel_values"}
    )


def poisoned(stock: Tower, tower: Any) -> Any:
    """The tower's adapter, with poison behind the rows of each batch, but for buffers that say which rows those are."""
    adapter: Any = adapter_for(tower, **stock.options)
    fill, prepare = adapter.prepare_encoder_cudagraph_capture_inputs, adapter.prepare_encoder_cudagraph_replay_buffers

    def prepared(items: Any, key: EncoderGraphKey) -> dict[str, torch.Tensor]:
        values, full = dict(prepare(items, key)), fill(key, torch.device("cpu"), torch.float32)
        for name, rows in dict.fromkeys(filled_keys(adapter), len(values["pixel_values"])).items():
            values[name] = torch.cat([values[name][:rows], poison(full[name][rows:])])
        return values

    adapter.prepare_encoder_cudagraph_replay_buffers = prepared
    return adapter


def captured(model: Any, **options: Any) -> EncoderCudaGraphManager:
    most_items = None if "token_budgets" in options else 6
    given = {"compile": False, "costs": None, "max_items_per_batch": most_items, **options}
    manager = EncoderCudaGraphManager(model, options=EncoderOptions(**given), device="cpu", dtype=torch.float32)
    manager.capture()
    return manager


def budgets_of(stock: Tower, adapter: Any) -> tuple[int, ...]:
    """A few, for fixed sizes in images and one off their multiples."""
    if stock.has_grids:
        return GRID_BUDGETS
    rows = adapter.get_encoder_cudagraph_budget_range()[0]
    return (rows, 2 * rows, 3 * rows + 1, 6 * rows)


@dataclass(frozen=True, slots=True)
class Packed:
    """A tower, its poisoned managers by how they pack, and their budgets."""

    stock: Tower
    tower: Any
    managers: Mapping[str, EncoderCudaGraphManager]
    budgets: tuple[int, ...]


@pytest.fixture(params=TOWERS, ids=str)
def packed(request: pytest.FixtureRequest) -> Iterator[Packed]:
    """Greedy; merging, since a replay costs more than its tokens; few merged; in one budget; the eager call cheaper."""
    stock = request.param
    tower = stock.build(CPU)
    adapter = poisoned(stock, tower)
    budgets = budgets_of(stock, adapter)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "merging": {"costs": PackingCosts({b: 100.0 + b for b in budgets}, lambda tokens: 1e6)},
        "apart": {"costs": PackingCosts({b: float(b * b) for b in budgets}, lambda tokens: 1e6)},
        "one budget": {"token_budgets": budgets[-1:]},
        "cheaper eagerly": {"costs": PackingCosts({b: float(b) for b in budgets}, lambda tokens: 0.9 * tokens)},
    }
    managers = {
        name: captured(adapter, **{"token_budgets": budgets, "max_items_per_batch": min(6, budgets[0]), **given})
        for name, given in ways.items()
    }
    yield Packed(stock, tower, managers, budgets)
    for manager in managers.values():
        manager.clear()


@pytest.mark.parametrize("seeds", SETS)
def test_random_sets_packed_in_every_way(packed: Packed, seeds: range) -> None:
    """The same images through all ways of packing, one after the other, so that buffers hold others' rows too."""
    num_items = 0
    for seed in seeds:
        sizes = packed.stock.random_sizes(random.Random(seed))
        items = packed.stock.items(packed.tower, sizes, seed)
        expected = packed.stock.stock(packed.tower, items)
        num_items += len(sizes)
        for manager in packed.managers.values():
            assert_same(manager.execute(items), expected)
    stats = {name: manager.get_cumulative_stats() for name, manager in packed.managers.items()}
    for each in stats.values():
        assert each.hits + each.misses == num_items
        assert each.requests == len(seeds)
    assert stats["merging"].replays < stats["apart"].replays
    assert min(stats[name].replays for name in ("greedy", "merging", "apart", "one budget")) > 0
    assert stats["cheaper eagerly"].misses > stats["greedy"].misses
    used = {traffic.captured.descriptor.num_tokens for traffic in stats["greedy"].budgets if traffic.replays}
    assert len(used) > 1


@pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.soak)])
@A_TOWER_OF_EACH_KIND
def test_the_block_is_compiled_once(stock: Tower, compiler: str) -> None:
    """For all layers, all budgets, one image and many, in graphs and eagerly."""
    tower = stock.build(CPU)
    adapter = adapter_for(tower, **stock.options)
    manager = captured(adapter, token_budgets=budgets_of(stock, adapter), compile=True, compiler=compiler)
    for number, sizes in enumerate([[(1, 2, 2)], [(1, 4, 4), (2, 6, 2)], [(1, 14, 14), (3, 16, 16)], [(1, 2, 4)] * 9]):
        items = stock.items(tower, sizes, number)
        assert_same(manager.execute(items), stock.stock(tower, items))
        assert_same(run_eagerly(adapter, items), stock.stock(tower, items))
    assert manager.runtime.compiled() == (1 if stock.has_grids else 2), "a batch of one image has its own code"
    assert len(manager.runtime.callables()) == manager.runtime.compiled()
    assert manager.get_cumulative_stats().hits > 0


@A_TOWER_OF_EACH_KIND
def test_graphs_are_captured_from_the_compiled_block(stock: Tower) -> None:
    """And eager calls run it, after the capture too: the block's own Python runs no more once it is compiled."""
    tower, by_python = stock.build(CPU), []

    def seen(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            by_python.append("block")

    for layer in tower.blocks if stock.has_grids else tower.encoder.layers:
        layer.mlp.register_forward_pre_hook(seen)
    adapter = adapter_for(tower, **stock.options)
    by_python.clear()
    adapter.compile_encoder("aot_eager", gp.GraphRuntime())  # type: ignore[attr-defined]
    items = stock.items(tower, [(1, 4, 4), (2, 6, 2)])
    run_eagerly(adapter, items)
    assert by_python == []
    captured(adapter, token_budgets=budgets_of(stock, adapter)[-1:])
    assert by_python == []
    run_eagerly(adapter, items)
    assert by_python == []


def test_the_first_call_compiles_once() -> None:
    """Floats of the block (the scale of its scores) would be symbols, end as constants, and have all compiled again."""
    adapter = adapter_for(QWEN3_VL.build(CPU), **QWEN3_VL.options)
    compilation_time_metrics.clear()
    adapter.compile_encoder("aot_eager", gp.GraphRuntime())
    assert {name for name in compilation_time_metrics if "attempt" in name} == {"compile_attempt_0"}


@EACH_TOWER
def test_the_tower_stays_as_it_is(stock: Tower) -> None:
    """Its own forward does what it did, and weights that are loaded later, or are other tensors, reach the graphs."""
    tower = stock.build(CPU)
    items = stock.items(tower, [(1, 4, 6), (1, 2, 2)])
    before = stock.stock(tower, items)
    attention = tower.config._attn_implementation
    adapter = adapter_for(tower, **stock.options)
    manager = captured(adapter, token_budgets=budgets_of(stock, adapter)[-1:])
    manager.execute(items)
    assert tower.config._attn_implementation == attention
    for one, other in zip(before, stock.stock(tower, items), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for assign in (False, True, True):
        state = {name: value * 1.1 for name, value in tower.state_dict().items()}
        tower.load_state_dict(state, assign=assign)
        after = stock.stock(tower, items)
        assert difference(after[0][0], before[0][0]) > 1e-3
        assert_same(manager.execute(items), after)
        assert_same(run_eagerly(adapter, items), after)
        before = after


@pytest.mark.parametrize("stock", [SIGLIP, CLIP], ids=str)
@pytest.mark.parametrize("output", ["last_hidden_state", "pooler_output", "both"])
def test_what_an_image_returns(stock: Tower, output: str) -> None:
    tower = stock.build(CPU)
    adapter = adapter_for(tower, output=output)
    rows = {"last_hidden_state": tower.embeddings.num_positions, "pooler_output": 1}
    each = rows.get(output, sum(rows.values()))
    manager = captured(adapter, token_budgets=(each, 4 * each), max_items_per_batch=1 if each == 1 else 4)
    items = stock.items(tower, [(1, 1, 1)] * 5)
    expected = [(last, pooled) for last, pooled in stock.stock(tower, items)]
    chosen = {"last_hidden_state": slice(0, 1), "pooler_output": slice(1, 2), "both": slice(0, 2)}[output]
    assert_same(manager.execute(items), [pair[chosen] for pair in expected])
    assert manager.get_cumulative_stats().misses == 0


def test_a_tower_without_a_head_returns_hidden_states() -> None:
    tower = SIGLIP.build(CPU, vision_use_head=False)
    items = SIGLIP.items(tower, [(1, 1, 1)] * 2)
    adapter = adapter_for(tower)
    assert_same(run_eagerly(adapter, items), SIGLIP.stock(tower, items))
    with pytest.raises(gp.errors.EncoderConfigError, match="'last_hidden_state'"):
        adapter_for(tower, output="pooler_output")


@pytest.mark.parametrize("stock", [QWEN2_5_VL, QWEN3_VL], ids=str)
@pytest.mark.parametrize(
    "sizes", [[(1, 0, 4)], [(1, 0, 4), (2, 4, 0), (1, 4, 4), (0, 2, 2)]], ids=["alone", "among others"]
)
def test_images_without_patches(stock: Tower, sizes: list[Grid]) -> None:
    """They have results without rows."""
    tower = stock.build(CPU)
    adapter = poisoned(stock, tower)
    items = {**stock.items(tower, [(1, 4, 4)] if len(sizes) > 1 else []), "image_grid_thw": torch.tensor(sizes)}
    for manager in (captured(adapter, token_budgets=(8, 20)), captured(adapter, token_budgets=(8, 20), enable=False)):
        results = results_of(manager.execute(items))
        assert [len(result[0]) for result in results] == [math.prod(size) // 4 for size in sizes]
    (full,) = stock.stock(tower, stock.items(tower, [(1, 4, 4)]))
    assert_same([result for result in results if len(result[0])], [full] * (len(sizes) > 1))


def test_dropout_within_packed_attention_is_refused() -> None:
    tower = QWEN3_VL.build(CPU)
    for block in tower.blocks:
        block.attn.attention_dropout = 0.5
    manager = captured(adapter_for(tower, **QWEN3_VL.options))
    items = QWEN3_VL.items(tower, [(1, 4, 4)])
    tower.train()
    with pytest.raises(OptionError, match=r"found dropout; .*call model\.eval\(\)"):
        manager.execute(items)
    tower.eval()
    assert_same(manager.execute(items), QWEN3_VL.stock(tower, items))
