"""What describes a stock encoder of transformers: its class, a small configuration with seeded weights, its inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

Tensors = dict[str, torch.Tensor]
Inputs = Callable[[int, int], Tensors]
"""``inputs(batch, length)``: the tensors of a batch; ``length`` is ignored where a model takes one size."""

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = {**LAYERS, "image_size": 16, "patch_size": 4}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
SOUND = {**TEXT, **CONVOLUTIONS, "vocab_size": 32, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
CLIP_TEXT = {**TEXT, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}


@dataclass(frozen=True, slots=True)
class StockEncoder:
    """A stock class of transformers.

    Attributes:
        kind: text, images or sound.
        name: the class, in ``transformers`` or in the module ``of``.
        config: the class of its configuration, in ``transformers``.
        settings: the arguments of the configuration.
        inputs: makes a batch.
        of: module of the class below ``transformers.models``; empty: ``transformers``.
        lengths: the lengths of batches; one where the model takes one size.
    """

    kind: str
    name: str
    config: str
    settings: Mapping[str, Any]
    inputs: Inputs
    of: str = ""
    lengths: tuple[int, ...] = (1,)

    def build(self) -> Any:
        """The model with seeded weights, in eval mode."""
        torch.manual_seed(0)
        home: Any = importlib.import_module(f"transformers.models.{self.of}") if self.of else hf
        config = getattr(hf, self.config)(**self.settings)
        return getattr(home, self.name)(config).eval()


def masked_tokens(batch: int, length: int, vocabulary: int = 99) -> Tensors:
    """Token ids with a mask that hides some of the last ones."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {"input_ids": torch.randint(3, vocabulary, (batch, length)), "attention_mask": mask.long()}


def tokens(batch: int, length: int) -> Tensors:
    return {"input_ids": torch.randint(3, 99, (batch, length))}


def characters(batch: int, length: int) -> Tensors:
    return masked_tokens(batch, length, 1000)


def boxes(batch: int, length: int) -> Tensors:
    corner = torch.randint(0, 500, (batch, length, 2))
    return {**masked_tokens(batch, length), "bbox": torch.cat([corner, corner + 20], dim=-1)}


def images(side: int, channels: int = 3) -> Inputs:
    return lambda batch, length: {"pixel_values": torch.randn(batch, channels, side, side)}


def images_with_noise(batch: int, length: int) -> Tensors:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "noise": torch.rand(batch, 16)}


def clips(batch: int, length: int) -> Tensors:
    return {"pixel_values": torch.randn(batch, 4, 3, 16, 16)}


def pixels(batch: int, length: int) -> Tensors:
    """Images as sequences of colours."""
    return {"input_ids": torch.randint(0, 99, (batch, 16))}


def samples(batch: int, length: int) -> Tensors:
    return {"input_values": torch.randn(batch, length)}


def channel_of_samples(batch: int, length: int) -> Tensors:
    return {"input_values": torch.randn(batch, 1, length)}


def spectrogram(frames: int, features: int, name: str = "input_features") -> Inputs:
    return lambda batch, length: {name: torch.randn(batch, frames, features)}


def frames(batch: int, length: int) -> Tensors:
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {"input_features": torch.randn(batch, length, 8), "attention_mask": mask.long()}


def text(name: str, config: str, of: str = "", inputs: Inputs = masked_tokens, **settings: Any) -> StockEncoder:
    return StockEncoder("text", name, config, settings, inputs, of, (9, 16))


def vision(name: str, config: str, of: str = "", inputs: Inputs | None = None, **settings: Any) -> StockEncoder:
    return StockEncoder("images", name, config, settings, inputs or images(16), of)


def sound(
    name: str,
    config: str,
    of: str = "",
    inputs: Inputs = samples,
    lengths: tuple[int, ...] = (400, 600),
    **settings: Any,
) -> StockEncoder:
    return StockEncoder("sound", name, config, settings, inputs, of, lengths)


def named(*encoders: StockEncoder) -> dict[str, StockEncoder]:
    return {encoder.name: encoder for encoder in encoders}
