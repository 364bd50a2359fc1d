"""The adapter for Qwen2.5-VL. Most layers attend within windows of a frame, some within the whole frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphpass.encoder.adapters.grids import position_ids, windows
from graphpass.encoder.adapters.qwen import GridAdapter
from graphpass.encoder.adapters.tables import Tables
from graphpass.encoder.pieces import most_pieces
from graphpass.encoder.protocol import EncoderGraphKey

__all__ = ["Qwen25VLAdapter"]


class Qwen25VLAdapter(GridAdapter):
    """The adapter for ``Qwen2_5_VisionTransformerPretrainedModel``.

    The result of an item is its merged tokens [tokens, width], in the order of the image.
    """

    patch_keys = ("position_ids",)
    token_keys = ("window_index", "reverse_index")
    sequence_kinds = ("frame", "window")

    def __init__(self, tower: Any, **options: Any) -> None:
        self._unit: int = tower.spatial_merge_size**2
        self._tokens_a_side: int = tower.window_size // tower.spatial_merge_size // tower.patch_size
        super().__init__(tower, **options)

    def _frame_tables(self, height: int, width: int) -> Tables:
        cut = windows(height, width, self._merge, self._tokens_a_side)
        by_token = position_ids(height, width, self._merge).reshape(-1, self._unit, 2)
        return {
            "position_ids": by_token[cut.order].reshape(-1, 2),
            "window_index": cut.order,
            "reverse_index": np.argsort(cut.order).astype(np.int32),
            "frame": np.array([height * width], dtype=np.int32),
            "window": cut.tokens * np.int32(self._unit),
        }

    def _most_pieces(self, key: EncoderGraphKey) -> Mapping[str, int]:
        """A frame of n tokens has at most n / side + 1 windows: as many if it is one token high."""
        windows = key.tokens // self._tokens_a_side + self._frames(key)
        longest = self._unit * self._tokens_a_side**2
        return {"frame": self._frame_pieces(key), "window": most_pieces(windows, key.patches, longest)}

    @property
    def _output_widths(self) -> tuple[int, ...]:
        return (self.tower.merger.mlp[-1].out_features,)

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tower = self.tower
        hidden = self._embed(buffers["pixel_values"])
        by_token = hidden.reshape(-1, self._unit, hidden.shape[-1])
        hidden = by_token.index_select(0, buffers["window_index"]).reshape(hidden.shape)
        rotation = tower.rotary_pos_emb(hidden, buffers["position_ids"])
        within_frames, within_windows = (self._within(kind, buffers, rotation) for kind in self.sequence_kinds)
        whole = set(tower.fullatt_block_indexes)
        self._blocks.follow()
        for layer in range(len(self._blocks)):
            hidden = self._blocks(layer, hidden, within_frames if layer in whole else within_windows)
        return (tower.merger(hidden).index_select(0, buffers["reverse_index"]),)
