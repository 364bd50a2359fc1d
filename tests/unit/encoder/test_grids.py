"""Tables of Qwen's towers, against what transformers computes with loops over images."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from graphpass.encoder.adapters.tables import interpolation, position_ids, windows

SIDES = (2, 4, 6, 8, 10, 16, 34)
GRIDS = list(itertools.product(SIDES, SIDES))


def vision_utils() -> object:
    return pytest.importorskip("transformers.vision_utils")


def grid_of(height: int, width: int) -> torch.Tensor:
    return torch.tensor([[1, height, width]])


@pytest.mark.parametrize("merge", [1, 2])
def test_position_ids(merge: int) -> None:
    for height, width in GRIDS:
        expected = vision_utils().get_vision_position_ids(grid_of(height, width), merge)
        assert np.array_equal(position_ids(height, width, merge), expected.numpy())


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("side", [1, 5, 48])
def test_interpolation_bit_for_bit(side: int, align_corners: bool) -> None:
    for height, width in GRIDS:
        found = interpolation(height, width, 2, side, align_corners=align_corners)
        expected = vision_utils().get_vision_interpolation_indices_and_weights(
            grid_of(height, width), side, align_corners=align_corners, spatial_merge_size=2
        )
        assert all(np.array_equal(mine, theirs.numpy()) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens_a_side", [1, 3, 4])
def test_windows(tokens_a_side: int) -> None:
    """And never more of them than graphs allow for."""
    for height, width in GRIDS:
        order, tokens = windows(height, width, 2, tokens_a_side)
        expected, ends = vision_utils().get_vision_window_index(grid_of(height, width), 2, tokens_a_side * 2 * 14, 14)
        assert np.array_equal(order, expected.numpy())
        assert np.array_equal(np.cumsum(tokens) * 4, ends.numpy()[1:])
        assert len(tokens) <= height * width // 4 // tokens_a_side + 1
