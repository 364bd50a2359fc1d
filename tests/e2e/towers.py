"""Towers of modeling files of transformers, small and seeded: all that take tables of grids, and some of one size.

With random sets of images, and what the towers return of each.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.e2e.hugging_face import CPU, Place, far_from_initial

Grid = tuple[int, int, int]
Result = tuple[torch.Tensor, ...]
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
SMALL = {
    "depth": 3, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "patch_size": 4, "image_size": 20, "num_position_embeddings": 25, "out_hidden_size": 24, "rope_parameters": ROPE,
}  # fmt: skip
IMAGES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
"""Of a tower of one size."""
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
LEVELS = {"deepstack_visual_indexes": [0, 2]}


@dataclass(frozen=True, slots=True)
class Tower:
    """A modeling file, and the tower that its image features call."""

    family: str  #: the modeling file
    name: str  #: the class of the tower
    config: Mapping[str, Any] = field(default_factory=dict)  #: what differs from ``SMALL`` or ``IMAGES``
    has_clips: bool = True  #: its tower takes clips of several temporal slices
    of: str = ""  #: the modeling file of the tower, if it is another one
    has_grids: bool = True  #: it takes images of any size; else of ``config.image_size`` alone

    def __str__(self) -> str:
        return self.family

    @property
    def is_there(self) -> bool:
        """Whether this transformers has it."""
        return importlib.util.find_spec(f"transformers.models.{self.family}") is not None

    @property
    def options(self) -> dict[str, int]:
        """Of an adapter for a few small images."""
        return (
            {"min_tokens": 4, "max_tokens": 256, "max_items": 8, "max_frames": 16}
            if self.has_grids
            else {"max_items": 8}
        )

    def build(self, place: Place = CPU, **config: Any) -> Any:
        """The tower, with weights under which attention, positions and windows matter."""
        pytest.importorskip("transformers")
        of = self.of or self.family
        modeling = importlib.import_module(f"transformers.models.{of}.modeling_{of}")
        kind = getattr(modeling, self.name)
        torch.manual_seed(0)
        tower = kind(kind.config_class(**{**(SMALL if self.has_grids else IMAGES), **self.config, **config})).eval()
        far_from_initial(tower)
        return tower.to(place.device, place.dtype)

    def items(self, tower: Any, sizes: Sequence[Grid], seed: int = 0) -> dict[str, torch.Tensor]:
        """Random pixels: of these grids, or as many images of the one size."""
        weight = next(tower.parameters())
        if not self.has_grids:
            side = tower.config.image_size
            return {"pixel_values": patches_of([(1, 1, 1)] * len(sizes), (3, side, side), weight, seed)}
        shape = (tower.patch_embed.proj.weight[0].numel(),)
        grids = torch.tensor(list(sizes)).view(-1, 3)
        return {"pixel_values": patches_of(sizes, shape, weight, seed), "image_grid_thw": grids}

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

    def random_sizes(self, seeded: random.Random) -> list[Grid]:
        """One to six small images of any shape, among them clips, thin strips and single tokens."""
        count = seeded.randint(1, 6)
        sides = [2, 2, 4, 6, 8, 10, 14]
        return [(seeded.choice([1, 1, 1, 2, 3]), seeded.choice(sides), seeded.choice(sides)) for _ in range(count)]

    def sizes(self, seeded: random.Random) -> list[Grid]:
        """Grids of one to five images, and clips if it takes them; as many rows as images of one size."""
        if not self.has_grids:
            return [(1, 1, 1)] * seeded.randint(1, 99)
        frames = [1, 1, 1, 2, 3] if self.has_clips else [1]
        sides = range(2, 22, 2)
        return [
            (seeded.choice(frames), seeded.choice(sides), seeded.choice(sides)) for _ in range(seeded.randint(1, 5))
        ]


def of_one_size(name: str, tower: str, **config: Any) -> Tower:
    return Tower(name, tower, config, has_clips=False, has_grids=False)


def patches_of(grids: Sequence[Grid], shape: Sequence[int], weight: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Random patches of these grids."""
    seeded = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(math.prod, grids)), *shape, generator=seeded).to(weight)


FAMILIES = (
    Tower("cohere_compass", "CohereCompassVisionModel", LEVELS),
    Tower("cosmos3_edge", "Cosmos3EdgeVisionModel", {"num_patches": 25}),
    Tower("cosmos3_omni", "Qwen3VLVisionModel", LEVELS, of="qwen3_vl"),
    Tower(
        "dots3_note",
        "Dots3NoteVisionModel",
        {"adapter_in_dim": 32, "adapter_out_dim": 24, "pyramid_num_routed": [-1, -1, 4], "moe_intermediate_size": 24},
    ),
    Tower("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
    Tower("exaone4_5", "Exaone4_5_VisionModel", {**WINDOWS, "num_key_value_heads": 2}),
    Tower("glm46v", "Glm4vVisionModel", has_clips=False, of="glm4v"),
    Tower("glm4v", "Glm4vVisionModel", has_clips=False),
    Tower("glm4v_moe", "Glm4vMoeVisionModel", has_clips=False),
    Tower("glm5_next", "Glm5NextVisionModel", {"projection_intermediate_size": 40}),
    Tower("glm_image", "GlmImageVisionModel", has_clips=False),
    Tower("glm_ocr", "GlmOcrVisionModel"),
    Tower("hunyuan_vl", "HunYuanVLVisionTransformer", has_clips=False),
    Tower("hy_v4_vl", "HYV4VLVisionModel", has_clips=False),
    Tower("hyperclovax_vision_v2", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS, of="qwen2_5_vl"),
    Tower("lfm3_vl", "Lfm3VlVisionModel", {"num_key_value_heads": 2}),
    Tower("paddleocr_vl", "PaddleOCRVisionModel", has_clips=False),
    Tower("qwen2_5_omni", "Qwen2_5OmniVisionEncoder", WINDOWS),
    Tower("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS),
    Tower("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 32, "hidden_size": 24}),
    Tower("qwen3_5", "Qwen3_5VisionModel"),
    Tower("qwen3_5_moe", "Qwen3_5MoeVisionModel"),
    Tower("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", LEVELS),
    Tower("qwen3_vl", "Qwen3VLVisionModel", LEVELS),
    Tower("qwen3_vl_moe", "Qwen3VLMoeVisionModel", LEVELS),
    Tower("qwen4_exp", "Qwen4ExpVisionModel"),
    Tower("video_llama_3", "VideoLlama3VisionModel"),
    of_one_size("aimv2", "Aimv2VisionModel"),
    of_one_size("beit", "BeitModel"),
    of_one_size("blip", "BlipVisionModel"),
    of_one_size("clip", "CLIPVisionModel"),
    of_one_size("deit", "DeiTModel"),
    of_one_size("dinov2", "Dinov2Model"),
    of_one_size("dinov2_with_registers", "Dinov2WithRegistersModel"),
    of_one_size("dinov3_vit", "DINOv3ViTModel"),
    of_one_size("ijepa", "IJepaModel"),
    of_one_size("internvl", "InternVLVisionModel", image_size=(16, 16), patch_size=(4, 4)),
    of_one_size("metaclip_2", "MetaClip2VisionModel"),
    of_one_size("siglip", "SiglipVisionModel"),
    of_one_size("siglip2", "Siglip2VisionModel"),
    of_one_size("vit", "ViTModel"),
)
QWEN2_5_VL, QWEN3_VL, SIGLIP, CLIP = TOWERS = tuple(
    tower for name in ("qwen2_5_vl", "qwen3_vl", "siglip", "clip") for tower in FAMILIES if str(tower) == name
)
"""Those of the longer tests."""
EACH_TOWER: Callable[..., Any] = pytest.mark.parametrize("stock", TOWERS, ids=str)
