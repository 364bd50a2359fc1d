"""Finding an adapter, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.encoder.adapters import ClipAdapter, Qwen3VLAdapter, Qwen25VLAdapter, SiglipAdapter, adapter_for
from graphpass.encoder.protocol import EncoderGraphKey
from tests.e2e.hugging_face import CPU
from tests.e2e.towers import CLIP, QWEN2_5_VL, QWEN3_VL, SIGLIP, Tower

KINDS = [(QWEN2_5_VL, Qwen25VLAdapter), (QWEN3_VL, Qwen3VLAdapter), (SIGLIP, SiglipAdapter), (CLIP, ClipAdapter)]
GRID = torch.tensor([[1, 4, 4]])
CLIP_OF_16 = {"pixel_values_videos": torch.ones(16, 96), "video_grid_thw": GRID}


@pytest.mark.parametrize(("stock", "kind"), KINDS)
def test_by_class_name_and_base_class(stock: Tower, kind: type) -> None:
    tower = stock.build(CPU)
    assert type(adapter_for(tower)) is kind
    tower.__class__ = type("Derived", (type(tower),), {})
    adapter = adapter_for(tower)
    assert type(adapter) is kind
    assert adapter_for(adapter) is adapter


@pytest.mark.parametrize("tower", [torch.nn.Linear(2, 2), None, "qwen"])
def test_unknown_towers(tower: Any) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=r"SiglipVisionModel.*Add your tower"):
        adapter_for(tower)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"min_tokens": 0}, "0"),
        ({"min_tokens": 8, "max_tokens": 4}, "at least 8; found 4"),
        ({"max_items": True}, "True"),
        ({"max_items": 8, "max_frames": 7}, "at least 8; found 7"),
    ],
)
def test_options_of_grids(options: dict[str, Any], found: str) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=found):
        adapter_for(QWEN3_VL.build(CPU), **options)


@pytest.mark.parametrize(("options", "found"), [({"output": "all"}, "'all'"), ({"max_items": 0}, "0")])
def test_options_of_fixed_sizes(options: dict[str, Any], found: str) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=found):
        adapter_for(CLIP.build(CPU), **options)


def test_another_interpolation_is_refused() -> None:
    tower = QWEN3_VL.build(CPU)
    tower.interpolation_mode = "bicubic"
    with pytest.raises(gp.errors.EncoderConfigError, match="bicubic"):
        adapter_for(tower)


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ({"pixel_values": torch.ones(15, 96), "image_grid_thw": GRID}, "the grids say, 16; found 15 patches"),
        ({"pixel_values": torch.ones(12, 96), "image_grid_thw": torch.tensor([[1, 3, 4]])}, "multiples of 2"),
        ({"pixel_values": torch.ones(16, 96)}, "pixel_values"),
        ({}, "the keys"),
        ({"pixel_values": torch.ones(16, 96), **CLIP_OF_16}, "the keys.*'pixel_values', 'pixel_values_videos'"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": GRID, "grid_thw": GRID}, "the keys.*'grid_thw'"),
        ({"pixel_values": torch.ones(16, 95), "image_grid_thw": GRID}, r"\[patches, 96\]; found \(16, 95\)"),
        ({"pixel_values": torch.ones(16, 96).numpy(), "image_grid_thw": GRID}, "as a tensor.*found ndarray"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": [[1, -4, -4]]}, "none below 0"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": [[4, 4]]}, r"\[items, 3\]"),
        (
            {"pixel_values": torch.ones(16, 96), "image_grid_thw": [[1, 4, 4], [1, 4]]},
            r"found \[\[1, 4, 4\], \[1, 4\]\]",
        ),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": [[True, True, True]]}, "integers"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": torch.tensor([1, 4, 4])}, r"\[items, 3\]"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": torch.tensor([[1.0, 4.0, 4.0]])}, "integers"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": "1 4 4"}, "found '1 4 4'"),
    ],
)
def test_items_that_do_not_fit_their_grids(items: dict[str, Any], found: str) -> None:
    with pytest.raises(gp.errors.ShapeError, match=found):
        adapter_for(QWEN3_VL.build(CPU)).get_encoder_cudagraph_item_specs(items)


@pytest.mark.parametrize(
    "items", [{}, {"pixel_values": torch.ones(2, 3, 16, 8)}, {"pixel_values": torch.ones(3, 16, 16)}]
)
def test_images_of_another_size(items: dict[str, torch.Tensor]) -> None:
    with pytest.raises(gp.errors.ShapeError, match=r"'images', 3, 16, 16"):
        adapter_for(CLIP.build(CPU)).get_encoder_cudagraph_item_specs(items)


def test_a_budget_below_one_image() -> None:
    key = EncoderGraphKey(16, 16, 1)
    with pytest.raises(gp.errors.EncoderConfigError, match="at least 18 tokens"):
        adapter_for(CLIP.build(CPU)).prepare_encoder_cudagraph_capture_inputs(key, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("stock", [QWEN2_5_VL, QWEN3_VL])
@pytest.mark.parametrize("num_items", [None, 1, 7, 32])
@pytest.mark.parametrize("tokens", [64, 107, 131, 1000, 2304])
def test_examples_fill_the_tokens(stock: Tower, tokens: int, num_items: int | None) -> None:
    """In that number of images, or of a usual size."""
    adapter = adapter_for(stock.build(CPU))
    key = EncoderGraphKey(tokens, tokens * adapter.get_encoder_cudagraph_config().patches_per_token, 32, 32)
    items = adapter.get_encoder_example_items(key, torch.device("cpu"), torch.float32, num_items)
    specs = adapter.get_encoder_cudagraph_item_specs(items)
    assert len(specs) == (num_items or -(-tokens // 256))
    assert 0.95 * tokens <= sum(spec.output_tokens for spec in specs) <= tokens
    for _, height, width in items["grid_thw"].tolist():
        assert width <= 8 * height
