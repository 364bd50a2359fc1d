"""Towers of modeling files of transformers, small and seeded: all that take tables of grids, and some of one size."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.e2e.hugging_face import far_from_initial

Grid = tuple[int, int, int]
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
class Family:
    """A modeling file, and the tower that its image features call."""

    name: str  #: the modeling file
    tower: str  #: the class of the tower
    config: Mapping[str, Any] = field(default_factory=dict)  #: what differs from ``SMALL`` or ``IMAGES``
    has_clips: bool = True  #: its tower takes clips of several temporal slices
    of: str = ""  #: the modeling file of the tower, if it is another one
    has_grids: bool = True  #: it takes images of any size; else of ``config.image_size`` alone

    def __str__(self) -> str:
        return self.name

    @property
    def is_there(self) -> bool:
        """Whether this transformers has it."""
        return importlib.util.find_spec(f"transformers.models.{self.name}") is not None

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """The tower, with weights under which positions and windows matter."""
        of = self.of or self.name
        modeling = importlib.import_module(f"transformers.models.{of}.modeling_{of}")
        kind = getattr(modeling, self.tower)
        torch.manual_seed(0)
        tower = kind(kind.config_class(**{**(SMALL if self.has_grids else IMAGES), **self.config})).eval()
        far_from_initial(tower)
        return tower.to(device, dtype)

    def sizes(self, seeded: random.Random) -> list[Grid]:
        """Grids of one to five images, and clips if it takes them; as many rows as images of one size."""
        if not self.has_grids:
            return [(1, 1, 1)] * seeded.randint(1, 99)
        frames = [1, 1, 1, 2, 3] if self.has_clips else [1]
        sides = range(2, 22, 2)
        return [
            (seeded.choice(frames), seeded.choice(sides), seeded.choice(sides)) for _ in range(seeded.randint(1, 5))
        ]


def of_one_size(name: str, tower: str, **config: Any) -> Family:
    return Family(name, tower, config, has_clips=False, has_grids=False)


def patches_of(grids: Sequence[Grid], shape: Sequence[int], weight: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Random patches of these grids."""
    seeded = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(math.prod, grids)), *shape, generator=seeded).to(weight)


FAMILIES = (
    Family("cohere_compass", "CohereCompassVisionModel", LEVELS),
    Family("cosmos3_edge", "Cosmos3EdgeVisionModel", {"num_patches": 25}),
    Family("cosmos3_omni", "Qwen3VLVisionModel", LEVELS, of="qwen3_vl"),
    Family(
        "dots3_note",
        "Dots3NoteVisionModel",
        {"adapter_in_dim": 32, "adapter_out_dim": 24, "pyramid_num_routed": [-1, -1, 4], "moe_intermediate_size": 24},
    ),
    Family("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
    Family("exaone4_5", "Exaone4_5_VisionModel", {**WINDOWS, "num_key_value_heads": 2}),
    Family("glm46v", "Glm4vVisionModel", has_clips=False, of="glm4v"),
    Family("glm4v", "Glm4vVisionModel", has_clips=False),
    Family("glm4v_moe", "Glm4vMoeVisionModel", has_clips=False),
    Family("glm5_next", "Glm5NextVisionModel", {"projection_intermediate_size": 40}),
    Family("glm_image", "GlmImageVisionModel", has_clips=False),
    Family("glm_ocr", "GlmOcrVisionModel"),
    Family("hunyuan_vl", "HunYuanVLVisionTransformer", has_clips=False),
    Family("hy_v4_vl", "HYV4VLVisionModel", has_clips=False),
    Family("hyperclovax_vision_v2", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS, of="qwen2_5_vl"),
    Family("lfm3_vl", "Lfm3VlVisionModel", {"num_key_value_heads": 2}),
    Family("paddleocr_vl", "PaddleOCRVisionModel", has_clips=False),
    Family("qwen2_5_omni", "Qwen2_5OmniVisionEncoder", WINDOWS),
    Family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS),
    Family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 32, "hidden_size": 24}),
    Family("qwen3_5", "Qwen3_5VisionModel"),
    Family("qwen3_5_moe", "Qwen3_5MoeVisionModel"),
    Family("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", LEVELS),
    Family("qwen3_vl", "Qwen3VLVisionModel", LEVELS),
    Family("qwen3_vl_moe", "Qwen3VLMoeVisionModel", LEVELS),
    Family("qwen4_exp", "Qwen4ExpVisionModel"),
    Family("video_llama_3", "VideoLlama3VisionModel"),
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
