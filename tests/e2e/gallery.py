"""The programs of docs/gallery, as their readers run them, or with small models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"
MAX_LINES = 25
Namespace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GalleryPage:
    """One page: a program of one ``python`` block that defines what :attr:`kind` says, beside ``model``."""

    name: str  #: of the file
    #: ``calls``: ``fast`` and ``batches``, keyword arguments of its calls. ``text``: ``lm``, ``prompts`` and
    #: ``new_tokens``. ``images``: ``manager`` and ``requests``, mappings that it executes.
    #: ``attached``: ``attached``, ``requests`` and the ``texts`` that the model has generated.
    kind: str
    needs: str  #: a package beside torch
    small: Mapping[str, str]  #: {text of the program: text that makes it small}

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.md"

    @property
    def title(self) -> str:
        return self.path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    @property
    def program(self) -> str:
        """The code of the page."""
        return self._block()[1]

    @property
    def needs_gpu(self) -> bool:
        """Whether its code is marked ``cuda``: the default tests do not run it."""
        return self._block()[0] == "python cuda"

    @property
    def dynamic(self) -> bool | None:
        """How the variants of torch are compiled: like the program, and a vision tower for any grid."""
        return True if self.kind == "images" or "dynamic=True" in self.program else None

    def _block(self) -> tuple[str, str]:
        text = self.path.read_text(encoding="utf-8")
        ((mark, code),) = re.findall(r"^```(python(?: cuda)?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        return mark, code

    def run(self) -> Namespace:
        """Run the program as it is; what it has defined."""
        return self._run(self.program)

    def run_small(self) -> Namespace:
        """Run it in float32, with a small model and without generating kernels."""
        code = self.program
        for text, smaller in {"torch.bfloat16": "torch.float32", **self.small}.items():
            assert text in code, text
            code = code.replace(text, smaller)
        return self._run(code)

    def _run(self, code: str) -> Namespace:
        namespace: Namespace = {"__name__": "__main__"}
        exec(compile(code, str(self.path), "exec"), namespace)
        return namespace


_BACKEND = {'backend="cgpass"': 'backend="cgpass", options={"compiler": "aot_eager"}'}
_OPTIONS = {"options={": 'options={"compiler": "aot_eager", '}
_VLM_TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_VLM_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0],
}  # fmt: skip
_IMAGES = {**_BACKEND, "(27, 3, 12, 31, 6, 18, 1)": "(5, 3, 6)", "224, 224": "32, 32"}
_TEXT = "hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2"

PAGES = {page.name: page for page in (
    GalleryPage("qwen3", "text", "transformers", {
        "hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16": _TEXT,
        "num_key_value_heads=8": "num_key_value_heads=1, head_dim=16, vocab_size=99",
        "max_seq_len=128": "max_seq_len=128, capture_sizes=[8, 64]",
        "(60, 17, 40, 5, 33, 58, 21, 12)": "(60, 17, 5)",
        "new_tokens = 64": "new_tokens = 8"}),
    GalleryPage("llama", "text", "transformers", {
        "hidden_size=2048, intermediate_size=8192, num_hidden_layers=16": f"{_TEXT}, head_dim=16",
        "num_key_value_heads=8, vocab_size=128256": "num_key_value_heads=1, vocab_size=99",
        "max_seq_len=256": "max_seq_len=128, capture_sizes=[1, 64]",
        "new_tokens = 128": "new_tokens = 8"}),
    GalleryPage("bert", "calls", "transformers", {**_OPTIONS, "BertConfig()": f"BertConfig({_TEXT})",
        "(27, 61), (1, 17), (12, 44), (31, 64), ": "(5, 29), "}),
    GalleryPage("t5", "calls", "transformers", {**_BACKEND, "(5, 2, 7, 3, 6, 1)": "(5, 3, 6)",
        "d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16":
            "d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2"}),
    GalleryPage("vit", "calls", "timm", {**_IMAGES,
        '_224"': '_224", img_size=32, embed_dim=32, depth=1, num_heads=2'}),
    GalleryPage("convnext", "calls", "timm", {**_IMAGES,
        '_tiny"': '_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)'}),
    GalleryPage("dit", "calls", "diffusers", {**_BACKEND, "(13, 4, 16, 7, 2, 10)": "(5, 3, 6)",
        '"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64':
            '"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16',
        "sample_size=32": "sample_size=8"}),
    GalleryPage("unet", "calls", "diffusers", {**_BACKEND,
        "sample_size=64, cross_attention_dim=768":
            "sample_size=8, cross_attention_dim=16, block_out_channels=(8,), norm_num_groups=4, attention_head_dim=2,"
            " down_block_types=['CrossAttnDownBlock2D'], up_block_types=['UpBlock2D'], mid_block_type=None",
        "(6, 900), (2, 700), (5, 500), (3, 100)": "(6, 900), (3, 100), (5, 500)"}),
    GalleryPage("whisper", "calls", "transformers", {**_BACKEND, "(5, 2, 7, 3, 6, 1)": "(5, 3, 6)",
        "d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072":
            "d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=8,"
            " max_source_positions=10, decoder_layers=1, decoder_attention_heads=2"}),
    GalleryPage("parakeet", "calls", "transformers", {**_BACKEND, "ParakeetEncoderConfig()":
            "ParakeetEncoderConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,"
            " subsampling_conv_channels=8)",
        "(8, 655), (2, 233), (5, 801), (4, 340)": "(2, 233)"}),
    GalleryPage("dac", "calls", "transformers", {**_BACKEND, "DacConfig()":
            "DacConfig(encoder_hidden_size=4, downsampling_ratios=[4, 2], decoder_hidden_size=32, n_codebooks=9,"
            " codebook_size=1024, codebook_dim=4)",
        "(8, 150), (2, 75), (5, 99), (1, 142)": "(2, 75)"}),
    GalleryPage("hifi_gan", "calls", "transformers", {**_BACKEND, "SpeechT5HifiGanConfig()":
            "SpeechT5HifiGanConfig(upsample_initial_channel=32, upsample_rates=(4, 2), upsample_kernel_sizes=(8, 4))",
        "(8, 300), (2, 155), (5, 222), (1, 480)": "(2, 155)"}),
    GalleryPage("sentence_embeddings", "calls", "transformers", {**_BACKEND, "BertConfig()": f"BertConfig({_TEXT})",
        "(12, 44), (31, 64), (6, 30), (18, 52)": "(6, 30)"}),
    GalleryPage("peft", "calls", "peft", {**_OPTIONS, "BertConfig()": f"BertConfig({_TEXT})",
        "(27, 61), (2, 17), (12, 44), (31, 64)": "(3, 17)"}),
    GalleryPage("vae", "calls", "diffusers", {**_BACKEND, "(5, 2, 6, 3)": "(5, 3, 6)", "64, 64": "8, 8",
        "(128, 256, 512, 512)": "(8,)", "layers_per_block=2": "norm_num_groups=4",
        '"DownEncoderBlock2D"] * 4': '"DownEncoderBlock2D"]', '"UpDecoderBlock2D"] * 4': '"UpDecoderBlock2D"]'}),
    GalleryPage("qwen3_vl", "attached", "transformers", {
        "Qwen3VLConfig()": f"Qwen3VLConfig(text_config={_VLM_TEXT}, vision_config={_VLM_VISION}, image_token_id=90)",
        "max_tokens=1024": "max_tokens=512, options=graphpass.EncoderOptions(token_budgets=[64, 512], costs=None)"}),
    GalleryPage("qwen2_5_vl", "images", "transformers", {
        "hidden_size=1280": "hidden_size=32, depth=2, intermediate_size=48, num_heads=2, out_hidden_size=24,"
            " fullatt_block_indexes=[1]",
        "max_tokens=1024": "max_tokens=512, options=graphpass.EncoderOptions(token_budgets=[64, 512], costs=None)"}),
)}  # fmt: skip
