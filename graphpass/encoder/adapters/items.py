"""The items of a request to a tower of grids: patches in one tensor, and the grid of each image or clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.protocol import EncoderItems
from graphpass.errors import ShapeError

Grid = tuple[int, int, int]
"""Number of temporal slices, and height and width in patches, of an item."""
Grids = npt.NDArray[np.int64]
_KINDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True, slots=True)
class GridItems:
    """The items of a request: images first, then clips."""

    #: (patches [patches, *shape of a patch], grids [items, 3]) of the images and of the clips. One may be missing.
    parts: tuple[tuple[torch.Tensor, Grids], ...]

    @classmethod
    def of(cls, items: EncoderItems, merge: int, patch_shape: Sequence[int]) -> Self:
        """Read and check the mapping that a processor returned."""
        named = {name: value for name, value in items.items() if value is not None}
        if "grid_thw" in named and "image_grid_thw" not in named:
            named["image_grid_thw"] = named.pop("grid_thw")
        pairs = [(named.get(pixels), named.get(grids)) for pixels, grids in _KINDS]
        found = [(pixels, grids) for pixels, grids in pairs if pixels is not None and grids is not None]
        # guard: encoder_grids_of_all
        if not found or "grid_thw" in named or any((pixels is None) != (grids is None) for pixels, grids in pairs):
            raise _unfit(
                "pixel_values with image_grid_thw (or grid_thw), pixel_values_videos with video_grid_thw, or both",
                f"the keys {sorted(map(str, named))}",
            )
        parts = tuple((_checked_patches(pixels, patch_shape), _checked_grids(grids, merge)) for pixels, grids in found)
        for patches, of_part in parts:
            expected = int(of_part.prod(axis=1).sum())
            if len(patches) != expected:
                raise _unfit(
                    f"as many patches as the grids say, {expected}",
                    f"{len(patches)} patches, grids {of_part[:8].tolist()}",
                )
        return cls(parts)

    @classmethod
    def of_images(cls, images: Any, shape: tuple[int, ...]) -> Self:
        """Images of one shape, each as one row."""
        if not isinstance(images, torch.Tensor) or tuple(images.shape[1:]) != shape:
            raise ShapeError(
                "images do not have the size of the tower",
                expected=f"pixel_values of shape {('images', *shape)}",
                found=f"shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else type(images).__name__,
                remedy="pass the output of the model's image processor: the tower's position embeddings have one size",
            )
        return cls(((images, np.ones((len(images), 3), dtype=np.int64)),))

    @property
    def grids(self) -> list[Grid]:
        """The grids of all items."""
        return [(frames, height, width) for frames, height, width in self._table().tolist()]

    def patches(self) -> torch.Tensor:
        """The patches of all items."""
        return self.parts[0][0] if len(self.parts) == 1 else torch.cat([patches for patches, _ in self.parts])

    def selected(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The items at ``indices``, as a processor's mapping. The patches are a view if they are contiguous."""
        sizes = [grids.prod(axis=1) for _, grids in self.parts]
        ends = np.concatenate([size.cumsum() for size in sizes])
        starts = ends - np.concatenate(sizes)
        part_of = np.repeat(np.arange(len(self.parts)), [len(size) for size in sizes])
        chosen = np.array(indices, dtype=np.int64)
        part_of, starts, ends = part_of[chosen], starts[chosen], ends[chosen]
        breaks = np.flatnonzero((part_of[1:] != part_of[:-1]) | (starts[1:] != ends[:-1])) + 1
        runs = [run for run in np.split(np.arange(len(chosen)), breaks) if len(run)]
        rows = [self.parts[part_of[run[0]]][0][starts[run[0]] : ends[run[-1]]] for run in runs]
        patches = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else self.parts[0][0][:0]
        return {"pixel_values": patches, "grid_thw": torch.from_numpy(self._table()[chosen])}

    def _table(self) -> Grids:
        return np.concatenate([grids for _, grids in self.parts])


def _checked_patches(patches: Any, patch_shape: Sequence[int]) -> torch.Tensor:
    if not isinstance(patches, torch.Tensor) or patches.shape[1:] != tuple(patch_shape):
        shape = tuple(patches.shape) if isinstance(patches, torch.Tensor) else type(patches).__name__
        raise _unfit(f"patches as a tensor of [patches, {', '.join(map(str, patch_shape))}]", f"{shape}")
    return patches


def _checked_grids(grids: Any, merge: int) -> Grids:
    table = _as_table(grids)
    if table is None or (table < 0).any() or (table[:, 1:] % merge).any():
        shown = grids.tolist() if hasattr(grids, "tolist") else grids
        raise _unfit(
            f"grids as integers [items, 3], none below 0, heights and widths in multiples of {merge}", f"{shown!r:.100}"
        )
    return table


def _as_table(grids: Any) -> Grids | None:
    """Grids from a tensor, an array or a list; None if they are not integers [items, 3]."""
    try:
        table = np.asarray(grids.cpu() if isinstance(grids, torch.Tensor) else grids)
    except ValueError:  # rows of different lengths
        return None
    if table.shape in ((0,), (0, 3)):  # without items, of whatever dtype
        return np.empty((0, 3), dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
        return None
    return table.astype(np.int64)


def _unfit(expected: str, found: str) -> ShapeError:
    return ShapeError(
        "images or clips do not fit their grids",
        expected=expected,
        found=found,
        remedy="pass the output of the model's processor with return_tensors='pt'",
    )
