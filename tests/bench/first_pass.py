"""What padding that is made adds to a first pass: stock models with it and with ``padding="never"``, a process each.

``python -m tests.bench.first_pass [--models bert vit t5 dit decoder]``; needs a GPU, Transformers, timm and diffusers.
One process runs at a time, each from empty caches. The seconds are of a first call with its compilation, the ratio is
to the run that pads nothing, and *proof* is the last proof of the sizes. ``--cpu`` compiles by aot_eager for a CPU
alone, and counts seconds of its time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from tests.bench.one_argument import MODELS, Inputs, moved
from tests.bench.timing import in_process


def decoder() -> tuple[torch.nn.Module, Inputs]:
    """A decoder of 28 layers without a cache, 64 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen2Config(num_hidden_layers=28, vocab_size=32000, use_cache=False, **sizes)
    return Qwen2ForCausalLM(config), lambda n: {"input_ids": torch.randint(0, 32000, (n, 64))}


NAMED = {**{name: MODELS[name] for name in ("bert", "vit", "t5", "dit")}, "decoder": decoder}


def measured(name: str, padding: str, *, is_cpu: bool) -> dict[str, Any]:
    """The seconds of a first pass, in this process."""
    torch.manual_seed(0)
    (model, inputs), runtime = NAMED[name](), gp.GraphRuntime()
    model = model.eval() if is_cpu else model.cuda().bfloat16().eval()
    batch = inputs(3) if is_cpu else moved(inputs(3))
    finished = (lambda: None) if is_cpu else torch.cuda.synchronize
    clock_s = time.process_time if is_cpu else time.perf_counter
    options: dict[str, Any] = {"runtime": runtime, "dispatch": "auto"}
    options |= {"compiler": "aot_eager"} if is_cpu else {}
    options |= {"padding": padding} if padding == "never" else {}
    run = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    with torch.inference_mode():
        model(**batch)
        finished()
        start = clock_s()
        run(**batch)
        finished()
        first_s = clock_s() - start
    records = runtime.callables()
    verdicts = sorted({str(size.verdict) for record in records for size in record.sizes})
    return {"first_s": first_s, "proof_s": sum(r.seconds.proof for r in records), "verdicts": ", ".join(verdicts)}


def main() -> None:
    """Measure each model in two processes, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(NAMED))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PADDING"), help="one process of it")
    parser.add_argument("--cpu", action="store_true", help="seconds of a CPU, by aot_eager")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(*given.one, is_cpu=given.cpu)))
        return
    table = Table("model", "never s", "made s", "ratio", "proof s", "sizes")
    for name in given.models:
        found = {}
        for padding in ("never", "made"):
            with tempfile.TemporaryDirectory() as caches:
                found[padding] = in_process(
                    "first_pass", ["--one", name, padding, *["--cpu"] * given.cpu], Path(caches)
                )
        never, made = found["never"], found["made"]
        if not (never and made):  # the process has said why
            continue
        ratio = made["first_s"] / never["first_s"]
        times = (f"{seconds:.2f}" for seconds in (never["first_s"], made["first_s"], ratio, made["proof_s"]))
        table.add_row(name, *times, made["verdicts"])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
