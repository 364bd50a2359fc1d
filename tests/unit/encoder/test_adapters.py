"""Adapters: finding one, what is refused, their tables, convolutions over whole patches."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphpass as gp
from graphpass.encoder.adapters import TowerAdapter, adapter_for
from graphpass.encoder.adapters.items import Grid, GridItems
from graphpass.encoder.adapters.tables import GRID_KEY, GridTables, TableCall, noted_calls, piece_keys, tables_of
from graphpass.encoder.adapters.tower import TowerCopy
from graphpass.encoder.attention import pieces_of
from graphpass.encoder.protocol import EncoderGraphKey
from tests.e2e.hugging_face import CPU
from tests.e2e.towers import CLIP, QWEN2_5_VL, QWEN3_VL, SIGLIP, Tower
from tests.unit.models import module

GRID = torch.tensor([[1, 4, 4]])
CLIP_OF_16 = {"pixel_values_videos": torch.ones(16, 96), "video_grid_thw": GRID}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("stock", "limits"),
    [(QWEN2_5_VL, (16, 4096, 32)), (QWEN3_VL, (16, 4096, 32)), (SIGLIP, (17, 1088, 64)), (CLIP, (18, 1152, 64))],
)
def test_by_what_the_forward_takes(stock: Tower, limits: tuple[int, ...], mode: Callable[[], Any]) -> None:
    tower = stock.build(CPU)
    tower.__class__ = type("Derived", (type(tower),), {})
    with mode():
        adapter = adapter_for(tower)
    assert isinstance(adapter, TowerAdapter)
    config = adapter.get_encoder_cudagraph_config()
    assert (*adapter.get_encoder_cudagraph_budget_range(), config.max_items) == limits
    assert config.max_frames == (32 if stock.has_grids else None)
    assert adapter_for(adapter) is adapter


def forward(self: Any, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    """Of a tower that has no config, whose outputs have no names."""
    return self.embed(pixels)


@pytest.mark.parametrize(
    ("tower", "text"),
    [
        *((tower, r"takes grid_thw.*encoder_protocol") for tower in (torch.nn.Linear(2, 2), None, "qwen")),
        (module(forward, embed=nn.Linear(8, 8)), "there is no adapter for this.*named outputs"),
    ],
)
def test_unknown_towers(tower: Any, text: str) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=text):
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


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ({"pixel_values": torch.ones(15, 96), "image_grid_thw": GRID}, r"\[16, 96\]; found \(15, 96\)"),
        ({"pixel_values": torch.ones(12, 96), "image_grid_thw": torch.tensor([[1, 3, 4]])}, "multiples of 2"),
        ({"pixel_values": torch.ones(16, 96)}, "pixel_values"),
        ({}, "the keys"),
        ({"pixel_values": torch.ones(16, 96), **CLIP_OF_16}, "the keys.*'pixel_values', 'pixel_values_videos'"),
        ({"pixel_values": torch.ones(16, 96), "image_grid_thw": GRID, "grid_thw": GRID}, "the keys.*'grid_thw'"),
        ({"pixel_values": torch.ones(16, 95), "image_grid_thw": GRID}, r"\[16, 96\]; found \(16, 95\)"),
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
        ([torch.ones(16, 96)], "a mapping; found a list"),
    ],
)
def test_items_that_do_not_fit_their_grids(items: dict[str, Any], found: str) -> None:
    with pytest.raises(gp.errors.ShapeError, match=found):
        adapter_for(QWEN3_VL.build(CPU)).get_encoder_cudagraph_item_specs(items)


@pytest.mark.parametrize(
    "items", [{}, {"pixel_values": torch.ones(2, 3, 16, 8)}, {"pixel_values": torch.ones(3, 16, 16)}]
)
def test_images_of_another_size(items: dict[str, torch.Tensor]) -> None:
    with pytest.raises(gp.errors.ShapeError, match=r"3, 16, 16\]; found"):
        adapter_for(CLIP.build(CPU)).get_encoder_cudagraph_item_specs(items)


def test_a_budget_below_one_image() -> None:
    key = EncoderGraphKey(16, 16, 1)
    with pytest.raises(gp.errors.EncoderConfigError, match="at least 18; found 16"):
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
    return GridItems.of(items, (WIDTH,), MERGE)


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
    storage = found.rows().untyped_storage().data_ptr()
    assert (found.selected(indices)["pixel_values"].untyped_storage().data_ptr() != storage) == is_copied


@pytest.mark.parametrize(
    "as_given",
    [list, tuple, np.array, torch.tensor, lambda grids: torch.tensor(grids, dtype=torch.int32)],
    ids=["list", "tuple", "array", "tensor", "int32"],
)
def test_grids_in_any_form(as_given: Any) -> None:
    grids = [(1, 2, 4), (2, 2, 2)]
    found = GridItems.of({"pixel_values": numbered(grids), "grid_thw": as_given(grids)}, (WIDTH,), MERGE)
    assert found.grids == grids
    assert found.selected([1])["grid_thw"].dtype == torch.int64


HOST = torch.device("cpu")
UNIT, SIDE = MERGE**2, 3
FRAMES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9)), max_size=5)


def utils() -> Any:
    return pytest.importorskip("transformers.vision_utils")


def calls() -> list[TableCall]:
    """Of every kind: rows of numbers and of floats, windows, and bounds."""
    taps = {"num_grid_per_side": 5, "align_corners": True, "spatial_merge_size": MERGE}
    cut = {"spatial_merge_size": MERGE, "window_size": SIDE * MERGE * 4, "patch_size": 4}
    return [
        functools.partial(tables_of, utils().get_vision_position_ids, {"spatial_merge_size": MERGE}, "grid_thw"),
        functools.partial(tables_of, utils().get_vision_interpolation_indices_and_weights, taps, "grid_thw"),
        functools.partial(tables_of, utils().get_vision_window_index, cut, "grid_thw"),
        functools.partial(tables_of, utils().get_vision_cu_seqlens, {}, "grid_thw"),
    ]


@functools.cache
def grid_tables() -> GridTables:
    """It tries its calls when it is made, which takes a hundred times as long as a batch."""
    return GridTables(calls(), UNIT, MERGE)


@given(frames=FRAMES, is_padded=st.booleans())
def test_tables_are_those_of_the_whole_batch(frames: list[Grid], is_padded: bool) -> None:
    """And there is room for them, and padding is a sequence of its own, of places of its own."""
    tables = grid_tables()
    grids = [(count, MERGE * height, MERGE * width) for count, height, width in frames]
    real = [grid for grid in grids if math.prod(grid)]
    tokens, num_frames = sum(map(math.prod, real)) // UNIT, sum(count for count, *_ in real)
    key = EncoderGraphKey(max(tokens, 1) + 5, (max(tokens, 1) + 5) * UNIT, 8, max(num_frames, 1) + 1)
    found = tables.on_device(grids, HOST, key if is_padded else None)
    assert tuple(found) == tables.names
    expected = {name: table for call in calls() for name, table in call(torch.tensor(real)).items()} if real else {}
    for name, table in expected.items():
        start, behind = found[name][: len(table)], found[name][len(table) :]
        assert torch.equal(start, table.to(start.dtype))
        assert bool(len(behind)) == is_padded
        if name.startswith("cu_"):
            pieces = pieces_of(table.diff().numpy())
            for part, of_batch in zip(piece_keys(name), pieces, strict=True):
                assert found[part][: len(of_batch)].tolist() == of_batch.tolist()
            assert set(behind.tolist()) <= {int(table[-1]), key.patches}
            assert not is_padded or int(behind[-1]) == key.patches
        elif name == "window_index":
            assert behind.tolist() == list(range(len(table), len(found[name])))
        else:
            assert not behind.any()
    assert found[GRID_KEY][:num_frames].tolist() == [[1, *grid[1:]] for grid in real for _ in range(grid[0])]
    assert is_padded == (len(found[GRID_KEY]) > num_frames)
    if is_padded:
        assert {name: len(table) for name, table in found.items()} == tables.rows(key)


def test_an_item_is_computed_once() -> None:
    asked = []

    def counted(grid_thw: torch.Tensor, kwargs: Any) -> Any:
        asked.append(grid_thw.tolist())
        return utils().get_vision_cu_seqlens(grid_thw, kwargs=kwargs)

    tables = GridTables([functools.partial(tables_of, counted, {}, "grid_thw")], UNIT, MERGE)
    asked.clear()
    for _ in range(2):
        found = tables.on_device([(1, 2, 4), (1, 2, 4), (2, 2, 2)], HOST)
        assert found["cu_seqlens"].tolist() == [0, 8, 16, 20, 24]
        found["cu_seqlens"].zero_()  # its receiver may write to it
    assert asked == [[[1, 2, 4]], [[2, 2, 2]]]


def numbers(grid_thw: torch.Tensor, scale: torch.Tensor | None = None, kwargs: Any = None) -> torch.Tensor:
    """A table that is not its items' tables."""
    kwargs.pop("numbers", None)
    return torch.arange(int(grid_thw.prod(1).sum())) * (2 if scale is None else scale)


def length(grid_thw: torch.Tensor, kwargs: Any = None) -> int:
    """A number is no table."""
    kwargs.pop("length", None)
    return int(grid_thw.prod(1).max())


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ([functools.partial(tables_of, numbers, {}, "grid_thw")], "numbers is not"),
        ([functools.partial(tables_of, numbers, {"scale": torch.ones(1)}, "grid_thw")], "numbers of more than these"),
        ([functools.partial(tables_of, length, {}, "grid_thw")], r"the tables \[\]"),
    ],
)
def test_tables_that_cannot_be_joined(made: list[TableCall], found: str) -> None:
    with pytest.raises(gp.errors.EncoderConfigError, match=found):
        GridTables(made, UNIT, MERGE)


def test_calls_are_noted_from_outside_and_the_profiler_of_before_stays() -> None:
    seen: list[str] = []

    def profiler(frame: Any, event: str, _: Any) -> None:
        seen.append(event)

    grids, config = torch.tensor([[1, 4, 4]]), QWEN3_VL.build(CPU).config
    sys.setprofile(profiler)
    try:
        with noted_calls(grids) as noted:
            utils().get_vision_attention_seqlens(grids, config, kwargs={})
            utils().get_vision_position_ids(grids, 2)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert len(noted) == 1, "a call without kwargs makes no table"
    assert sorted(noted[0](grids)) == ["cu_seqlens", "max_seqlen"]


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
    own = TowerCopy(nn.Sequential(convolution), is_packed=False)
    with torch.no_grad():
        expected = convolution(patches)
        with Called() as called:
            found = own(patches)
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


def test_hooks_are_called_and_autocast_casts() -> None:
    convolution, seen = nn.Conv3d(3, 8, KERNEL, stride=KERNEL), []
    convolution.register_forward_hook(lambda *_: seen.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found, is_product = both(convolution, torch.randn(2, 3, *KERNEL))
    assert (is_product, len(seen)) == (True, 2)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
