"""The adapter for Qwen3-VL: resampled position embeddings, full attention within each frame, deepstack outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphpass.encoder.adapters.checks import unserved_tower
from graphpass.encoder.adapters.grids import interpolation, position_ids
from graphpass.encoder.adapters.qwen import GridAdapter
from graphpass.encoder.adapters.tables import Tables
from graphpass.encoder.protocol import EncoderGraphKey

__all__ = ["Qwen3VLAdapter"]

_TAPS = 4


class Qwen3VLAdapter(GridAdapter):
    """The adapter for ``Qwen3VLVisionModel``.

    The result of an item is a tuple: its merged tokens, then its deepstack features of each level, each
    [tokens, width].

    Raises:
        EncoderConfigError: the tower's interpolation of position embeddings is not bilinear.
    """

    patch_keys = ("position_ids", "interp_indices", "interp_weights")

    def __init__(self, tower: Any, **options: Any) -> None:
        if tower.interpolation_mode != "bilinear":
            raise unserved_tower(tower, "bilinear position embeddings", repr(tower.interpolation_mode))
        super().__init__(tower, **options)

    def _frame_tables(self, height: int, width: int) -> Tables:
        tower = self.tower
        resampled = interpolation(
            height, width, self._merge, tower.num_grid_per_side, align_corners=tower.interpolation_align_corners
        )
        return {
            "position_ids": position_ids(height, width, self._merge),
            "interp_indices": resampled.indices,
            "interp_weights": resampled.weights,
            "frame": np.array([height * width], dtype=np.int32),
        }

    def _most_pieces(self, key: EncoderGraphKey) -> Mapping[str, int]:
        return {"frame": self._frame_pieces(key)}

    @property
    def _output_widths(self) -> tuple[int, ...]:
        mergers = [self.tower.merger, *self._deepstack.values()]
        return tuple(merger.linear_fc2.out_features for merger in mergers)

    @property
    def _deepstack(self) -> Mapping[int, Any]:
        """{layer: the merger of its output}, in the order of layers."""
        indexes = list(self.tower.deepstack_visual_indexes)
        mergers = self.tower.deepstack_merger_list
        return {layer: mergers[indexes.index(layer)] for layer in range(len(self._blocks)) if layer in indexes}

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tower = self.tower
        hidden = self._embed(buffers["pixel_values"])
        hidden = hidden + self._position_embeddings(buffers).to(hidden.dtype)
        rotation = tower.rotary_pos_emb(hidden, buffers["position_ids"])
        arguments = self._within("frame", buffers, rotation)
        mergers, features = self._deepstack, []
        self._blocks.follow()
        for layer in range(len(self._blocks)):
            hidden = self._blocks(layer, hidden, arguments)
            if layer in mergers:
                features.append(mergers[layer](hidden))
        return (tower.merger(hidden), *features)

    def _position_embeddings(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Resample one tap at a time, because all taps together would be the largest tensor of the graph."""
        indices, weights = buffers["interp_indices"], buffers["interp_weights"]
        parts = (self.tower.pos_embed(indices[:, tap]) * weights[:, tap, None] for tap in range(_TAPS))
        total: torch.Tensor = sum(parts)
        return total
