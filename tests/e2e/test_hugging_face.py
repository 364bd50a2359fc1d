"""Models that nobody here wrote: eager, NONE, PIECEWISE and FULL agree, and the counts say what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode
from tests.e2e.hugging_face import (
    CPU,
    CPU_BF16,
    CUDA,
    CUDA_F16,
    SDPA,
    STOCK,
    Place,
    Stock,
    cases,
    difference,
)

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CAPTURE_SEED, REPLAY_SEED = 1, 2
"""A graph is captured with one content and replayed with another, so that a stale result is a wrong one."""


def table(*rows: tuple[Sequence[str], str, Place]) -> list[Any]:
    """Every model with every compiler and dtype here, and with Inductor on a GPU.

    What is in ``rows`` (models, compiler, place) runs by default; the rest takes minutes together: it is the soak's.
    """
    default = {(name, compiler, place) for names, compiler, place in rows for name in names}
    found = cases(default, STOCK, ("eager", "aot_eager", "inductor"), (CPU, CPU_BF16))
    return found + [
        case
        for name, stock in STOCK.items()
        for case in cases((), [name], ["inductor"], [CUDA_F16 if stock.depth else CUDA])
    ]


def depth(stock: Stock, compiler: str, place: Place) -> int:
    """Layers of the model: on a CPU, a compiler takes seconds for each of them."""
    if stock.depth or place is CUDA:
        return stock.depth or 3
    return 2 if (compiler, place) == ("eager", CPU) else 1


def agree(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], place: Place) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert difference(found[name], value) < place.tolerance, name


def descriptor(dispatcher: gp.CudagraphDispatcher, size: Sequence[int]) -> BatchDescriptor:
    """The key whose graph serves a batch of that size."""
    extra = (("seq_len", size[1]),) if len(size) == 2 else ()
    return dispatcher.dispatch(num_reqs=size[0], extra=extra).descriptor


def assert_split_at_attention(runtime: gp.GraphRuntime, num_layers: int) -> None:
    """Every callable is cut at each layer's attention, and nowhere else."""
    for record in runtime.callables():
        kinds = [region.kind for region in record.regions]
        assert kinds == ["captured", "eager"] * num_layers + ["captured"], record.name


def assert_counts(
    runtime: gp.GraphRuntime, name: str, num_layers: int, calls: Mapping[tuple[CUDAGraphMode, Any], int]
) -> None:
    """Each key of callable ``name`` was captured once, and replayed by the capturing call and by each later one."""
    regions = {PIECEWISE: {f"{name}.r{2 * i}" for i in range(num_layers + 1)}, FULL: {f"{name}.full"}}
    found = {
        (region, mode, sizes_of(key)): (c.captured, c.replayed)
        for (region, mode, key), c in runtime.counts().items()
        if region.startswith(f"{name}.")
    }
    assert found == {
        (region, mode, sizes_of(key)): (1, 1 + times)
        for (mode, key), times in calls.items()
        for region in regions[mode]
    }


def sizes_of(key: BatchDescriptor) -> tuple[int, int | None]:
    """Tokens and sequence length: an engine's key of these sizes has other fields than a callable's own."""
    return key.num_tokens, dict(key.extra).get("seq_len")


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize(("name", "compiler", "place"), table((("llama", "minilm"), "eager", CPU)))
def test_graphed_agrees_at_every_size(name: str, compiler: str, place: Place, mode: CUDAGraphMode) -> None:
    """At the sizes of the table, and above the largest key, where it runs without a graph."""
    stock = STOCK[name]
    num_layers = depth(stock, compiler, place)
    model = stock.build(place, num_layers)
    fast = graphed(stock, model, mode, compiler)
    above = (7, *stock.sizes[0][1:])
    fast.capture(**stock.batch(place, stock.sizes[0], CAPTURE_SEED))
    dispatcher = gp.CudagraphDispatcher(mode, stock.ladder, max_num_reqs=6, lazy=True)
    calls = Counter({(mode, key): 0 for key in dispatcher.keys[mode]})
    for size in (*stock.sizes, above):
        batch = stock.batch(place, size, REPLAY_SEED)
        with torch.inference_mode():
            expected = model(**batch)
        agree(fast(**batch), expected, place)
        if size != above:
            calls[mode, descriptor(dispatcher, size)] += 1
    assert_split_at_attention(fast.runtime, num_layers)
    assert_counts(fast.runtime, "g0", num_layers, calls)
    assert {counts.warmed for counts in fast.runtime.counts().values()} == {1}
    fast.close()


@pytest.mark.route("graphed")
def test_graphed_agrees() -> None:
    test_graphed_agrees_at_every_size("vit", "eager", CPU, FULL)


def graphed(
    stock: Stock, model: torch.nn.Module, mode: str | CUDAGraphMode, compiler: str, **options: Any
) -> gp.GraphedModel:
    return gp.graphed(
        model,
        **{"capture_sizes": stock.ladder, "dynamic_dims": stock.dynamic_dims, **options},
        splitting_ops=[SDPA],
        mode=mode,
        compiler=compiler,
        padding=dict.fromkeys({"attention_mask"} & {*stock.inputs}, 0),
        on_fallback="silent",
    )


def test_the_mask_shares_the_declared_dimensions() -> None:
    """Stock models gather the mask by row and column, so nothing in the graph says that it has the tokens' shape."""
    stock = STOCK["bert"]
    model = stock.build(CPU, 1)
    fast = graphed(stock, model, FULL, "eager", dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}})
    for size in ((1, 5), *stock.sizes):
        batch = stock.batch(CPU, size)
        with torch.inference_mode():
            expected = model(**batch)
        agree(fast(**batch), expected, CPU)
    fast.close()
