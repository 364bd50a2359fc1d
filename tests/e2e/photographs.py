"""Photographs of scikit-image, cut to many sizes and shapes, and the models' own processors without torchvision."""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np
import pytest

from tests.e2e.towers import QWEN2_5_VL, QWEN3_VL, SIGLIP, Tower

_NAMES = ("astronaut", "chelsea", "coffee", "rocket")
_CLASSES = {
    QWEN2_5_VL.family: ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    QWEN3_VL.family: ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    SIGLIP.family: ("siglip", "SiglipImageProcessorPil"),
    "clip": ("clip", "CLIPImageProcessorPil"),
}


def cut_photographs(seeded: random.Random, count: int, *, least: int = 24) -> list[Any]:
    """Parts of photographs, of any aspect ratio up to about 1 to 10."""
    photographs = pytest.importorskip("skimage.data")
    from PIL import Image

    cut = []
    for _ in range(count):
        whole = getattr(photographs, seeded.choice(_NAMES))()
        height, width = (seeded.randint(least, side) for side in whole.shape[:2])
        top, left = seeded.randint(0, whole.shape[0] - height), seeded.randint(0, whole.shape[1] - width)
        cut.append(Image.fromarray(np.ascontiguousarray(whole[top : top + height, left : left + width])))
    return cut


def processor_of(stock: Tower, tower: Any, *, max_pixels: int) -> Any:
    """The image processor that comes with the tower, over Pillow, with the tower's sizes."""
    family, name = _CLASSES[stock.family]
    kind = getattr(importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}"), name)
    if stock.has_grids:
        config = tower.config
        return kind(
            patch_size=config.patch_size, merge_size=config.spatial_merge_size, min_pixels=256, max_pixels=max_pixels
        )
    side = {"height": tower.config.image_size, "width": tower.config.image_size}
    return kind(size=side, do_center_crop=False) if stock.family == "clip" else kind(size=side)
