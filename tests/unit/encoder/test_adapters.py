"""Adapters: finding one, what is refused, their tables, convolutions over whole patches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphpass as gp
from graphpass.encoder.adapters import ClipAdapter, Qwen3VLAdapter, Qwen25VLAdapter, SiglipAdapter, adapter_for
from graphpass.encoder.adapters.gridtables import (
    BatchTables,
    Frame,
    Tables,
    interpolation,
    piece_keys,
    position_ids,
    windows,
)
from graphpass.encoder.adapters.qwen import Grid, GridItems
from graphpass.encoder.adapters.tower import WholePatches
from graphpass.encoder.attention import pieces_of
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
    ("stock", "options", "found"),
    [
        (QWEN3_VL, {"min_tokens": 0}, "0"),
        (QWEN3_VL, {"min_tokens": 8, "max_tokens": 4}, "at least 8; found 4"),
        (QWEN3_VL, {"max_items": True}, "True"),
        (QWEN3_VL, {"max_items": 8, "max_frames": 7}, "at least 8; found 7"),
        (CLIP, {"output": "all"}, "'all'"),
        (CLIP, {"max_items": 0}, "0"),
    ],
)
def test_options_that_cannot_be(stock: Tower, options: dict[str, Any], found: str) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=found):
        adapter_for(stock.build(CPU), **options)


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


# What adapters of grids read from a request, and the tables of frames and of batches.


MERGE, WIDTH = 2, 3
GRIDS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 2, 4]), st.sampled_from([2, 6])), max_size=5)


def numbered(grids: list[Grid], first: int = 0) -> torch.Tensor:
    """Patches that say which ones they are."""
    count = sum(map(math.prod, grids))
    return torch.arange(first, first + count).view(-1, 1).expand(count, WIDTH).contiguous()


def read(images: list[Grid], clips: list[Grid] | None = None) -> GridItems:
    items = {"pixel_values": numbered(images), "image_grid_thw": torch.tensor(images).view(-1, 3)}
    if clips is not None:
        items["pixel_values_videos"] = numbered(clips, len(items["pixel_values"]))
        items["video_grid_thw"] = torch.tensor(clips).view(-1, 3)
    return GridItems.of(items, MERGE, WIDTH)


@given(GRIDS, st.none() | GRIDS, st.data())
def test_selected_items_are_those_of_the_request(images: list[Grid], clips: list[Grid] | None, data: Any) -> None:
    found = read(images, clips)
    grids = [*images, *(clips or [])]
    assert found.grids == grids
    indices = data.draw(st.lists(st.integers(0, len(grids) - 1), max_size=8) if grids else st.just([]))
    bounds = list(itertools.pairwise(itertools.accumulate(map(math.prod, grids), initial=0)))
    expected = [number for index in indices for number in range(*bounds[index])]
    chosen = found.selected(indices)
    assert chosen["pixel_values"].shape == (len(expected), WIDTH)
    assert chosen["pixel_values"][:, 0].tolist() == expected
    assert list(map(tuple, chosen["grid_thw"].tolist())) == [grids[index] for index in indices]


@pytest.mark.parametrize(
    ("indices", "is_copied"), [([1, 2, 3], False), ([2], False), ([0, 1, 2, 3], False), ([0, 2], True), ([1, 0], True)]
)
def test_neighbours_are_not_copied(indices: list[int], is_copied: bool) -> None:
    found = read([(1, 2, 2), (1, 2, 4), (2, 2, 2), (1, 4, 4)])
    storage = found.patches().untyped_storage().data_ptr()
    assert (found.selected(indices)["pixel_values"].untyped_storage().data_ptr() != storage) == is_copied


@pytest.mark.parametrize(
    "as_given",
    [list, tuple, np.array, torch.tensor, lambda grids: torch.tensor(grids, dtype=torch.int32)],
    ids=["list", "tuple", "array", "tensor", "int32"],
)
def test_grids_in_any_form(as_given: Any) -> None:
    grids = [(1, 2, 4), (2, 2, 2)]
    found = GridItems.of({"pixel_values": numbered(grids), "grid_thw": as_given(grids)}, MERGE, WIDTH)
    assert found.grids == grids
    assert found.selected([1])["grid_thw"].dtype == torch.int64


SIDES = (2, 4, 6, 8, 10, 16, 34)
FRAME_SIZES = list(itertools.product(SIDES, SIDES))


def vision_utils() -> object:
    return pytest.importorskip("transformers.vision_utils")


def grid_of(height: int, width: int) -> torch.Tensor:
    return torch.tensor([[1, height, width]])


@pytest.mark.parametrize("merge", [1, 2])
def test_position_ids(merge: int) -> None:
    for height, width in FRAME_SIZES:
        expected = vision_utils().get_vision_position_ids(grid_of(height, width), merge)
        assert np.array_equal(position_ids(height, width, merge), expected.numpy())


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("side", [1, 5, 48])
def test_interpolation_bit_for_bit(side: int, align_corners: bool) -> None:
    for height, width in FRAME_SIZES:
        found = interpolation(height, width, 2, side, align_corners=align_corners)
        expected = vision_utils().get_vision_interpolation_indices_and_weights(
            grid_of(height, width), side, align_corners=align_corners, spatial_merge_size=2
        )
        assert all(np.array_equal(mine, theirs.numpy()) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens_a_side", [1, 3, 4])
def test_windows(tokens_a_side: int) -> None:
    """And never more of them than graphs allow for."""
    for height, width in FRAME_SIZES:
        order, tokens = windows(height, width, 2, tokens_a_side)
        expected, ends = vision_utils().get_vision_window_index(grid_of(height, width), 2, tokens_a_side * 2 * 14, 14)
        assert np.array_equal(order, expected.numpy())
        assert np.array_equal(np.cumsum(tokens) * 4, ends.numpy()[1:])
        assert len(tokens) <= height * width // 4 // tokens_a_side + 1


HOST = torch.device("cpu")
FRAMES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)


def of_frame(height: int, width: int) -> Tables:
    count = height * width
    return {
        "places": np.arange(2 * count, dtype=np.int32).reshape(count, 2) + height,
        "weights": np.full(count, width / 3, dtype=np.float32),
        "order": np.arange(count, dtype=np.int32)[::-1],
        "row": np.full(height, width, dtype=np.int32),
    }


def tables() -> BatchTables:
    return BatchTables(
        of_frame, patch_keys=("places", "weights"), token_keys=("order",), sequence_kinds=("row",), smallest=(1, 1)
    )


@given(frames=FRAMES, missing=st.integers(-3, 9))
def test_frames_one_behind_the_other(frames: list[Frame], missing: int) -> None:
    """Padded to more rows, or to fewer than there are, which leaves them."""
    made, each = tables(), [of_frame(*frame) for frame in frames]
    count = sum(height * width for height, width in frames)
    starts = np.cumsum([0, *(height * width for height, width in frames)])
    pieces = pieces_of(np.concatenate([one["row"] for one in each]))
    expected = {
        "places": np.concatenate([one["places"] for one in each]),
        "weights": np.concatenate([one["weights"] for one in each]),
        "order": np.concatenate([one["order"] + start for one, start in zip(each, starts, strict=False)]),
        **dict(zip(piece_keys("row"), pieces, strict=True)),
    }
    rows = {name: len(table) + missing for name, table in expected.items()}
    found = made.on_device(frames, HOST, rows)
    assert tuple(found) == made.names == tuple(expected)
    for name, table in found.items():
        real = torch.from_numpy(np.ascontiguousarray(expected[name]))
        assert table.dtype == (torch.float32 if name == "weights" else torch.int32)
        assert len(table) == len(real) + max(missing, 0)
        assert torch.equal(table[: len(real)], real.to(table.dtype))
        assert torch.equal(
            table[len(real) :], torch.full_like(table[len(real) :], count if name.endswith(("bounds", "starts")) else 0)
        )
    for name, table in made.on_device(frames, HOST).items():
        assert torch.equal(table, found[name][: len(expected[name])])


def test_no_frames() -> None:
    found = tables().on_device([], HOST, dict.fromkeys(tables().names, 3))
    assert {name: tuple(table.shape) for name, table in found.items()} == {
        "places": (3, 2),
        **dict.fromkeys(("weights", "order", *piece_keys("row")), (3,)),
    }
    assert not any(table.any() for table in found.values())


def test_a_frame_is_computed_once() -> None:
    calls = []

    def counted(height: int, width: int) -> Tables:
        calls.append((height, width))
        return of_frame(height, width)

    made = BatchTables(counted, patch_keys=("places",), token_keys=(), sequence_kinds=("row",), smallest=(1, 1))
    for _ in range(2):
        made.on_device([(2, 3), (2, 3), (3, 2)], HOST)
    assert calls == [(1, 1), (2, 3), (3, 2)]


# Convolutions over whole patches: the product in their place, hooks and other convolutions as they are.


KERNEL = (2, 4, 4)


class Called(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def both(convolution: nn.Module, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """As it is, as a product, and whether it was one."""
    with torch.no_grad():
        expected = convolution(patches)
        with Called() as called, WholePatches():
            found = convolution(patches)
    return expected, found, "convolution" not in called.names


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("padding", [0, "valid", (0, 0, 0)])
def test_a_kernel_that_sees_everything(bias: bool, count: int, padding: Any) -> None:
    convolution = nn.Conv3d(3, 8, KERNEL, stride=KERNEL, bias=bias, padding=padding)
    expected, found, is_product = both(convolution, torch.randn(count, 3, *KERNEL))
    assert is_product
    assert found.shape == expected.shape == (count, 8, 1, 1, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"stride": KERNEL}, (2, 8, 4)),
        ({"padding": 1}, KERNEL),
        ({"kernel_size": (1, 3, 3), "padding": "same"}, (1, 3, 3)),
        ({"padding": (0, 0, 1)}, KERNEL),
        ({"groups": 3}, KERNEL),
    ],
)
def test_others_stay(options: dict[str, Any], size: tuple[int, ...]) -> None:
    expected, found, is_product = both(nn.Conv3d(3, 6, **{"kernel_size": KERNEL, **options}), torch.randn(2, 3, *size))
    assert not is_product
    torch.testing.assert_close(found, expected)


def test_a_kernel_that_sees_more_is_refused_as_ever() -> None:
    with torch.no_grad(), WholePatches(), pytest.raises(RuntimeError, match="Kernel size"):
        nn.Conv3d(3, 6, (2, 2, 2), dilation=2)(torch.randn(1, 3, 2, 2, 2))


def test_hooks_are_called_and_autocast_casts() -> None:
    convolution, seen = nn.Conv3d(3, 8, KERNEL, stride=KERNEL), []
    convolution.register_forward_hook(lambda *_: seen.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found, is_product = both(convolution, torch.randn(2, 3, *KERNEL))
    assert (is_product, len(seen)) == (True, 2)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
