"""Models that nobody here wrote, graphed: eager, PIECEWISE and FULL agree at every size; the counts say what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode
from tests.e2e.hugging_face import CPU, CUDA, Place, difference, far_from_initial

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CAPTURE_SEED, REPLAY_SEED = 1, 2
"""A graph is captured with one content and replayed with another, so that a stale result is a wrong one."""
SDPA = "torch.nn.functional.scaled_dot_product_attention"
VOCABULARY, IMAGE_PIXELS = 97, 16
LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT = {**LAYER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


@dataclass(frozen=True, slots=True)
class Stock:
    """One model class of Hugging Face, its batches, and the sizes to run it at."""

    name: str  #: of the class, ``LlamaModel``; the config's is ``LlamaConfig``
    config: Mapping[str, Any]  #: what differs from the config's defaults
    ladder: Mapping[str, Sequence[int]]  #: capture sizes by key field
    #: real sizes below, on and between the capture sizes, in the order of the key fields; at least 2 each, because
    #: torch compiles size 1 apart
    sizes: Sequence[tuple[int, ...]]

    def build(self, place: Place, num_layers: int) -> torch.nn.Module:
        """The model with weights far from the initial ones, under which every token would attend to all alike."""
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, self.name.removesuffix("Model") + "Config")(
            **self.config, num_hidden_layers=num_layers, attn_implementation="sdpa"
        )
        model: torch.nn.Module = getattr(transformers, self.name)(config).eval()
        far_from_initial(model)
        return model.to(place.device, place.dtype)

    def batch(self, place: Place, size: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Seeded inputs of that size; text has masked tokens at the ends of its rows and one inside."""
        seeded = torch.Generator().manual_seed(seed)
        if len(size) == 1:
            shape = (size[0], 3, IMAGE_PIXELS, IMAGE_PIXELS)
            return {"pixel_values": torch.randn(shape, generator=seeded).to(place.device, place.dtype)}
        lengths = torch.tensor([size[1] - row % 3 for row in range(size[0])])
        mask = (torch.arange(size[1]) < lengths[:, None]).long()
        mask[0, 1] = 0
        ids = torch.randint(VOCABULARY, tuple(size), generator=seeded)
        return {"input_ids": ids.to(place.device), "attention_mask": mask.to(place.device)}


TEXT_LADDER = {"num_reqs": [3, 6], "seq_len": [8, 16]}
TEXT_SIZES = [(2, 5), (3, 8), (4, 11), (2, 16), (6, 7)]
LLAMA = Stock(
    "LlamaModel", {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}, TEXT_LADDER, TEXT_SIZES
)
BERT = Stock("BertModel", TEXT, TEXT_LADDER, TEXT_SIZES)
VIT = Stock(
    "ViTModel",
    {**LAYER, "image_size": IMAGE_PIXELS, "patch_size": 4},
    {"num_reqs": [3, 6]},
    [(2,), (3,), (5,), (6,)],
)


def agree(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], place: Place) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert difference(found[name], value) < place.tolerance, name


def check_counts(runtime: gp.GraphRuntime, num_layers: int, mode: CUDAGraphMode, calls: Mapping[Any, int]) -> None:
    """It is cut at each layer's attention and nowhere else; each key was captured once, and replayed by each call."""
    (record,) = runtime.callables()
    assert [region.kind for region in record.regions] == ["captured", "eager"] * num_layers + ["captured"]
    regions = [f"g0.r{2 * i}" for i in range(num_layers + 1)] if mode is PIECEWISE else ["g0.full"]
    found = {
        (region, sizes_of(key)): (c.warmed, c.captured, c.replayed) for (region, _, key), c in runtime.counts().items()
    }
    assert found == {(region, sizes_of(key)): (1, 1, 1 + times) for key, times in calls.items() for region in regions}


def sizes_of(key: BatchDescriptor) -> tuple[int, int | None]:
    """Tokens and sequence length: an engine's key of these sizes has other fields than a callable's own."""
    return key.num_tokens, dict(key.extra).get("seq_len")


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize(
    ("stock", "compiler", "place"),
    [
        (LLAMA, "eager", CPU),
        pytest.param(VIT, "eager", CPU, marks=pytest.mark.route("graphed")),
        pytest.param(LLAMA, "inductor", CUDA, marks=pytest.mark.cuda),
    ],
    ids=["llama", "vit", "llama on a GPU"],
)
def test_graphed_agrees_at_every_size(stock: Stock, compiler: str, place: Place, mode: CUDAGraphMode) -> None:
    """At the sizes of the table, and above the largest key, where it runs without a graph."""
    model = stock.build(place, 2)
    fast = graphed(stock, model, mode, compiler)
    above = (7, *stock.sizes[0][1:])
    fast.capture(**stock.batch(place, stock.sizes[0], CAPTURE_SEED))
    dispatcher = gp.CudagraphDispatcher(mode, stock.ladder, max_num_reqs=6, lazy=True)
    calls = Counter(dict.fromkeys(dispatcher.keys[mode], 0))
    for size in (*stock.sizes, above):
        batch = stock.batch(place, size, REPLAY_SEED)
        with torch.inference_mode():
            expected = model(**batch)
        agree(fast(**batch), expected, place)
        if size != above:
            extra = (("seq_len", size[1]),) if len(size) == 2 else ()
            calls[dispatcher.dispatch(num_reqs=size[0], extra=extra).descriptor] += 1
    check_counts(fast.runtime, 2, mode, calls)
    fast.close()


def graphed(
    stock: Stock, model: torch.nn.Module, mode: str | CUDAGraphMode, compiler: str, **options: Any
) -> gp.GraphedModel:
    names = stock.batch(CPU, stock.sizes[0])
    return gp.graphed(
        model,
        **{
            "capture_sizes": stock.ladder,
            "dynamic_dims": {name: dict(enumerate(stock.ladder)) for name in names},
            **options,
        },
        splitting_ops=[SDPA],
        mode=mode,
        compiler=compiler,
        padding=dict.fromkeys({"attention_mask"} & {*names}, 0),
        on_fallback="silent",
    )


def test_the_mask_shares_the_declared_dimensions() -> None:
    """Stock models gather the mask by row and column, so nothing in the graph says that it has the tokens' shape."""
    model = BERT.build(CPU, 1)
    fast = graphed(BERT, model, FULL, "eager", dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}})
    for size in ((1, 5), *BERT.sizes):
        batch = BERT.batch(CPU, size)
        with torch.inference_mode():
            expected = model(**batch)
        agree(fast(**batch), expected, CPU)
    fast.close()
