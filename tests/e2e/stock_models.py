"""Stock classes of transformers, tiny and with seeded random weights, and inputs for them at any batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

Inputs = Callable[[int], dict[str, torch.Tensor]]

_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_PATCHES = {**_VISION, "image_size": 16, "patch_size": 4}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "use_cache": False, "max_position_embeddings": 64}
_SOUND = {**_TEXT, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}


def masked_tokens(n: int) -> dict[str, torch.Tensor]:
    """Token ids with a mask that hides some of the last ones."""
    mask = torch.arange(9) < torch.randint(4, 10, (n, 1))
    return {"input_ids": torch.randint(3, 99, (n, 9)), "attention_mask": mask.long()}


def tokens(n: int) -> dict[str, torch.Tensor]:
    """Token ids alone."""
    return {"input_ids": torch.randint(3, 99, (n, 9))}


def images(size: int) -> Inputs:
    """Images of one size."""
    return lambda n: {"pixel_values": torch.randn(n, 3, size, size)}


def sound(n: int) -> dict[str, torch.Tensor]:
    """Samples."""
    return {"input_values": torch.randn(n, 400)}


def spectrogram(n: int) -> dict[str, torch.Tensor]:
    """Log-mel features of Whisper."""
    return {"input_features": torch.randn(n, 8, 20)}


def _whisper() -> torch.nn.Module:
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=10,
    )
    return hf.models.whisper.modeling_whisper.WhisperEncoder(config)


MODELS: dict[str, tuple[Callable[[], Any], Inputs]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**_TEXT)), masked_tokens),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**_TEXT)), masked_tokens),
    "distilbert": (lambda: hf.DistilBertModel(hf.DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64,
        vocab_size=99)), masked_tokens),
    "albert": (lambda: hf.AlbertModel(hf.AlbertConfig(**_TEXT, embedding_size=16)), masked_tokens),
    "electra": (lambda: hf.ElectraModel(hf.ElectraConfig(**_TEXT, embedding_size=16)), masked_tokens),
    "mpnet": (lambda: hf.MPNetModel(hf.MPNetConfig(**_TEXT)), masked_tokens),
    "t5 encoder": (lambda: hf.T5EncoderModel(hf.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        vocab_size=99)), masked_tokens),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**_PATCHES)), images(16)),
    "deit": (lambda: hf.DeiTModel(hf.DeiTConfig(**_PATCHES)), images(16)),
    "beit": (lambda: hf.BeitModel(hf.BeitConfig(**_PATCHES)), images(16)),
    "dinov2": (lambda: hf.Dinov2Model(hf.Dinov2Config(**_PATCHES)), images(16)),
    "clip vision": (lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**_PATCHES)), images(16)),
    "siglip vision": (lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**_PATCHES)), images(16)),
    "swin": (lambda: hf.SwinModel(hf.SwinConfig(embed_dim=16, depths=[2], num_heads=[2], window_size=2, image_size=16,
        patch_size=4)), images(16)),
    "convnext": (lambda: hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        image_size=32)), images(32)),
    "resnet": (lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        images(32)),
    "mobilenet": (lambda: hf.MobileNetV2Model(hf.MobileNetV2Config(depth_multiplier=0.25, image_size=32)),
        images(32)),
    "segformer": (lambda: hf.SegformerModel(hf.SegformerConfig(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2])),
        images(32)),
    "whisper encoder": (_whisper, spectrogram),
    "wav2vec2": (lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**_SOUND, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2)), sound),
    "hubert": (lambda: hf.HubertModel(hf.HubertConfig(**_SOUND, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2)), sound),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)), tokens),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=16)), tokens),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**_DECODER)), tokens),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=64,
        use_cache=False)), tokens),
    "opt": (lambda: hf.OPTForCausalLM(hf.OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ffn_dim=64, vocab_size=99, use_cache=False, max_position_embeddings=64, word_embed_proj_dim=32)), tokens),
}  # fmt: skip
