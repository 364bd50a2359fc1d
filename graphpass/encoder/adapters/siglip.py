"""The adapter for SigLIP. The positions of an image are its patches; an attention head pools them."""

from __future__ import annotations

import torch

from graphpass.encoder.adapters.fixed import FixedSizeAdapter

__all__ = ["SiglipAdapter"]


class SiglipAdapter(FixedSizeAdapter):
    """The adapter for ``SiglipVisionModel``. Without the head (``vision_use_head=False``) there is no pooled output."""

    @property
    def _has_pooler(self) -> bool:
        return bool(self.tower.use_head)

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tower.embeddings(pixel_values)
        return embedded

    def _finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        last = self.tower.post_layernorm(hidden)
        return last, self.tower.head(last) if self.tower.use_head else None
