"""Continuous batching with a stock Hugging Face decoder: requests arrive, prefill and decode mix, sequences finish.

The model is built from its config with seeded random weights, so nothing is downloaded and the text means nothing; what
counts is how it runs. Requests of mixed lengths arrive while others decode. A step that only decodes replays one FULL
graph; a step with a prompt in it replays the captured regions between the attention ops.

    python docs/examples/generate.py --model qwen3 --requests 24 --mode FULL_AND_PIECEWISE

Exits with 1 when a request is missing tokens, or when graphs were asked for and nothing was replayed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from graphpass.keys import CUDAGraphMode
from graphpass.text import CausalLM, Generation, Request

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
LONGEST_PROMPT, MOST_NEW_TOKENS = 48, 24
MAX_NUM_REQS, MAX_NUM_TOKENS = 8, 64


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it arrives."""

    step: int
    request: Request


def make_model(name: str, layers: int, device: torch.device) -> torch.nn.Module:
    """A small decoder with seeded weights."""
    torch.manual_seed(0)
    make_config, make = MODELS[name]
    config = make_config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1000,
        max_position_embeddings=LONGEST_PROMPT + MOST_NEW_TOKENS,
    )
    return make(config).eval().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def make_arrivals(count: int, vocab_size: int) -> list[Arrival]:
    """Requests of mixed lengths, about one every other step."""
    seeded = random.Random(0)
    arrivals, step = [], 0
    for index in range(count):
        prompt = [seeded.randrange(vocab_size) for _ in range(seeded.randint(1, LONGEST_PROMPT))]
        request = Request.of(f"request {index}", prompt, seeded.randint(4, MOST_NEW_TOKENS))
        arrivals.append(Arrival(step, request))
        step += seeded.randint(0, 4)
    return arrivals


def serve(lm: CausalLM, arrivals: list[Arrival]) -> tuple[Counter[Request], int]:
    """Run until every request is done; the number of tokens of each, and of steps."""
    produced: Counter[Request] = Counter()
    waiting, step = list(arrivals), 0
    with Generation(lm.manager) as generation, Progress(transient=True) as progress:
        bar = progress.add_task("generating", total=sum(arrival.request.max_new_tokens for arrival in arrivals))
        while waiting or not generation.is_done():
            while waiting and waiting[0].step <= step:
                generation.add(waiting.pop(0).request)
            found = generation.step()
            produced.update(new.request for new in found)
            progress.advance(bar, len(found))
            step += 1
    return produced, step


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--mode", default="FULL_AND_PIECEWISE", choices=list(CUDAGraphMode.__members__))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default=None, help="inductor (default on a GPU), aot_eager (default), eager")
    given = parser.parse_args(argv)
    device, console = torch.device(given.device), Console(width=118)
    lm = CausalLM(
        make_model(given.model, given.layers, device),
        max_num_reqs=MAX_NUM_REQS,
        max_num_tokens=MAX_NUM_TOKENS,
        max_seq_len=LONGEST_PROMPT + MOST_NEW_TOKENS,
        capture_sizes=[2, 4, 8, 32, 64],
        mode=given.mode,
        compiler=given.compiler,
    )
    start = time.perf_counter()
    if lm.manager.needs_capture():
        lm.capture()
    captured_s = time.perf_counter() - start
    arrivals = make_arrivals(given.requests, vocab_size=1000)
    start = time.perf_counter()
    produced, num_steps = serve(lm, arrivals)
    elapsed_s = time.perf_counter() - start
    print(lm.report())
    summary = Table(title="Result", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("requests", "new tokens", "steps", "tokens a second", "seconds to compile and capture"):
        summary.add_column(column)
    rate = produced.total() / elapsed_s
    summary.add_row(str(len(produced)), str(produced.total()), str(num_steps), f"{rate:.0f}", f"{captured_s:.1f}")
    console.print(summary)
    console.print(f"{given.model}, {given.layers} layers on {device}, mode {given.mode}")
    complete = all(produced[arrival.request] == arrival.request.max_new_tokens for arrival in arrivals)
    replayed = lm.stats().replays > 0 or given.mode == "NONE"
    lm.close()
    if not complete or not replayed:
        console.print("[red]FAILED[/red]: tokens are missing, or nothing was replayed")
    return int(not complete or not replayed)


if __name__ == "__main__":
    sys.exit(main())
