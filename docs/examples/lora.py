"""Three LoRA adapters of one model in one batch: every request runs with its own, over one set of graphs.

The model is built from its config with seeded random weights, so nothing is downloaded and the text means nothing; what
counts is that each request's text is that of the model with its adapter merged into the weights, and which graph served
which number of adapters. The third adapter is loaded after the graphs were captured: no graph is captured for it.

    python docs/examples/lora.py --mode FULL_AND_PIECEWISE

Exits with 1 when a text differs, or when graphs were asked for and nothing was replayed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from graphpass import CUDAGraphMode, LoraKeys
from graphpass.text import CausalLM, LoraAdapters

TARGETS = ("q_proj", "v_proj", "down_proj")
NAMES = ("polite", "terse", "rhymed")
RANK, ALPHA = 8, 16.0
REQUESTS = (None, "polite", "terse", "rhymed", "terse", None)
NEW_TOKENS = 8

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def make_model(device: torch.device) -> LlamaForCausalLM:
    """A small decoder with seeded weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(device)


def make_adapter(model: torch.nn.Module, seed: int) -> Pairs:
    """What training leaves behind: A and B of each adapted layer."""
    seeded = torch.Generator().manual_seed(seed)
    pairs = {}
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.endswith(TARGETS):
            down = torch.randn(RANK, layer.in_features, generator=seeded) / layer.in_features**0.5
            up = torch.randn(layer.out_features, RANK, generator=seeded) / RANK
            pairs[path] = down.to(layer.weight), up.to(layer.weight)
    return pairs


@torch.no_grad()
def merged_text(model: LlamaForCausalLM, adapter: Pairs | None, prompt: Sequence[int]) -> list[int]:
    """What Hugging Face generates with the adapter merged into a copy of the weights."""
    merged = copy.deepcopy(model)
    for path, (down, up) in (adapter or {}).items():
        merged.get_submodule(path).weight.add_(ALPHA / RANK * up @ down)  # type: ignore[operator, union-attr]
    ids = torch.tensor([prompt], device=model.device)
    made = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def texts_table(made: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Table:
    """One row a request."""
    table = Table(title="One batch", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("request", "adapter", "new tokens", "is the merged model's"):
        table.add_column(column)
    for index, (name, tokens, wanted) in enumerate(zip(REQUESTS, made, expected, strict=True)):
        same = "yes" if tokens == wanted else f"NO: {wanted}"
        table.add_row(str(index), name or "none", " ".join(map(str, tokens)), same)
    return table


def keys_table(lm: CausalLM, lora: LoraKeys) -> Table:
    """Which keys serve which number of adapters, and how many steps each served."""
    table = Table(title="Keys by number of adapters", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("adapters in a batch", "adapters its graph computes", "graphs", "steps"):
        table.add_column(column, justify="right")
    keys = lm.stats().keys
    for count, captured in enumerate(lora.count_table()[:-1]):
        serving = [key for key in keys if key.captured.descriptor.num_active_loras == captured]
        computed = min(captured, lora.max_loras)
        table.add_row(str(count), str(computed), str(len(serving)), str(sum(key.replays for key in serving)))
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", default="FULL_AND_PIECEWISE", choices=list(CUDAGraphMode.__members__))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="aot_eager", help="inductor, aot_eager (default), eager")
    given = parser.parse_args(argv)
    console = Console(width=118)
    model = make_model(torch.device(given.device))
    known = {name: make_adapter(model, seed) for seed, name in enumerate(NAMES)}
    prompts = [[7 * index + 3, 11, 5 * index + 2] * (index + 1) for index in range(len(REQUESTS))]
    expected = [
        merged_text(model, known.get(name) if name else None, prompt)
        for name, prompt in zip(REQUESTS, prompts, strict=True)
    ]

    adapters = LoraAdapters(model, TARGETS, max_loras=3, max_rank=RANK)
    lora = LoraKeys(max_loras=3, per_count=True)
    lm = CausalLM(
        model,
        max_num_reqs=len(REQUESTS),
        max_num_tokens=32,
        max_seq_len=64,
        capture_sizes=[2, 6, 32],
        mode=given.mode,
        compiler=given.compiler,
        adapters=adapters,
        lora=lora,
    )
    for name in NAMES[:-1]:
        adapters.load(name, known[name], alpha=ALPHA)
    if lm.manager.needs_capture():
        lm.capture()
    adapters.load(NAMES[-1], known[NAMES[-1]], alpha=ALPHA)

    made = lm.generate(prompts, max_new_tokens=NEW_TOKENS, adapters=REQUESTS)
    for names in ([None], ["terse"], ["terse", "rhymed"]):  # batches of fewer adapters
        lm.generate(prompts[: len(names)], max_new_tokens=NEW_TOKENS, adapters=names, progress=False)
    console.print(texts_table(made, expected))
    console.print()
    console.print(keys_table(lm, lora))
    replayed = lm.stats().replays > 0 or given.mode == "NONE"
    lm.close()
    if made != expected or not replayed:
        console.print("[red]FAILED[/red]: a text is not that of the merged model, or nothing was replayed")
    return int(made != expected or not replayed)


if __name__ == "__main__":
    sys.exit(main())
