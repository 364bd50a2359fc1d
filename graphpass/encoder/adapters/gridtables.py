"""Tables that Qwen's towers compute from the grids of images: computed by frame, cached, concatenated for a batch."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.attention import Pieces, pieces_of

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def position_ids(height: int, width: int, merge: int) -> IntArray:
    """Row and column of each patch, [patches, 2]."""
    rows, columns = np.indices((height, width), dtype=np.int32)
    return np.stack([_by_block(rows, merge), _by_block(columns, merge)], axis=-1)


def interpolation(
    height: int, width: int, merge: int, side: int, *, align_corners: bool
) -> tuple[IntArray, FloatArray]:
    """Four rows of the table of position embeddings for each patch, and the weights of these rows, [patches, 4] each.

    The table has ``side`` x ``side`` rows. The resampling is bilinear, in float32 like transformers.
    """
    row_taps, row_weights = _taps(height, side, align_corners)
    column_taps, column_weights = _taps(width, side, align_corners)
    at = position_ids(height, width, merge)
    rows, columns = at[:, 0], at[:, 1]
    indices = row_taps[rows][:, :, None] * side + column_taps[columns][:, None, :]
    weights = row_weights[rows][:, :, None] * column_weights[columns][:, None, :]
    return indices.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4).astype(np.float32)


def windows(height: int, width: int, merge: int, tokens_a_side: int) -> tuple[IntArray, IntArray]:
    """The output tokens of a frame in the order of their windows, and the number of tokens of each window, at least 1.

    A window has ``tokens_a_side`` x ``tokens_a_side`` tokens, and is cut at the frame's lower and right edge.
    """
    rows, columns = np.indices((height // merge, width // merge), dtype=np.int32)
    num_across = -(-(width // merge) // tokens_a_side)
    window = ((rows // tokens_a_side) * num_across + columns // tokens_a_side).ravel()
    order = np.argsort(window, kind="stable").astype(np.int32)
    return order, np.bincount(window).astype(np.int32)


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


Frame = tuple[int, int]
"""Height and width of one temporal slice, in patches."""
Tables = Mapping[str, npt.NDArray[Any]]
"""{name: int32 or float32 values of one frame}."""
Words = npt.NDArray[np.int32]
_KEPT = 256
_NOTHING = np.empty(0, dtype=np.int32)


class BatchTables:
    """Computes the tables of a batch: the concatenated tables of its frames, and the pieces of its sequences.

    All values have 32 bits. They are concatenated and padded in pinned memory, and copied to the device at once.

    Tables of ``patch_keys`` have a row for each patch. Those of ``token_keys`` have the index of a token for each
    token, from 0 in each frame. Each of ``sequence_kinds`` has the three tables of :func:`piece_keys`. The function
    ``of_frame(height, width)`` returns the tables of a frame, and the lengths of its sequences under the name of each
    kind. The ``smallest`` frame determines dtypes and columns.
    """

    def __init__(
        self,
        of_frame: Callable[[int, int], Tables],
        *,
        patch_keys: Sequence[str],
        token_keys: Sequence[str],
        sequence_kinds: Sequence[str],
        smallest: Frame,
    ) -> None:
        self._of_frame = of_frame
        self._words_of_frame = functools.lru_cache(_KEPT)(self._flat_words)
        self._words_of_batch = functools.lru_cache(_KEPT)(self._counted_words)
        self._token_keys, self._kinds = token_keys, sequence_kinds
        tables = of_frame(*smallest)
        #: {name: no rows of a table, but its dtype and columns}. Tables that are missing have one column of int32.
        self._like = {name: torch.from_numpy(tables[name][:0]) for name in patch_keys}
        #: Tables that are padded with their last value. The others are padded with zero, which is a valid index.
        self._repeat_last = frozenset(
            name for keys in map(piece_keys, sequence_kinds) for name in (keys.query_bounds, keys.key_starts)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tables."""
        return (*self._like, *self._token_keys, *itertools.chain(*map(piece_keys, self._kinds)))

    def on_device(
        self, frames: Sequence[Frame], device: torch.device, rows: Mapping[str, int] | None = None
    ) -> dict[str, torch.Tensor]:
        """{name: table of a batch on the device}, with at least ``rows`` of each; None: without padding.

        The frames are in the order of their patches; there are no empty frames, but there may be none at all.
        """
        each = list(map(self._words_of_frame, frames))
        words = {name: [of_frame[name] for of_frame in each] or [_NOTHING] for name in self._like}
        words |= {name: [table] for name, table in self._words_of_batch(tuple(frames)).items()}
        found = {name: sum(map(len, parts)) for name, parts in words.items()}
        sizes = found
        if rows is not None:
            widths = {name: math.prod(like.shape[1:]) for name, like in self._like.items()}
            sizes = {name: max(length, rows[name] * widths.get(name, 1)) for name, length in found.items()}
        flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        on_host, start = flat.numpy(), 0
        for name, parts in words.items():
            end, following = start + found[name], start + sizes[name]
            np.concatenate(parts, out=on_host[start:end])
            # guard: encoder_padded_tables
            on_host[end:following] = on_host[end - 1] if name in self._repeat_last else 0
            start = following
        on_device = flat.to(device, non_blocking=True).split(list(sizes.values()))
        return {name: self._shaped(name, part) for name, part in zip(sizes, on_device, strict=True)}

    def _flat_words(self, frame: Frame) -> dict[str, Words]:
        return {name: table.reshape(-1).view(np.int32) for name, table in self._of_frame(*frame).items()}

    def _counted_words(self, frames: tuple[Frame, ...]) -> dict[str, Words]:
        """Tables that depend on the position of a frame in the batch."""
        each = list(map(self._words_of_frame, frames))
        words = {}
        for name in self._token_keys:
            starts = itertools.accumulate((len(tables[name]) for tables in each), initial=0)
            numbers = [tables[name] + start for tables, start in zip(each, starts, strict=False)]
            words[name] = np.concatenate([_NOTHING, *numbers])
        for kind in self._kinds:
            pieces = pieces_of(np.concatenate([_NOTHING, *(tables[kind] for tables in each)]))
            words |= zip(piece_keys(kind), pieces, strict=True)
        return words

    def _shaped(self, name: str, words: torch.Tensor) -> torch.Tensor:
        like = self._like.get(name)
        return words if like is None else words.view(like.dtype).view(-1, *like.shape[1:])


def piece_keys(kind: str) -> Pieces[str]:
    """The names of the three tables of a kind of sequences."""
    return Pieces(*(f"{kind}_{name}" for name in Pieces._fields))
