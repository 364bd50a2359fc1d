"""Photographs of scikit-image, cut to many sizes and shapes, and the models' own processors without torchvision."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

_NAMES = ("astronaut", "chelsea", "coffee", "rocket")


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
