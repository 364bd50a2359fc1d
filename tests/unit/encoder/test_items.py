"""Images and clips with their grids: which patches belong to which, however a request gives them."""

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
