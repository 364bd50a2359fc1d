"""Every stock encoder of the table in docs/models.md: class, small configuration with seeded weights, and inputs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Inputs = Callable[[int, int], Tensors]
"""``inputs(batch, length)``: the tensors of a batch; ``length`` is ignored where a model takes one size."""


@dataclass(frozen=True, slots=True)
class StockEncoder:
    """A stock class, small."""

    kind: str  #: text, images or sound
    name: str  #: the class
    make: Callable[[], Any]
    inputs: Inputs
    lengths: tuple[int, ...] = (1,)  #: the lengths of batches; one where the model takes one size

    def build(self) -> Any:
        """The model with seeded weights, in eval mode."""
        torch.manual_seed(0)
        return self.make().eval()


def stock(name: str, of: str, config: str, settings: dict[str, Any]) -> Any:
    """A model of transformers; ``of`` is its module below ``transformers.models`` where ``transformers`` lacks it."""
    hf, module = importlib.import_module("transformers"), of if not of or "." in of else f"{of}.modeling_{of}"
    kind = getattr(importlib.import_module(f"transformers.models.{module}") if module else hf, name)
    return kind((getattr(hf, config) if config else kind.config_class)(**settings))


# -- inputs -----------------------------------------------------------------------------------------------------------


def masked_tokens(batch: int, length: int, vocabulary: int = 99) -> Tensors:
    """Token ids with a mask that hides some of the last ones."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {"input_ids": torch.randint(3, vocabulary, (batch, length)), "attention_mask": mask.long()}


def tokens(batch: int, length: int) -> Tensors:
    return {"input_ids": torch.randint(3, 99, (batch, length))}


def boxes(batch: int, length: int) -> Tensors:
    corner = torch.randint(0, 500, (batch, length, 2))
    return {**masked_tokens(batch, length), "bbox": torch.cat([corner, corner + 20], dim=-1)}


def images(side: int) -> Inputs:
    return lambda batch, _: {"pixel_values": torch.randn(batch, 3, side, side)}


def clips(batch: int, _: int) -> Tensors:
    return {"pixel_values": torch.randn(batch, 4, 3, 16, 16)}


def samples(batch: int, length: int) -> Tensors:
    return {"input_values": torch.randn(batch, length)}


def spectrogram(frames: int, features: int, name: str = "input_features") -> Inputs:
    return lambda batch, _: {name: torch.randn(batch, frames, features)}


def features(batch: int, length: int) -> Tensors:
    return {"input_features": torch.randn(batch, length, 8)}


def masked_features(batch: int, length: int) -> Tensors:
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {**features(batch, length), "attention_mask": mask.long()}


# -- the table --------------------------------------------------------------------------------------------------------


def _row(
    kind: str, lengths: tuple[int, ...], inputs: Inputs, name: str, of: str = "", config: str = "", **settings: Any
) -> StockEncoder:
    return StockEncoder(kind, name, functools.partial(stock, name, of, config, settings), inputs, lengths)


text = functools.partial(_row, "text", (9, 16))
masked_text = functools.partial(text, masked_tokens)
vision = functools.partial(_row, "images", (1,))
image16, image32, clip = (functools.partial(vision, inputs) for inputs in (images(16), images(32), clips))
sound = functools.partial(_row, "sound")
sampled = functools.partial(sound, (400, 600), samples)


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**LAYERS, "vocab_size": 99}
PATCHES = {**LAYERS, "image_size": 16, "patch_size": 4}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
SOUND = {**TEXT, **CONVOLUTIONS, "vocab_size": 32, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
BART = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_layers": 1,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}  # fmt: skip
CLIP_TEXT = {**TEXT, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
FUNNEL = {"vocab_size": 99, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]}
XLM = {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
SWIN = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 2, "image_size": 16, "patch_size": 4}
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "strides": [4, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}  # fmt: skip
SEGMENTS = {**STAGES, "sr_ratios": [2, 1], "patch_sizes": [7, 3]}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}

_TEXTS = (
    *(masked_text(f"{name}Model", **TEXT) for name in ("Bert", "Roberta", "MPNet", "XLMRoberta", "XLMRobertaXL",
        "Camembert", "MegatronBert", "Data2VecText", "IBert", "Splinter", "ChineseCLIPText", "RobertaPreLayerNorm",
        "Ernie")),
    masked_text("DistilBertModel", dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=99),
    *(masked_text(f"{name}EncoderModel", **T5) for name in ("T5", "MT5", "UMT5")),
    masked_text("LongT5EncoderModel", **T5, local_radius=3, encoder_attention_type="local"),
    *(masked_text(f"{name}Model", **DEBERTA) for name in ("Deberta", "DebertaV2")),
    *(masked_text(f"{name}Model", **TEXT, embedding_size=16) for name in ("Electra", "Albert")),
    masked_text("ModernBertModel", **TEXT, max_position_embeddings=64, local_attention=8, pad_token_id=0),
    masked_text("SqueezeBertModel", **TEXT, embedding_size=32),
    masked_text("MobileBertModel", **TEXT, embedding_size=16, intra_bottleneck_size=16),
    *(masked_text(f"{name}Model", config="FunnelConfig", **FUNNEL) for name in ("Funnel", "FunnelBase")),
    masked_text("RemBertModel", **TEXT, input_embedding_size=16),
    masked_text("RoFormerModel", **TEXT, embedding_size=16, max_position_embeddings=64),
    text(functools.partial(masked_tokens, vocabulary=1000), "CanineModel", **without(TEXT, "vocab_size"),
        local_transformer_stride=8, downsampling_rate=4, num_hash_buckets=64),
    masked_text("XmodModel", **TEXT, languages=("en_XX",), default_language="en_XX"),
    masked_text("XLNetModel", vocab_size=99, d_model=32, n_layer=2, n_head=2, d_inner=64),
    masked_text("EuroBertModel", **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=1,
        max_position_embeddings=64),
    masked_text("BigBirdModel", **TEXT, attention_type="original_full"),
    *(masked_text(f"{name}TextModel", **CLIP_TEXT) for name in ("CLIP", "GroupViT", "XCLIP", "MetaClip2")),
    masked_text("CLIPTextModelWithProjection", **CLIP_TEXT, projection_dim=16),
    masked_text("AltCLIPTextModel", of="altclip", **TEXT, project_dim=16),
    masked_text("Aimv2TextModel", config="Aimv2TextConfig", **TEXT, max_position_embeddings=64, eos_token_id=2),
    *(masked_text(f"{name}Model", **TEXT, max_position_embeddings=64)
        for name in ("SiglipText", "Siglip2Text", "NomicBert")),
    *(masked_text(f"{name}Model", **XLM) for name in ("Flaubert", "XLM")),
    masked_text("LongformerModel", **TEXT, attention_window=[8, 8], max_position_embeddings=64),
    masked_text("RoCBertModel", config="RoCBertConfig", **TEXT, enable_pronunciation=False, enable_shape=False),
    masked_text("ConvBertModel", **TEXT, embedding_size=16, conv_kernel_size=3),
    masked_text("EsmModel", **TEXT, pad_token_id=1, position_embedding_type="rotary"),
    text(tokens, "FNetModel", **without(TEXT, "num_attention_heads")),
    text(boxes, "LayoutLMModel", **TEXT, max_2d_position_embeddings=1024),
    text(boxes, "LiltModel", **{**TEXT, "hidden_size": 48}, max_2d_position_embeddings=1024, channel_shrink_ratio=2),
    masked_text("LukeModel", **TEXT, entity_vocab_size=8, entity_emb_size=8),
    masked_text("YosoModel", **TEXT, use_expectation=True),
    *(masked_text(f"{name}Encoder", name.lower(), **BART)
        for name in ("Pegasus", "Bart", "MBart", "Marian", "Blenderbot")),
    masked_text("M2M100Encoder", "m2m_100", **BART),
    masked_text("LEDEncoder", "led", **without(BART, "max_position_embeddings"), attention_window=[8, 8],
        max_encoder_position_embeddings=64),
    masked_text("BlipTextModel", "blip.modeling_blip_text", **TEXT),
)  # fmt: skip

_VISIONS = (
    *(image16(f"{name}Model", **PATCHES) for name in ("ViT", "DeiT", "Beit", "Data2VecVision", "Dinov2",
        "Dinov2WithRegisters", "DINOv3ViT", "IJepa", "ViTMSN", "CLIPVision", "SiglipVision", "Aimv2Vision",
        "BlipVision", "Blip2Vision", "ChineseCLIPVision", "MLCDVision", "MetaClip2Vision", "DPT", "Pixio",
        "InstructBlipVision", "Owlv2Vision", "OwlViTVision", "CLIPSegVision")),
    *(image16(name, of, **PATCHES) for name, of in (("AltCLIPVisionModel", "altclip"), ("GitVisionModel", "git"),
        ("Kosmos2VisionModel", "kosmos2"), ("Idefics3VisionTransformer", "idefics3"))),
    vision(lambda batch, _: {**images(16)(batch, 1), "noise": torch.rand(batch, 16)}, "ViTMAEModel", **PATCHES,
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32),
    image16("YolosModel", **{**PATCHES, "image_size": [16, 16]}, num_detection_tokens=4),
    image16("InternVLVisionModel", **{**PATCHES, "image_size": [16, 16], "patch_size": [4, 4]}),
    *(image16(f"{name}Model", **SWIN) for name in ("Swin", "Swinv2", "DonutSwin")),
    image32("PoolFormerModel", depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16]),
    image32("PvtModel", **STAGES, image_size=32, sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2]),
    *(image32(f"{name}Model", **SEGMENTS) for name in ("Segformer", "GLPN")),
    image32("ConvNextModel", **CONVNEXT, image_size=32),
    image32("ConvNextV2Model", **CONVNEXT),
    image32("ResNetModel", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    image32("RegNetModel", embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], groups_width=8),
    *(image32(f"{name}Model", depth_multiplier=0.25, image_size=32) for name in ("MobileNetV1", "MobileNetV2")),
    image32("EfficientNetModel", image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320),
    image32("TextNetModel", stem_out_channels=8, hidden_sizes=[8, 8, 8, 8, 8],
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 3]], [[3, 3]], [[3, 3]]], conv_layer_strides=[[2], [2], [2], [2]]),
    clip("VivitModel", **{**LAYERS, "image_size": 16}, num_frames=4, tubelet_size=[2, 4, 4]),
    *(clip(f"{name}Model", **PATCHES, num_frames=4) for name in ("Timesformer", "VideoMAE")),
    image32("BitModel", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4),
    image32("DINOv3ConvNextModel", hidden_sizes=[8, 8, 16, 16], depths=[1] * 4),
    image32("FocalNetModel", image_size=32, embed_dim=8, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]),
    image32("HieraModel", image_size=[32, 32], embed_dim=8, depths=[1, 1], num_heads=[1, 2], embed_dim_multiplier=2.0,
        num_query_pool=1, query_stride=[2, 2], masked_unit_size=[2, 2], masked_unit_attention=[True, False]),
    vision(images(64), "LevitModel", image_size=64, hidden_sizes=[16, 16, 16], num_attention_heads=[1, 1, 1],
        depths=[1, 1, 1], key_dim=[8, 8, 8]),
    image16("GroupViTVisionModel", **{**PATCHES, "num_hidden_layers": 3}, depths=[1, 1, 1], num_group_tokens=[4, 4, 0],
        num_output_groups=[4, 4, 0]),
    image16("CLIPVisionModelWithProjection", **PATCHES, projection_dim=16),
    image32("MobileViTModel", image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 8],
        num_attention_heads=2),
    vision(images(64), "MobileViTV2Model", image_size=64, width_multiplier=0.25),
    image32("PvtV2Model", image_size=32, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2]),
    image32("SwiftFormerModel", embed_dims=[8, 8, 16, 16], depths=[1] * 4),
    image16("Swin2SRModel", image_size=16, embed_dim=16, depths=[1], num_heads=[2], window_size=4, upscale=2),
    image16("VitDetModel", **without(PATCHES, "intermediate_size")),
    vision(lambda batch, _: {"input_ids": torch.randint(0, 99, (batch, 16))}, "ImageGPTModel", vocab_size=99,
        n_positions=64, n_embd=32, n_layer=2, n_head=2),
)  # fmt: skip

_SOUNDS = (
    sound((1,), spectrogram(8, 20), "WhisperEncoder", "whisper", d_model=32, encoder_layers=2,
        encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10),
    *(sampled(f"{name}Model", **SOUND) for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat")),
    sampled("Data2VecAudioModel", **{**SOUND, "num_conv_pos_embeddings": 2}, conv_pos_kernel_size=3),
    sampled("Wav2Vec2ConformerModel", **SOUND, conv_depthwise_kernel_size=3),
    sampled("SEWModel", **SOUND, squeeze_factor=2),
    sampled("SEWDModel", **SOUND, squeeze_factor=2, max_position_embeddings=64),
    sound((12, 20), masked_features, "Wav2Vec2BertModel", **TEXT, feature_projection_input_dim=8,
        conv_depthwise_kernel_size=3),
    sound((1,), spectrogram(24, 16, "input_values"), "ASTModel", **LAYERS, patch_size=4, frequency_stride=4,
        time_stride=4, max_length=24, num_mel_bins=16),
    sound((16, 24), features, "Speech2TextEncoder", "speech_to_text", **BART, input_feat_per_channel=8,
        conv_channels=16, max_source_positions=64),
    sound((2000, 3000), samples, "MoonshineEncoder", "moonshine", hidden_size=32, intermediate_size=64,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=1, encoder_num_attention_heads=2,
        decoder_num_attention_heads=2, vocab_size=99),
    sound((400,), lambda batch, length: {"input_values": torch.randn(batch, 1, length)}, "EncodecModel", num_filters=4,
        hidden_size=16, upsampling_ratios=[4, 2], num_lstm_layers=1, codebook_size=16, target_bandwidths=[24.0]),
    sound((32, 48), features, "ParakeetEncoder", **LAYERS, num_mel_bins=8, conv_kernel_size=3,
        subsampling_conv_channels=8),
)  # fmt: skip

ENCODERS = {row.name: row for row in (*_TEXTS, *_VISIONS, *_SOUNDS)}
