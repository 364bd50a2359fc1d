"""Stock models of text and images, tiny and seeded, and prompts with images of any size."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.e2e.hugging_face import far_from_initial
from tests.e2e.towers import LEVELS, SMALL, WINDOWS, patches_of

IMAGE_TOKEN, VOCABULARY = 90, 97
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
TOKENS = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    "image_start_token_id": 92, "image_end_token_id": 93, "video_start_token_id": 94, "video_end_token_id": 95,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vlm:
    """A stock model that generates text of images."""

    family: str  #: its modeling file
    name: str  #: its class
    vision: Mapping[str, Any] = field(default_factory=dict)  #: of its tower, beside ``SMALL``
    text: Mapping[str, Any] = field(default_factory=dict)  #: of its text model, beside ``TEXT``
    shape: tuple[int, ...] = (96,)  #: of a patch

    def __str__(self) -> str:
        return self.family

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """The model with seeded weights, in eval mode."""
        kind = getattr(importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}"), self.name)
        config = kind.config_class(
            vision_config={**SMALL, "out_hidden_size": 32, **self.vision},
            text_config={**TEXT, **self.text},
            tie_word_embeddings=False,
            **TOKENS,
        )
        torch.manual_seed(0)
        model = kind(config).eval()
        far_from_initial(model, 1.5)
        return model.to(device, dtype)

    def prompt(self, model: Any, num_images: int, seed: int) -> dict[str, torch.Tensor]:
        """One prompt with images of random sizes between its words."""
        seeded, weight = random.Random(seed), next(model.parameters())
        grids = [(1, 2 * seeded.randint(1, 8), 2 * seeded.randint(1, 8)) for _ in range(num_images)]
        ids = [5, 7]
        for _, height, width in grids:
            ids += [92, *[IMAGE_TOKEN] * (height * width // 4), 93, seeded.randint(5, 80)]
        tokens = torch.tensor([ids], device=weight.device)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
            "pixel_values": patches_of(grids, self.shape, weight, seed),
            "image_grid_thw": torch.tensor(grids, device=weight.device),
        }


VLMS = (
    Vlm("qwen3_vl", "Qwen3VLForConditionalGeneration", LEVELS),
    Vlm("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", WINDOWS),
    Vlm("qwen2_vl", "Qwen2VLForConditionalGeneration", {"embed_dim": 32, "hidden_size": 32}),
    Vlm("glm4v", "Glm4vForConditionalGeneration"),
    Vlm("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", shape=(3, 4, 4)),
)
