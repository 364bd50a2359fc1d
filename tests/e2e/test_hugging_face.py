"""Models that nobody here wrote, graphed: eager, PIECEWISE and FULL agree at every size; the counts say what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode
from tests.e2e.hugging_face import CPU, Place, difference, far_from_initial
from tests.e2e.stock_encoders import ENCODERS

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CAPTURE_SEED, REPLAY_SEED = 1, 2
"""A graph is captured with one content and replayed with another, so that a stale result is a wrong one."""
GPU32 = Place("cuda", torch.float32, 1e-4)
"""In 16 bits cuDNN's attention adds -65504 where a mask is False: cut there, lengths are not padded."""
SDPA = "torch.nn.functional.scaled_dot_product_attention"
NUM_LAYERS = 2
LADDERS = {"BertModel": {"num_reqs": [3, 6], "seq_len": [8, 16]}, "ViTModel": {"num_reqs": [3, 6]}}
SIZES: dict[str, list[tuple[int, ...]]] = {
    "BertModel": [(2, 5), (3, 8), (4, 11), (2, 16), (6, 7)],
    "ViTModel": [(2,), (3,), (5,), (6,)],
}
"""Below, on and between the capture sizes; at least 2 each, because torch compiles size 1 apart."""


def built(name: str, place: Place) -> torch.nn.Module:
    """The model with weights far from the initial ones, under which every token would attend to all alike."""
    pytest.importorskip("transformers")
    model: torch.nn.Module = ENCODERS[name].build()
    far_from_initial(model)
    return model.to(place.device, place.dtype)


def batch(name: str, place: Place, size: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    given = ENCODERS[name].inputs(size[0], size[-1])
    return {n: t.to(place.device, place.dtype if t.is_floating_point() else t.dtype) for n, t in given.items()}


def agree(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], place: Place) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert difference(found[name], value) < place.tolerance, name


def check_counts(runtime: gp.GraphRuntime, mode: CUDAGraphMode, calls: Mapping[Any, int]) -> None:
    """It is cut at each layer's attention and nowhere else; each key was captured once, and replayed by each call."""
    (record,) = runtime.callables()
    assert [region.kind for region in record.regions] == ["captured", "eager"] * NUM_LAYERS + ["captured"]
    regions = [f"g0.r{2 * i}" for i in range(NUM_LAYERS + 1)] if mode is PIECEWISE else ["g0.full"]
    found = {
        (region, sizes_of(key)): (c.warmed, c.captured, c.replayed) for (region, _, key), c in runtime.counts().items()
    }
    expected = {(region, sizes_of(key)): (1, 1, 1 + times) for key, times in calls.items() for region in regions}
    assert found == expected, runtime.report()


def sizes_of(key: BatchDescriptor) -> tuple[int, int | None]:
    """Tokens and sequence length: an engine's key of these sizes has other fields than a callable's own."""
    return key.num_tokens, dict(key.extra).get("seq_len")


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize(
    ("name", "compiler", "place"),
    [
        ("BertModel", "eager", CPU),
        pytest.param("ViTModel", "eager", CPU, marks=pytest.mark.route("graphed")),
        pytest.param("BertModel", "inductor", GPU32, marks=pytest.mark.cuda),
    ],
    ids=["bert", "vit", "bert on a GPU"],
)
def test_graphed_agrees_at_every_size(name: str, compiler: str, place: Place, mode: CUDAGraphMode) -> None:
    """At the sizes of the table, and above the largest key, where it runs without a graph."""
    model, sizes = built(name, place), SIZES[name]
    fast = graphed(name, model, mode, compiler)
    above = (7, *sizes[0][1:])
    fast.capture(**batch(name, place, sizes[0], CAPTURE_SEED))
    dispatcher = gp.CudagraphDispatcher(mode, LADDERS[name], max_num_reqs=6, lazy=True)
    calls = Counter(dict.fromkeys(dispatcher.keys[mode], 0))
    for size in (*sizes, above):
        given = batch(name, place, size, REPLAY_SEED)
        with torch.inference_mode():
            expected = model(**given)
        agree(fast(**given), expected, place)
        if size != above:
            extra = (("seq_len", size[1]),) if len(size) == 2 else ()
            calls[dispatcher.dispatch(num_reqs=size[0], extra=extra).descriptor] += 1
    check_counts(fast.runtime, mode, calls)
    fast.close()


def graphed(name: str, model: torch.nn.Module, mode: CUDAGraphMode, compiler: str, **options: Any) -> gp.GraphedModel:
    names, ladder = batch(name, CPU, SIZES[name][0]), LADDERS[name]
    dims = {"dynamic_dims": {of: dict(enumerate(ladder)) for of in names}, "capture_sizes": ladder}
    padding = dict.fromkeys({"attention_mask"} & {*names}, 0)
    given = {**dims, "splitting_ops": [SDPA], "padding": padding, "on_fallback": "silent", **options}
    return gp.graphed(model, mode=mode, compiler=compiler, **given)


def test_the_mask_shares_the_declared_dimensions() -> None:
    """Stock models gather the mask by row and column, so nothing in the graph says that it has the tokens' shape."""
    name = "BertModel"
    model = built(name, CPU)
    fast = graphed(name, model, FULL, "eager", dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}})
    for size in ((1, 5), *SIZES[name]):
        given = batch(name, CPU, size)
        with torch.inference_mode():
            expected = model(**given)
        agree(fast(**given), expected, CPU)
    fast.close()
