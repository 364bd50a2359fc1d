"""Tables that Qwen's towers compute from the grid of an image before their first layer, in numpy, for one frame.

The patches of a frame of ``height`` x ``width`` patches are ordered by blocks: the ``merge`` x ``merge`` patches of one
output token are consecutive, and blocks are in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Interpolation", "Windows", "interpolation", "position_ids", "windows"]

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Resampling of the square table of position embeddings to a frame.

    Attributes:
        indices: four rows of the table for each patch, [patches, 4].
        weights: weights of these rows, [patches, 4].
    """

    indices: IntArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Windows:
    """The output tokens of a frame, ordered by windows.

    Attributes:
        order: index of the token at each position, [tokens].
        tokens: number of tokens of each window, at least 1, [windows].
    """

    order: IntArray
    tokens: IntArray


def position_ids(height: int, width: int, merge: int) -> IntArray:
    """Row and column of each patch, [patches, 2]."""
    rows, columns = np.indices((height, width), dtype=np.int32)
    return np.stack([_by_block(rows, merge), _by_block(columns, merge)], axis=-1)


def interpolation(height: int, width: int, merge: int, side: int, *, align_corners: bool) -> Interpolation:
    """Bilinear resampling of a table of ``side`` x ``side`` rows, in float32 like transformers."""
    row_taps, row_weights = _taps(height, side, align_corners)
    column_taps, column_weights = _taps(width, side, align_corners)
    at = position_ids(height, width, merge)
    rows, columns = at[:, 0], at[:, 1]
    indices = row_taps[rows][:, :, None] * side + column_taps[columns][:, None, :]
    weights = row_weights[rows][:, :, None] * column_weights[columns][:, None, :]
    return Interpolation(indices.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4).astype(np.float32))


def windows(height: int, width: int, merge: int, tokens_a_side: int) -> Windows:
    """Windows of ``tokens_a_side`` x ``tokens_a_side`` output tokens, cut at the frame's lower and right edge."""
    rows, columns = np.indices((height // merge, width // merge), dtype=np.int32)
    num_across = -(-(width // merge) // tokens_a_side)
    window = ((rows // tokens_a_side) * num_across + columns // tokens_a_side).ravel()
    order = np.argsort(window, kind="stable").astype(np.int32)
    return Windows(order, np.bincount(window).astype(np.int32))


def _by_block(values: IntArray, merge: int) -> IntArray:
    """Values [height, width] in the order of patches in memory, [height * width]."""
    height, width = values.shape
    return values.reshape(height // merge, merge, width // merge, merge).swapaxes(1, 2).ravel()


def _taps(size: int, side: int, align_corners: bool) -> tuple[IntArray, FloatArray]:
    """The two neighbours among ``side`` rows of each of ``size`` positions, and their weights, each [size, 2]."""
    place = np.arange(size, dtype=np.float32)
    if align_corners:
        source = place * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (place + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    floor = np.floor(source)
    offsets = np.arange(2, dtype=np.float32)
    distance = np.abs(source[:, None] - floor[:, None] - offsets)
    taps = (floor[:, None] + offsets).astype(np.int32).clip(0, side - 1)
    return taps, np.maximum(np.float32(1) - distance, np.float32(0))
