"""Stock encoders of sound."""

from __future__ import annotations

import torch

from tests.e2e.stock_encoder import (
    BART,
    LAYERS,
    SOUND,
    TEXT,
    channel_of_samples,
    frames,
    named,
    samples,
    sound,
    spectrogram,
)

SOUNDS = named(
    sound("WhisperEncoder", "WhisperConfig", "whisper.modeling_whisper", spectrogram(8, 20), (1,), d_model=32,
        encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10),
    sound("Wav2Vec2Model", "Wav2Vec2Config", **SOUND),
    sound("HubertModel", "HubertConfig", **SOUND),
    sound("WavLMModel", "WavLMConfig", **SOUND),
    sound("UniSpeechModel", "UniSpeechConfig", **SOUND),
    sound("UniSpeechSatModel", "UniSpeechSatConfig", **SOUND),
    sound("Data2VecAudioModel", "Data2VecAudioConfig", **{**SOUND, "num_conv_pos_embeddings": 2},
        conv_pos_kernel_size=3),
    sound("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", **SOUND, conv_depthwise_kernel_size=3),
    sound("SEWModel", "SEWConfig", **SOUND, squeeze_factor=2),
    sound("SEWDModel", "SEWDConfig", **SOUND, squeeze_factor=2, max_position_embeddings=64),
    sound("Wav2Vec2BertModel", "Wav2Vec2BertConfig", inputs=frames, lengths=(12, 20), **TEXT,
        feature_projection_input_dim=8, conv_depthwise_kernel_size=3),
    sound("ASTModel", "ASTConfig", inputs=spectrogram(24, 16, "input_values"), lengths=(1,), **LAYERS, patch_size=4,
        frequency_stride=4, time_stride=4, max_length=24, num_mel_bins=16),
    sound("Speech2TextEncoder", "Speech2TextConfig", "speech_to_text.modeling_speech_to_text", lambda batch,
        length: {"input_features": torch.randn(batch, length, 8)}, (16, 24), **BART, input_feat_per_channel=8,
        conv_channels=16, max_source_positions=64),
    sound("MoonshineEncoder", "MoonshineConfig", "moonshine.modeling_moonshine", samples, (2000, 3000),
        hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=1,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, vocab_size=99),
    sound("EncodecModel", "EncodecConfig", inputs=channel_of_samples, lengths=(400,), num_filters=4, hidden_size=16,
        upsampling_ratios=[4, 2], num_lstm_layers=1, codebook_size=16, target_bandwidths=[24.0]),
    sound("ParakeetEncoder", "ParakeetEncoderConfig", inputs=lambda batch,
        length: {"input_features": torch.randn(batch, length, 8)}, lengths=(32, 48), **LAYERS, num_mel_bins=8,
        conv_kernel_size=3, subsampling_conv_channels=8),
)  # fmt: skip
