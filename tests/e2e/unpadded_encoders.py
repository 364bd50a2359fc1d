"""Which sizes of twenty encoders pad, and why the others do not: ``python -m tests.e2e.unpadded_encoders``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.e2e.one_argument import Outcome, for_each, two_passes
from tests.e2e.stock_encoders import ENCODERS, StockEncoder, Tensors, tokens

LEAST, LARGEST, NUM_CALLS = 2, 9, 8
"""Of one image, aot_eager alone cannot run group norm."""
PADDING = {"attention_mask": 0, "src_key_padding_mask": True}
"""What a user declares of the masks."""
STOCK = (
    *("XLMRobertaModel", "MPNetModel", "DebertaModel", "DebertaV2Model", "LongT5EncoderModel", "XLNetModel"),
    *("FunnelModel", "FlaubertModel", "XLMModel", "LongformerModel", "M2M100Encoder", "LEDEncoder", "LevitModel"),
    *("Wav2Vec2ConformerModel", "SEWDModel", "ParakeetEncoder"),
)


def _vectors(batch: int, length: int) -> Tensors:
    hidden = torch.arange(length) >= torch.randint(length // 2, length + 1, (batch, 1))
    return {"src": torch.randn(batch, length, 32), "src_key_padding_mask": hidden}


def _noise(batch: int, length: int) -> Tensors:
    return {"sample": torch.randn(batch, 4, length, length), "timestep": torch.tensor(7)}


def _prompted_noise(batch: int, length: int) -> Tensors:
    return {**_noise(batch, length), "encoder_hidden_states": torch.randn(batch, 6, 32)}


def _unet(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import diffusers

        size = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
        return getattr(diffusers, name)(**size, block_out_channels=(8, 16), **settings)

    return make


_BLOCKS = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "attention_head_dim": 4}
_CROSS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 99, "use_cache": False}
OTHERS = {
    "nn.TransformerEncoderLayer": (
        lambda: torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), _vectors, (9, 16)),
    "UNet2DModel": (_unet("UNet2DModel", **_BLOCKS), _noise, (8, 10)),
    "UNet2DConditionModel": (
        _unet("UNet2DConditionModel", **_CROSS, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), _prompted_noise,
        (8, 10)),
    "MambaModel": (lambda: hf.MambaModel(hf.MambaConfig(**_MAMBA)), tokens, (9, 16)),
}  # fmt: skip
MODELS = {**{name: ENCODERS[name] for name in STOCK}, **{n: StockEncoder("", n, *row) for n, row in OTHERS.items()}}


def measured(name: str) -> Outcome:
    """Two passes of a model whose masks are declared."""
    encoder = MODELS[name]
    declared = {given: rule for given, rule in PADDING.items() if given in encoder.inputs(2, encoder.lengths[0])}
    return two_passes(encoder, LEAST, LARGEST, NUM_CALLS, padding=declared)


def described(name: str, outcome: Outcome) -> str:
    """How many sizes pad, and for those that do not the first reason of each, once for each operator and line."""
    candidates = [size for size in outcome.sizes if size.verdict is not None]
    padded = [size for size in candidates if size.is_padded]
    result = outcome.problem or outcome.refusal or f"equal, {outcome.replays} of {outcome.calls} replayed"
    summary = f"{name}: {len(padded)} of {len(candidates)} sizes pad; {' '.join(result.split())[:200]}"
    reasons: dict[tuple[str, ...], str] = {}
    for size in candidates:
        causes = size.causes[:1]
        place = tuple(part for cause in causes for part in (cause.op, cause.where)) or (size.field,)
        why = "".join(cause.through for cause in causes) or size.remedy or "no cause is named"
        if not size.is_padded:
            reasons.setdefault(place, f"    {size.field} ({size.verdict}): {why}, {len(size.causes)} in all")
    return "\n".join([summary, *reasons.values()])


if __name__ == "__main__":
    for_each(sys.argv[1:] or MODELS, lambda name: described(name, measured(name)))
