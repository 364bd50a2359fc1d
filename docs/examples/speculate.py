"""Speculative decoding: guess the next tokens, verify them in one step, get the same text in fewer steps.

The model is built from its config with seeded weights, so nothing is downloaded; its output layer is made such that
each token has a favourite to follow it, as words have in code, tables and quotations. Guesses come out of the text's
own past (n-grams). A step that only decodes replays one FULL graph of 1 + k tokens a request, however many of them
were guessed.

    python docs/examples/speculate.py --draft-tokens 1 3 7

Exits with 1 when a text is another one than without drafts, or when drafts saved no step.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from graphpass import CUDAGraphMode
from graphpass.serving import ManagerStats
from graphpass.text import CausalLM, Generation, GenerationStats, Request

VOCABULARY, CIRCLE, NUM_PROMPTS, LONGEST_PROMPT = 512, 16, 8, 24


def make_model(device: torch.device) -> torch.nn.Module:
    """A small decoder that likes to go round in circles of 16 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    before = torch.arange(VOCABULARY).view(-1, CIRCLE).roll(1, dims=1).view(-1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10)  # against what the layers add
        model.lm_head.weight.add_(model.model.embed_tokens.weight[before], alpha=0.05)
    return model.to(device)


def make_prompts() -> list[list[int]]:
    """Prompts of mixed lengths."""
    seeded = random.Random(0)
    return [
        [seeded.randrange(VOCABULARY) for _ in range(seeded.randint(2, LONGEST_PROMPT))] for _ in range(NUM_PROMPTS)
    ]


def continued(lm: CausalLM, num_new: int) -> tuple[list[list[int]], GenerationStats, ManagerStats]:
    """The texts, and what it took."""
    requests = [Request.of(f"request {index}", prompt, num_new) for index, prompt in enumerate(make_prompts())]
    texts: dict[Request, list[int]] = {request: [] for request in requests}
    with Generation(lm.manager, run_ahead=False) as generation:  # with drafts: an NgramDrafter, or drafter=your own
        for request in requests:
            generation.add(request)
        while not generation.is_done():
            for new in generation.step():
                texts[new.request].append(new.token)
        return list(texts.values()), generation.stats(), lm.stats()


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="aot_eager", help="eager, aot_eager (default), inductor")
    given = parser.parse_args(argv)
    model, console = make_model(torch.device(given.device)), Console(width=118)
    table = Table(title="Greedy decoding of 8 requests", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("draft tokens", "steps", "tokens", "guessed", "accepted", "FULL replays", "same text"):
        table.add_column(column)
    found: list[tuple[list[list[int]], GenerationStats]] = []
    for draft_tokens in (0, *given.draft_tokens):
        most = NUM_PROMPTS * (1 + draft_tokens)
        lm = CausalLM(
            model,
            max_num_reqs=NUM_PROMPTS,
            max_num_tokens=max(64, most),
            max_seq_len=LONGEST_PROMPT + given.new_tokens,
            capture_sizes=[most, max(64, most)],
            seq_len_buckets=[],
            draft_tokens=draft_tokens,
            compiler=given.compiler,
        )
        lm.capture()
        texts, stats, graphs = continued(lm, given.new_tokens)
        lm.close()
        found.append((texts, stats))
        table.add_row(
            str(draft_tokens),
            str(stats.num_steps),
            str(stats.num_tokens),
            str(stats.num_drafted),
            f"{stats.acceptance:.0%}" if stats.num_drafted else "",
            str(sum(key.replays for key in graphs.keys if key.captured.mode is CUDAGraphMode.FULL)),
            "yes" if texts == found[0][0] else "[red]no[/red]",
        )
    console.print(table)
    (plain, without), *with_drafts = found
    fails = [stats for texts, stats in with_drafts if texts != plain or stats.num_steps >= without.num_steps]
    return int(bool(fails))


if __name__ == "__main__":
    sys.exit(main())
