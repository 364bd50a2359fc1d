"""What adapters of grids read from a request, and the tables of frames and of batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass.encoder.adapters.qwen import Grid, GridItems
from graphpass.encoder.adapters.tables import (
    BatchTables,
    Frame,
    Tables,
    interpolation,
    piece_keys,
    position_ids,
    windows,
)
from graphpass.encoder.attention import pieces_of

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


CPU = torch.device("cpu")
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
    found = made.on_device(frames, CPU, rows)
    assert tuple(found) == made.names == tuple(expected)
    for name, table in found.items():
        real = torch.from_numpy(np.ascontiguousarray(expected[name]))
        assert table.dtype == (torch.float32 if name == "weights" else torch.int32)
        assert len(table) == len(real) + max(missing, 0)
        assert torch.equal(table[: len(real)], real.to(table.dtype))
        assert torch.equal(
            table[len(real) :], torch.full_like(table[len(real) :], count if name.endswith(("bounds", "starts")) else 0)
        )
    for name, table in made.on_device(frames, CPU).items():
        assert torch.equal(table, found[name][: len(expected[name])])


def test_no_frames() -> None:
    found = tables().on_device([], CPU, dict.fromkeys(tables().names, 3))
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
        made.on_device([(2, 3), (2, 3), (3, 2)], CPU)
    assert calls == [(1, 1), (2, 3), (3, 2)]
