"""The adapter for CLIP. Each image starts with a class token, whose hidden state is the pooled output."""

from __future__ import annotations

import torch

from graphpass.encoder.adapters.fixed import FixedSizeAdapter

__all__ = ["ClipAdapter"]


class ClipAdapter(FixedSizeAdapter):
    """The adapter for ``CLIPVisionModel``."""

    @property
    def _has_pooler(self) -> bool:
        return True

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tower.pre_layrnorm(self.tower.embeddings(pixel_values))
        return embedded

    def _finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden, self.tower.post_layernorm(hidden[:, 0])
