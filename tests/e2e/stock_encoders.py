"""Stock encoders of transformers for text, images and sound: tiny, with seeded random weights, and their inputs."""

from __future__ import annotations

import functools
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
SOUND = {
    **TEXT,
    **CONVOLUTIONS,
    "vocab_size": 32,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
_BART = {
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
_CLIP_TEXT = {**TEXT, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
_ABSENT = "NoSuchClass"


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
        arguments: further arguments of the class.
    """

    kind: str
    name: str
    config: str
    settings: Mapping[str, Any]
    inputs: Inputs
    of: str = ""
    lengths: tuple[int, ...] = (1,)
    arguments: Mapping[str, Any] = None  # type: ignore[assignment]

    def build(self) -> Any:
        """The model with seeded weights, in eval mode."""
        torch.manual_seed(0)
        home: Any = importlib.import_module(f"transformers.models.{self.of}") if self.of else hf
        config = getattr(hf, self.config)(**self.settings)
        return getattr(home, self.name)(config, **(self.arguments or {})).eval()


def _masked_tokens(batch: int, length: int, vocabulary: int = 99) -> Tensors:
    """Token ids with a mask that hides some of the last ones."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {"input_ids": torch.randint(3, vocabulary, (batch, length)), "attention_mask": mask.long()}


def _tokens(batch: int, length: int) -> Tensors:
    return {"input_ids": torch.randint(3, 99, (batch, length))}


def _characters(batch: int, length: int) -> Tensors:
    return _masked_tokens(batch, length, 1000)


def _boxes(batch: int, length: int) -> Tensors:
    corner = torch.randint(0, 500, (batch, length, 2))
    return {**_masked_tokens(batch, length), "bbox": torch.cat([corner, corner + 20], dim=-1)}


def _images(side: int, channels: int = 3) -> Inputs:
    return lambda batch, length: {"pixel_values": torch.randn(batch, channels, side, side)}


def _clips(batch: int, length: int) -> Tensors:
    return {"pixel_values": torch.randn(batch, 4, 3, 16, 16)}


def _clips_of_videos(batch: int, length: int) -> Tensors:
    return {"pixel_values_videos": torch.randn(batch, 4, 3, 16, 16)}


def _samples(batch: int, length: int) -> Tensors:
    return {"input_values": torch.randn(batch, length)}


def _channel_of_samples(batch: int, length: int) -> Tensors:
    return {"input_values": torch.randn(batch, 1, length)}


def _spectrogram(frames: int, features: int, name: str = "input_features") -> Inputs:
    return lambda batch, length: {name: torch.randn(batch, frames, features)}


def _frames(batch: int, length: int) -> Tensors:
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    return {"input_features": torch.randn(batch, length, 8), "attention_mask": mask.long()}


def _text(name: str, config: str, of: str = "", inputs: Inputs = _masked_tokens, **settings: Any) -> StockEncoder:
    return StockEncoder("text", name, config, settings, inputs, of, (9, 16))


def _vision(name: str, config: str, of: str = "", inputs: Inputs | None = None, **settings: Any) -> StockEncoder:
    return StockEncoder("images", name, config, settings, inputs or _images(16), of)


def _sound(
    name: str,
    config: str,
    of: str = "",
    inputs: Inputs = _samples,
    lengths: tuple[int, ...] = (400, 600),
    **settings: Any,
) -> StockEncoder:
    return StockEncoder("sound", name, config, settings, inputs, of, lengths)


def _named(*encoders: StockEncoder) -> dict[str, StockEncoder]:
    return {encoder.name: encoder for encoder in encoders}


TEXTS = _named(
    _text("BertModel", "BertConfig", **TEXT),
    _text("RobertaModel", "RobertaConfig", **TEXT),
    _text("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=99),
    _text("AlbertModel", "AlbertConfig", **TEXT, embedding_size=16),
    _text("ElectraModel", "ElectraConfig", **TEXT, embedding_size=16),
    _text("MPNetModel", "MPNetConfig", **TEXT),
    _text("T5EncoderModel", "T5Config", **_T5),
    _text("MT5EncoderModel", "MT5Config", **_T5),
    _text("UMT5EncoderModel", "UMT5Config", **_T5),
    _text("LongT5EncoderModel", "LongT5Config", **_T5, local_radius=3, encoder_attention_type="local"),
    _text("XLMRobertaModel", "XLMRobertaConfig", **TEXT),
    _text("XLMRobertaXLModel", "XLMRobertaXLConfig", **TEXT),
    _text("CamembertModel", "CamembertConfig", **TEXT),
    _text("DebertaModel", "DebertaConfig", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _text("DebertaV2Model", "DebertaV2Config", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _text("ModernBertModel", "ModernBertConfig", **TEXT, max_position_embeddings=64, local_attention=8, pad_token_id=0),
    _text("NomicBertModel", "NomicBertConfig", **TEXT, max_position_embeddings=64),
    _text("ConvBertModel", "ConvBertConfig", **TEXT, embedding_size=32, conv_kernel_size=3),
    _text("SqueezeBertModel", "SqueezeBertConfig", **TEXT, embedding_size=32),
    _text("MobileBertModel", "MobileBertConfig", **TEXT, embedding_size=16, intra_bottleneck_size=16),
    _text("FunnelModel", "FunnelConfig", vocab_size=99, d_model=32, n_head=2, d_head=16, d_inner=64, block_sizes=[1, 1]),
    _text("FNetModel", "FNetConfig", inputs=_tokens, **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    _text("MegatronBertModel", "MegatronBertConfig", **TEXT),
    _text("Data2VecTextModel", "Data2VecTextConfig", **TEXT),
    _text("ErnieModel", "ErnieConfig", **TEXT),
    _text("RemBertModel", "RemBertConfig", **TEXT, input_embedding_size=16),
    _text("RoFormerModel", "RoFormerConfig", **TEXT, embedding_size=16, max_position_embeddings=64),
    _text("RobertaPreLayerNormModel", "RobertaPreLayerNormConfig", **TEXT),
    _text("IBertModel", "IBertConfig", **TEXT),
    _text("LayoutLMModel", "LayoutLMConfig", inputs=_boxes, **TEXT),
    _text("LiltModel", "LiltConfig", inputs=_boxes, **TEXT, channel_shrink_ratio=2),
    _text("SplinterModel", "SplinterConfig", **TEXT),
    _text("NystromformerModel", "NystromformerConfig", **TEXT, segment_means_seq_len=16, num_landmarks=16),
    _text("CanineModel", "CanineConfig", inputs=_characters, **{k: v for k, v in TEXT.items() if k != "vocab_size"},
          local_transformer_stride=8, downsampling_rate=4, num_hash_buckets=64),
    _text("XmodModel", "XmodConfig", **TEXT, languages=("en_XX",), default_language="en_XX"),
    _text("EsmModel", "EsmConfig", **TEXT, pad_token_id=1, max_position_embeddings=64, position_embedding_type="rotary"),
    _text("XLNetModel", "XLNetConfig", vocab_size=99, d_model=32, n_layer=2, n_head=2, d_inner=64),
    _text("LongformerModel", "LongformerConfig", **TEXT, attention_window=4),
    _text("BigBirdModel", "BigBirdConfig", **TEXT, attention_type="original_full"),
    _text("EuroBertModel", "EuroBertConfig", **TEXT, num_key_value_heads=1, max_position_embeddings=64),
    _text("BartEncoder", "BartConfig", of="bart.modeling_bart", **_BART),
    _text("MBartEncoder", "MBartConfig", of="mbart.modeling_mbart", **_BART),
    _text("PegasusEncoder", "PegasusConfig", of="pegasus.modeling_pegasus", **_BART),
    _text("M2M100Encoder", "M2M100Config", of="m2m_100.modeling_m2m_100", **_BART),
    _text("CLIPTextModel", "CLIPTextConfig", **_CLIP_TEXT),
    _text("SiglipTextModel", "SiglipTextConfig", **{**TEXT, "max_position_embeddings": 64}),
    _text("ChineseCLIPTextModel", "ChineseCLIPTextConfig", of="chinese_clip.modeling_chinese_clip", **TEXT),
)

VISIONS = _named(
    _vision("ViTModel", "ViTConfig", **PATCHES),
    _vision("DeiTModel", "DeiTConfig", **PATCHES),
    _vision("BeitModel", "BeitConfig", **PATCHES),
    _vision("Data2VecVisionModel", "Data2VecVisionConfig", **PATCHES),
    _vision("Dinov2Model", "Dinov2Config", **PATCHES),
    _vision("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", **PATCHES),
    _vision("DINOv3ViTModel", "DINOv3ViTConfig", **PATCHES),
    _vision("IJepaModel", "IJepaConfig", **PATCHES),
    _vision("ViTMSNModel", "ViTMSNConfig", **PATCHES),
    _vision("ViTMAEModel", "ViTMAEConfig", **PATCHES, decoder_hidden_size=16, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2, decoder_intermediate_size=32),
    _vision("YolosModel", "YolosConfig", **{**PATCHES, "image_size": [16, 16]}, num_detection_tokens=4),
    _vision("CLIPVisionModel", "CLIPVisionConfig", **PATCHES),
    _vision("SiglipVisionModel", "SiglipVisionConfig", **PATCHES),
    _vision("Aimv2VisionModel", "Aimv2VisionConfig", **PATCHES),
    _vision("BlipVisionModel", "BlipVisionConfig", **PATCHES),
    _vision("Blip2VisionModel", "Blip2VisionConfig", **PATCHES),
    _vision("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", **PATCHES),
    _vision("AltCLIPVisionModel", "AltCLIPVisionConfig", of="altclip.modeling_altclip", **PATCHES),
    _vision("InternVLVisionModel", "InternVLVisionConfig", **{**PATCHES, "image_size": [16, 16], "patch_size": [4, 4]}),
    _vision("HieraModel", "HieraConfig", inputs=_images(32), image_size=[32, 32], patch_size=[7, 7], embed_dim=16,
            depths=[1, 1], num_heads=[1, 2], mlp_ratio=2.0, query_stride=[2, 2], masked_unit_size=[4, 4], num_query_pool=1),
    _vision("SwinModel", "SwinConfig", embed_dim=16, depths=[2], num_heads=[2], window_size=2, image_size=16,
            patch_size=4),
    _vision("Swinv2Model", "Swinv2Config", embed_dim=16, depths=[2], num_heads=[2], window_size=2, image_size=16,
            patch_size=4),
    _vision("DonutSwinModel", "DonutSwinConfig", embed_dim=16, depths=[2], num_heads=[2], window_size=2, image_size=16,
            patch_size=4),
    _vision("CvtModel", "CvtConfig", inputs=_images(32), embed_dim=[16, 32], num_heads=[1, 2], depth=[1, 1],
            patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0],
            drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
            qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
            padding_q=[1, 1], stride_q=[1, 1]),
    _vision("PoolFormerModel", "PoolFormerConfig", inputs=_images(32), depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16]),
    _vision("PvtModel", "PvtConfig", inputs=_images(32), image_size=32, num_encoder_blocks=2, depths=[1, 1],
            sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2],
            num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    _vision("PvtV2Model", "PvtV2Config", inputs=_images(32), image_size=32, num_encoder_blocks=2, depths=[1, 1],
            sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
            mlp_ratios=[2, 2]),
    _vision("SegformerModel", "SegformerConfig", inputs=_images(32), num_encoder_blocks=2, depths=[1, 1],
            sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
            mlp_ratios=[2, 2]),
    _vision("GLPNModel", "GLPNConfig", inputs=_images(32), num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
            hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    _vision("LevitModel", "LevitConfig", inputs=_images(64), image_size=64, hidden_sizes=[16, 32, 48],
            num_attention_heads=[1, 2, 3], depths=[1, 1, 1], key_dim=[8, 8, 8], attention_ratio=[2, 2, 2], mlp_ratio=[2, 2, 2]),
    _vision("ConvNextModel", "ConvNextConfig", inputs=_images(32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
            image_size=32),
    _vision("ConvNextV2Model", "ConvNextV2Config", inputs=_images(32), hidden_sizes=[8, 16], depths=[1, 1],
            num_stages=2, image_size=32),
    _vision("ResNetModel", "ResNetConfig", inputs=_images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    _vision("RegNetModel", "RegNetConfig", inputs=_images(32), embedding_size=8, hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1], groups_width=8),
    _vision("BitModel", "BitConfig", inputs=_images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
            num_groups=2),
    _vision("MobileNetV1Model", "MobileNetV1Config", inputs=_images(32), depth_multiplier=0.25, image_size=32),
    _vision("MobileNetV2Model", "MobileNetV2Config", inputs=_images(32), depth_multiplier=0.25, image_size=32),
    _vision("MobileViTModel", "MobileViTConfig", inputs=_images(32), image_size=32, hidden_sizes=[16, 16, 16],
            neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2),
    _vision("EfficientNetModel", "EfficientNetConfig", inputs=_images(32), image_size=32, width_coefficient=0.25,
            depth_coefficient=0.25, hidden_dim=320),
    _vision("FocalNetModel", "FocalNetConfig", inputs=_images(32), image_size=32, patch_size=4, embed_dim=16,
            hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]),
    _vision("SwiftFormerModel", "SwiftFormerConfig", inputs=_images(64), image_size=64, depths=[1, 1, 1, 1],
            embed_dims=[8, 8, 16, 16], mlp_ratio=2),
    _vision("TextNetModel", "TextNetConfig", inputs=_images(32), stem_out_channels=8, hidden_sizes=[8, 8, 8, 8, 8],
            conv_layer_kernel_sizes=[[[3, 3]], [[3, 3]], [[3, 3]], [[3, 3]]],
            conv_layer_strides=[[2], [2], [2], [2]]),
    _vision("HGNetV2Backbone", "HGNetV2Config", inputs=_images(32), stem_channels=[3, 8, 8], hidden_sizes=[8, 16],
            depths=[1, 1], stage_in_channels=[8, 8], stage_mid_channels=[8, 8], stage_out_channels=[8, 16],
            stage_num_blocks=[1, 1], stage_numb_of_layers=[1, 1], stage_downsample=[False, True],
            stage_light_block=[False, False], stage_kernel_size=[3, 3], embedding_size=8),
    _vision("VideoMAEModel", "VideoMAEConfig", inputs=_clips, **PATCHES, num_frames=4),
    _vision("VivitModel", "VivitConfig", inputs=_clips, **{**LAYERS, "image_size": 16}, num_frames=4,
            tubelet_size=[2, 4, 4]),
    _vision("TimesformerModel", "TimesformerConfig", inputs=_clips, **PATCHES, num_frames=4),
    _vision("SamVisionModel", "SamVisionConfig", **PATCHES, output_channels=16, window_size=2,
            global_attn_indexes=[1], num_pos_feats=8, mlp_dim=64),
)

SOUNDS = _named(
    _sound("WhisperEncoder", "WhisperConfig", "whisper.modeling_whisper", _spectrogram(8, 20), (1,), d_model=32,
           encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10),
    _sound("Wav2Vec2Model", "Wav2Vec2Config", **SOUND),
    _sound("HubertModel", "HubertConfig", **SOUND),
    _sound("WavLMModel", "WavLMConfig", **SOUND),
    _sound("UniSpeechModel", "UniSpeechConfig", **SOUND),
    _sound("UniSpeechSatModel", "UniSpeechSatConfig", **SOUND),
    _sound("Data2VecAudioModel", "Data2VecAudioConfig", **{**SOUND, "num_conv_pos_embeddings": 2},
           conv_pos_kernel_size=3),
    _sound("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", **SOUND, conv_depthwise_kernel_size=3),
    _sound("SEWModel", "SEWConfig", **SOUND, squeeze_factor=2),
    _sound("SEWDModel", "SEWDConfig", **SOUND, squeeze_factor=2, max_position_embeddings=64),
    _sound("Wav2Vec2BertModel", "Wav2Vec2BertConfig", inputs=_frames, lengths=(12, 20), **TEXT,
           feature_projection_input_dim=8, conv_depthwise_kernel_size=3),
    _sound("ASTModel", "ASTConfig", inputs=_spectrogram(24, 16, "input_values"), lengths=(1,), **LAYERS, patch_size=4,
           frequency_stride=4, time_stride=4, max_length=24, num_mel_bins=16),
    _sound("Speech2TextEncoder", "Speech2TextConfig", "speech_to_text.modeling_speech_to_text",
           lambda batch, length: {"input_features": torch.randn(batch, length, 8)}, (16, 24), **_BART,
           input_feat_per_channel=8, conv_channels=16, max_source_positions=64),
    _sound("MoonshineEncoder", "MoonshineConfig", "moonshine.modeling_moonshine", _samples, (2000, 3000), **{
        "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "vocab_size": 99}),
    _sound("EncodecModel", "EncodecConfig", inputs=_channel_of_samples, lengths=(400,), num_filters=4, hidden_size=16,
           upsampling_ratios=[4, 2], num_lstm_layers=1, codebook_size=16, target_bandwidths=[24.0]),
    _sound("ParakeetEncoder", "ParakeetEncoderConfig", inputs=lambda batch, length: {
        "input_features": torch.randn(batch, length, 8)}, lengths=(32, 48), **LAYERS, num_mel_bins=8,
        conv_kernel_size=3, subsampling_conv_channels=8),
)

ENCODERS: dict[str, StockEncoder] = {**TEXTS, **VISIONS, **SOUNDS}
"""Every stock encoder of the table in docs/models.md, by class."""
