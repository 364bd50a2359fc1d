"""The items of a request to a stock tower: rows of pixels, and grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.planner import runs_of
from graphpass.encoder.protocol import EncoderItems
from graphpass.errors import ShapeError

Grid = tuple[int, int, int]
"""Number of temporal slices, and height and width in patches, of an item."""
_KINDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True, slots=True)
class GridItems:
    """The items of a request: images first, then clips."""

    parts: tuple[torch.Tensor, ...]  #: rows of the images and of the clips; one may be missing
    table: npt.NDArray[np.int64]  #: the grids, [items, 3]

    @classmethod
    def of(cls, items: EncoderItems, row_shape: Sequence[int], merge: int | None) -> Self:
        """Read and check what a processor returned. Without ``merge``, each row is an image."""
        if not isinstance(items, Mapping):
            raise _unfit("what the processor returned, a mapping", f"a {type(items).__name__}")
        if merge is None:
            images = items.get("pixel_values")
            table = np.ones((len(images) if isinstance(images, torch.Tensor) else 0, 3), dtype=np.int64)
            return cls((_checked_rows(images, len(table), row_shape),), table)
        named = {name: value for name, value in items.items() if value is not None}
        if "grid_thw" in named and "image_grid_thw" not in named:
            named["image_grid_thw"] = named.pop("grid_thw")
        kinds = [kind for kind in _KINDS if not named.keys().isdisjoint(kind)]
        # guard: encoder_grids_of_all
        if not kinds or "grid_thw" in named or any(name not in named for kind in kinds for name in kind):
            raise _unfit(
                "pixel_values with image_grid_thw (or grid_thw), pixel_values_videos with video_grid_thw, or both",
                f"the keys {sorted(map(str, named))}",
            )
        tables = [_checked_grids(named[grids], merge) for _, grids in kinds]
        counts = [int(table.prod(axis=1).sum()) for table in tables]
        parts = [
            _checked_rows(named[pixels], count, row_shape) for (pixels, _), count in zip(kinds, counts, strict=True)
        ]
        return cls(tuple(parts), np.concatenate(tables))

    @property
    def grids(self) -> list[Grid]:
        """Of all items."""
        return [(frames, height, width) for frames, height, width in self.table.tolist()]

    def rows(self) -> torch.Tensor:
        """Of all items."""
        return _joined(self.parts)

    def selected(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The items at ``indices``; the rows of neighbours are a view."""
        ends = [0, *self.table.prod(axis=1).cumsum().tolist()]
        found = []
        for first, last in runs_of(indices):
            begin = 0
            for part in self.parts:
                found.append(part[max(0, ends[first] - begin) : max(0, ends[last + 1] - begin)])
                begin += len(part)
        rows = _joined([part for part in found if len(part)] or [self.parts[0][:0]])
        return {"pixel_values": rows, "grid_thw": torch.from_numpy(self.table[list(indices)])}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _checked_rows(pixels: Any, count: int, row_shape: Sequence[int]) -> torch.Tensor:
    if isinstance(pixels, torch.Tensor) and pixels.shape == (count, *row_shape):
        return pixels
    shape = tuple(pixels.shape) if isinstance(pixels, torch.Tensor) else type(pixels).__name__
    raise _unfit(f"pixels as a tensor of {[count, *row_shape]}", str(shape))


def _checked_grids(grids: Any, merge: int) -> npt.NDArray[np.int64]:
    try:
        table = np.asarray(grids.cpu() if isinstance(grids, torch.Tensor) else grids)
    except ValueError:  # rows of different lengths
        table = np.empty(())
    if table.shape in ((0,), (0, 3)):  # without items, of whatever dtype
        return np.empty((0, 3), dtype=np.int64)
    is_table = table.shape[1:] == (3,) and table.dtype.kind in "iu"
    if not is_table or (table < 0).any() or (table[:, 1:] % merge).any():
        shown = grids.tolist() if hasattr(grids, "tolist") else grids
        expected = f"grids as integers [items, 3], none below 0, heights and widths in multiples of {merge}"
        raise _unfit(expected, f"{shown!r:.100}")
    return table.astype(np.int64)


def _unfit(expected: str, found: str) -> ShapeError:
    return ShapeError(
        "images or clips do not fit the tower or their grids",
        expected=expected,
        found=found,
        remedy="pass the output of the model's processor with return_tensors='pt'",
    )
