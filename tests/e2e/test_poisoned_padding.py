"""What padding holds is nobody's business: one captured key gives real rows the same bits over zeros, noise and NaN.

Stock models under ``graphed``, at every size of a ladder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import CUDAGraphMode
from tests.e2e.hugging_face import (
    CPU,
    CPU_BF16,
    CUDA,
    CUDA_F32,
    SDPA,
    STOCK,
    VOCABULARY,
    Place,
    Stock,
    cases,
    difference,
)
from tests.e2e.padding_contents import FLOAT_KINDS, INTEGER_KINDS, Contents

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

TEXT_LADDER = {"num_reqs": [2, 4], "seq_len": [4, 8]}
ROW_LADDER = {"num_reqs": [2, 4]}
# Size 1 is a graph of its own.
TEXT_SIZES = tuple(itertools.product(range(2, 5), range(2, 9)))
ROW_SIZES = tuple((num_reqs,) for num_reqs in range(2, 5))


def small(name: str, *inputs: str, **config: Any) -> Stock:
    """A stock model that takes these inputs, with every size of a small ladder."""
    ladder, sizes = (ROW_LADDER, ROW_SIZES) if inputs == ("pixel_values",) else (TEXT_LADDER, TEXT_SIZES)
    stock = STOCK[name]
    return replace(stock, inputs=inputs, ladder=ladder, sizes=sizes, config={**stock.config, **config})


MODELS = {
    "llama-ids": small("llama", "input_ids", "attention_mask"),
    "llama-embeds": small("llama", "inputs_embeds", "attention_mask"),
    # More heads than tokens: torch 2.15 asks whether transposed keys have the shape that they had before, so a length
    # that is equal to the number of heads has a separate graph.
    "bert-ids": small("bert", "input_ids", "attention_mask", num_attention_heads=16),
    "bert-embeds": small("bert", "inputs_embeds", "attention_mask", num_attention_heads=16),
    "siglip": small("siglip_vision", "pixel_values"),
}
EMBEDS = ("llama-embeds", "bert-embeds")


def batch_of(stock: Stock, place: Place, size: Sequence[int]) -> dict[str, torch.Tensor]:
    """Seeded inputs of that size. Text has masked tokens at the ends of its rows and one inside; none is all masked."""
    if "pixel_values" in stock.inputs:
        return stock.batch(place, size)
    num_reqs, seq_len = size
    seeded = torch.Generator().manual_seed(100 * num_reqs + seq_len)
    lengths = torch.tensor([max(1, seq_len - row % 3) for row in range(num_reqs)])
    mask = (torch.arange(seq_len) < lengths[:, None]).long()
    mask[0, 1:2] = 0
    if "inputs_embeds" in stock.inputs:
        embeds = torch.randn(num_reqs, seq_len, stock.config["hidden_size"], generator=seeded)
        tokens = {"inputs_embeds": embeds.to(place.device, place.dtype)}
    else:
        tokens = {"input_ids": torch.randint(VOCABULARY, (num_reqs, seq_len), generator=seeded).to(place.device)}
    return {**tokens, "attention_mask": mask.to(place.device)}


@pytest.fixture
def zeroing_attention() -> str:
    """Hugging Face's attention over keys and values whose padding is zeroed: the name that a config asks for it by."""
    pytest.importorskip("transformers")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        # They come as [requests, heads, tokens, features]; padding is by request and token.
        key, value = (gp.zero_padding(t.transpose(1, 2), 2).transpose(1, 2) for t in (key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    name = "graphpass_test_sdpa"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def graphed(
    stock: Stock, model: nn.Module, mode: CUDAGraphMode, compiler: str, padding: Mapping[str, Any], **options: Any
) -> gp.GraphedModel:
    return gp.graphed(
        model,
        stock.ladder,
        stock.dynamic_dims,
        padding=padding,
        mode=mode,
        compiler=compiler,
        splitting_ops=[SDPA],
        **{"on_fallback": "error", **options},
    )


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), (name, where)


def stock_cases(*default: tuple[str, CUDAGraphMode, str, Place]) -> list[Any]:
    """Every model in both modes with every compiler and dtype; ``default`` runs in every test run, the rest is soak."""
    here = cases(default, MODELS, (FULL, PIECEWISE), ("aot_eager", "inductor"), (CPU, CPU_BF16))
    there = cases((), MODELS, (FULL, PIECEWISE), ("aot_eager",), (CUDA, CUDA_F32))
    return [*here, *there, *cases((), MODELS, (FULL, PIECEWISE), ("inductor",), (CUDA,))]


@pytest.mark.parametrize(
    ("name", "mode", "compiler", "place"),
    stock_cases(
        ("llama-ids", PIECEWISE, "aot_eager", CPU),
        ("bert-embeds", FULL, "aot_eager", CPU),
        ("siglip", FULL, "aot_eager", CPU_BF16),
    ),
)
def test_real_rows_have_the_same_bits_whatever_padding_holds(
    name: str, mode: CUDAGraphMode, compiler: str, place: Place, zeroing_attention: str
) -> None:
    """At every size; captured with the worst of padding, and right by the stock model without padding or graph."""
    stock = MODELS[name]
    contents = Contents(INTEGER_KINDS if "input_ids" in stock.inputs else FLOAT_KINDS)
    poisoned, *masks = stock.inputs
    # SigLIP's rows do not mix, so it keeps the attention it comes with.
    model = stock.build(place, 1, "sdpa" if name == "siglip" else zeroing_attention)
    reference = stock.build(place, 1)
    fast = graphed(stock, model, mode, compiler, {poisoned: contents, **dict.fromkeys(masks, 0)})
    fast.capture(**batch_of(stock, place, stock.sizes[-1]))
    captured = fast.runtime.stats().captured
    for size in stock.sizes:
        batch = batch_of(stock, place, size)
        with torch.inference_mode():
            expected = reference(**batch)
        first: Mapping[str, torch.Tensor] = {}
        for kind in contents.kinds:
            contents.kind = kind
            filled, replayed = contents.filled[kind], fast.runtime.stats().replayed
            found = fast(**batch)
            assert fast.runtime.stats().replayed > replayed
            is_padded = any(n not in ladder for n, ladder in zip(size, stock.ladder.values(), strict=True))
            assert (contents.filled[kind] > filled) >= is_padded
            first = first or found
            assert_same_bits(found, first, (size, kind))
        for output, value in expected.items():
            assert difference(first[output], value) < place.tolerance, (output, size)
    assert fast.runtime.stats().captured == captured
    assert fast.runtime.stats().callables == 1
    fast.close()


@pytest.mark.parametrize(
    ("name", "mode", "place"), cases([("llama-embeds", PIECEWISE, CPU)], EMBEDS, (FULL, PIECEWISE), (CPU, CUDA))
)
def test_a_mask_alone_does_not_hold_nan_back(
    name: str, mode: CUDAGraphMode, place: Place, zeroing_attention: str
) -> None:
    """NaN times a weight of zero is NaN: zeroed keys and values keep it out of real rows, at every size."""
    stock = MODELS[name]
    padding = {"inputs_embeds": float("nan"), "attention_mask": 0}
    fast = graphed(stock, stock.build(place, 1, zeroing_attention), mode, "eager", padding)
    fast.capture(**batch_of(stock, place, (4, 8)))
    reference = stock.build(place, 1)
    for size in stock.sizes:
        batch = batch_of(stock, place, size)
        with torch.inference_mode():
            expected = reference(**batch)
        found = fast(**batch)
        for output, value in expected.items():
            assert difference(found[output], value) < place.tolerance, (output, size)
    fast.close()
