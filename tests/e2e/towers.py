"""Stock vision towers of Hugging Face, tiny and seeded, random sets of images, and what towers return of each."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.e2e.hugging_face import Place

Grid = tuple[int, int, int]
Result = tuple[torch.Tensor, ...]
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
GRID_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "rope_parameters": ROPE}
FIXED_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
IMAGE = {"image_size": 16, "patch_size": 4}


@dataclass(frozen=True, slots=True)
class Tower:
    """One tower class, its tiny configuration, and how its items are made and its results read."""

    name: str  #: of the class
    family: str  #: its module's name in transformers
    config: Mapping[str, Any]  #: what differs from the configuration's defaults
    has_grids: bool  #: images of any size, in patches with a grid; else all of one size
    options: Mapping[str, Any]  #: of its adapter

    def __str__(self) -> str:
        return self.family

    def build(self, place: Place, **config: Any) -> Any:
        """The tower with weights under which attention, position and window matter."""
        pytest.importorskip("transformers")
        modeling = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        kind = getattr(modeling, self.name)
        tower = kind(kind.config_class(**{**self.config, **config})).eval()
        seeded = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in tower.parameters():
                noise = torch.randn(weight.shape, generator=seeded)
                if weight.dim() > 1:
                    weight.copy_(noise * 1.5 / math.sqrt(weight[0].numel()))
                else:
                    weight.copy_(1 + 0.2 * noise)
        return tower.to(place.device, place.dtype)

    def items(self, tower: Any, sizes: Sequence[Grid], seed: int = 0) -> dict[str, torch.Tensor]:
        """Random pixels: of these grids, or as many images of the one size."""
        seeded = torch.Generator().manual_seed(seed)
        weight = next(tower.parameters())
        if not self.has_grids:
            side = tower.config.image_size
            pixels = torch.randn(len(sizes), 3, side, side, generator=seeded)
            return {"pixel_values": pixels.to(weight.device, weight.dtype)}
        num_patches = sum(math.prod(grid) for grid in sizes)
        width = tower.patch_embed.proj.weight[0].numel()
        pixels = torch.randn(num_patches, width, generator=seeded)
        grids = torch.tensor(list(sizes)).view(-1, 3)
        return {"pixel_values": pixels.to(weight.device, weight.dtype), "image_grid_thw": grids}

    def stock(self, tower: Any, items: Mapping[str, torch.Tensor]) -> list[Result]:
        """What the untouched tower returns of each item by itself."""
        results = []
        with torch.no_grad():
            if not self.has_grids:
                for image in items["pixel_values"].split(1):
                    output = tower(pixel_values=image)
                    pooled = () if output.pooler_output is None else (output.pooler_output[0],)
                    results.append((output.last_hidden_state[0], *pooled))
                return results
            grids = items["image_grid_thw"]
            for pixels, grid in zip(items["pixel_values"].split(grids.prod(1).tolist()), grids, strict=True):
                output = tower(pixels, grid.view(1, 3).to(pixels.device))
                results.append((output.pooler_output, *(getattr(output, "deepstack_features", None) or ())))
        return results

    def random_sizes(self, seeded: random.Random, most: int = 6) -> list[Grid]:
        """One to ``most`` images of any shape, among them clips, thin strips and single tokens."""
        count = seeded.randint(1, most)
        sides = [2, 2, 4, 6, 8, 10, 14]
        return [(seeded.choice([1, 1, 1, 2, 3]), seeded.choice(sides), seeded.choice(sides)) for _ in range(count)]


QWEN2_5_VL = Tower(
    "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen2_5_vl",
    {**GRID_TOWER, "num_heads": 4, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 24},
    has_grids=True,
    options={"min_tokens": 4, "max_tokens": 256, "max_items": 8, "max_frames": 16},
)
QWEN3_VL = Tower(
    "Qwen3VLVisionModel",
    "qwen3_vl",
    {
        **GRID_TOWER,
        "num_heads": 2,
        "out_hidden_size": 24,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
    has_grids=True,
    options=QWEN2_5_VL.options,
)
SIGLIP = Tower("SiglipVisionModel", "siglip", {**FIXED_TOWER, **IMAGE}, has_grids=False, options={"max_items": 8})
CLIP = Tower("CLIPVisionModel", "clip", {**FIXED_TOWER, **IMAGE}, has_grids=False, options={"max_items": 8})
TOWERS = (QWEN2_5_VL, QWEN3_VL, SIGLIP, CLIP)
EACH_TOWER: Callable[..., Any] = pytest.mark.parametrize("stock", TOWERS, ids=str)
