"""What the processors of towers with grids return: patches of images and of clips, and the grid of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphpass.encoder.protocol import EncoderItems
from graphpass.errors import ShapeError

__all__ = ["Grid", "GridItems"]

Grid = tuple[int, int, int]
"""Temporal slices, height and width of an item, in patches."""
_KINDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True, slots=True)
class GridItems:
    """Images, then clips.

    Attributes:
        parts: the patches of images, [patches, width], with their grids, and those of clips; at least one of the two.
    """

    parts: tuple[tuple[torch.Tensor, list[Grid]], ...]

    @classmethod
    def of(cls, items: EncoderItems, merge: int, width: int) -> Self:
        """Those of a processor's mapping.

        Args:
            items: as a processor returns them; ``grid_thw`` is another name of ``image_grid_thw``.
            merge: patches a side of what becomes one token.
            width: values of a patch.

        Raises:
            ShapeError: something is missing, or does not fit.
        """
        named = {name: value for name, value in items.items() if value is not None}
        if "grid_thw" in named and "image_grid_thw" not in named:
            named["image_grid_thw"] = named.pop("grid_thw")
        pairs = [(named.get(pixels), named.get(grids)) for pixels, grids in _KINDS]
        found = [(pixels, grids) for pixels, grids in pairs if pixels is not None and grids is not None]
        if not found or "grid_thw" in named or any((pixels is None) != (grids is None) for pixels, grids in pairs):
            raise _unfit(
                "pixel_values with image_grid_thw (or grid_thw), pixel_values_videos with video_grid_thw, or both",
                f"the keys {sorted(map(str, named))}",
            )
        parts = tuple((_checked_patches(pixels, width), _checked_grids(grids, merge)) for pixels, grids in found)
        for patches, of_part in parts:
            expected = sum(map(math.prod, of_part))
            if len(patches) != expected:
                raise _unfit(
                    f"as many patches as the grids say, {expected}", f"{len(patches)} patches, grids {of_part[:8]}"
                )
        return cls(parts)

    @property
    def grids(self) -> list[Grid]:
        """Of all items."""
        return [grid for _, grids in self.parts for grid in grids]

    def patches(self) -> torch.Tensor:
        """Of all items, [patches, width]."""
        return self.parts[0][0] if len(self.parts) == 1 else torch.cat([patches for patches, _ in self.parts])

    def selected(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Some items, as a processor's mapping."""
        bounds = [
            (patches, start, end)
            for patches, grids in self.parts
            for start, end in itertools.pairwise(itertools.accumulate(map(math.prod, grids), initial=0))
        ]
        rows = [patches[start:end] for patches, start, end in map(bounds.__getitem__, indices)]
        chosen = torch.tensor(list(map(self.grids.__getitem__, indices)), dtype=torch.int64, device="cpu").view(-1, 3)
        patches = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else self.parts[0][0][:0]
        return {"pixel_values": patches, "grid_thw": chosen}


def _checked_patches(patches: Any, width: int) -> torch.Tensor:
    if not isinstance(patches, torch.Tensor) or patches.shape[1:] != (width,):
        shape = tuple(patches.shape) if isinstance(patches, torch.Tensor) else type(patches).__name__
        raise _unfit(f"patches as a tensor of [patches, {width}]", f"{shape}")
    return patches


def _checked_grids(grids: Any, merge: int) -> list[Grid]:
    rows: Sequence[Any] = grids.tolist() if hasattr(grids, "tolist") else grids
    fits = isinstance(rows, list | tuple) and all(
        isinstance(row, list | tuple)
        and len(row) == 3
        and all(type(side) is int and side >= 0 for side in row)
        and not row[1] % merge
        and not row[2] % merge
        for row in rows
    )
    if not fits:
        raise _unfit(
            f"grids as integers [items, 3], none below 0, heights and widths in multiples of {merge}", f"{rows!r:.100}"
        )
    return [tuple(row) for row in rows]


def _unfit(expected: str, found: str) -> ShapeError:
    return ShapeError(
        "images or clips do not fit their grids",
        expected=expected,
        found=found,
        remedy="pass what the model's processor returns with return_tensors='pt'",
    )
