"""One argument on a ragged stream: eager, torch.compile, reduce-overhead and ``backend="cgpass"``, a process each.

``python -m tests.bench.one_argument [--out DIR] [--models vit convnext bert dit] [--passes N]``; needs a GPU and timm,
and diffusers for the diffusion transformer. Each process starts with empty compiler caches, so its
first pass is a cold one. Timing begins after a pass in which graphpass has made no graph.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from tests.bench.timing import in_process

NUM_BATCHES, LARGEST = 60, 32
MOST_PASSES = 40
VARIANTS = ("eager", "compile", "reduce-overhead", "cgpass", "cgpass-dynamic", "cgpass-tuned")
Inputs = Callable[[int], dict[str, torch.Tensor]]


def vit() -> tuple[torch.nn.Module, Inputs]:
    """ViT-B/16 of timm, 224 px."""
    import timm

    return timm.create_model("vit_base_patch16_224"), lambda n: {"x": torch.randn(n, 3, 224, 224)}


def convnext() -> tuple[torch.nn.Module, Inputs]:
    """ConvNeXt-T of timm, 224 px."""
    import timm

    return timm.create_model("convnext_tiny"), lambda n: {"x": torch.randn(n, 3, 224, 224)}


def bert() -> tuple[torch.nn.Module, Inputs]:
    """BERT-base, 64 tokens."""
    from transformers import BertConfig, BertModel

    def inputs(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(0, 30522, (n, 64)), "attention_mask": torch.ones(n, 64, dtype=torch.long)}

    return BertModel(BertConfig()), inputs


def dit() -> tuple[torch.nn.Module, Inputs]:
    """A diffusion transformer of DiT-B's size, 256 px in latents."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=12, attention_head_dim=64, in_channels=4, out_channels=8, num_layers=12, sample_size=32
    )

    def inputs(n: int) -> dict[str, torch.Tensor]:
        return {
            "hidden_states": torch.randn(n, 4, 32, 32),
            "timestep": torch.randint(0, 1000, (n,)),
            "class_labels": torch.randint(0, 1000, (n,)),
        }

    return model, inputs


MODELS = {"vit": vit, "convnext": convnext, "bert": bert, "dit": dit}


def compiled(model: torch.nn.Module, variant: str) -> Callable[..., Any]:
    """The model as the variant runs it."""
    if variant == "eager":
        return model
    if variant == "compile":
        return torch.compile(model, dynamic=True)
    if variant == "reduce-overhead":
        return torch.compile(model, dynamic=True, mode="reduce-overhead")
    options = {"tune": "measure", "tune_seconds": 300} if variant == "cgpass-tuned" else {}
    return torch.compile(model, backend="cgpass", dynamic=None if variant == "cgpass" else True, options=options)


def captured(run: Callable[..., Any], variant: str) -> int:
    """How many graphs graphpass has made; 0 for other variants."""
    if not variant.startswith("cgpass"):
        return 0
    return sum(counts.captured for counts in gp.runtime_of(run).counts().values())


def first_tensor(result: Any) -> torch.Tensor:
    """The output that is compared."""
    return result if isinstance(result, torch.Tensor) else result[0]


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the GPU, in bfloat16 where they are floats."""
    return {k: v.cuda().bfloat16() if v.is_floating_point() else v.cuda() for k, v in inputs.items()}


def measure(name: str, variant: str, passes: int) -> dict[str, Any]:
    """The figures of one model and variant, in this process."""
    torch.manual_seed(0)
    make = MODELS[name]
    rng = random.Random(1)
    sizes = [rng.randint(1, LARGEST) for _ in range(NUM_BATCHES)]
    model, inputs = make()
    model = model.cuda().bfloat16().eval()
    batches = [moved(inputs(n)) for n in sizes]
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    run = compiled(model, variant)
    worst = 0.0
    with torch.inference_mode():
        start = time.perf_counter()
        for batch in batches:
            run(**batch)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - start
        settled, before = 1, -1  # passes until one makes no graph
        while captured(run, variant) != before and settled < MOST_PASSES:
            settled, before = settled + 1, captured(run, variant)
            for batch in batches:
                run(**batch)
        step_ms, host_us = [], []
        for _ in range(passes):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for batch in batches:
                run(**batch)
            torch.cuda.synchronize()
            step_ms.append((time.perf_counter() - start) / NUM_BATCHES * 1e3)
        for batch in batches:
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(**batch)
            host_us.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        memory = (free_before - torch.cuda.mem_get_info()[0]) / 2**20
        for batch in batches:
            expected, found = (first_tensor(f(**batch)).float() for f in (model, run))
            worst = max(worst, float((found - expected).norm() / expected.norm()))
    medians = {"ms": statistics.median(step_ms), "host_us": statistics.median(host_us)}
    figures = {**medians, "first_s": first_s, "mib": memory, "difference": worst}
    if variant.startswith("cgpass"):
        figures |= {"graphs": captured(run, variant), "settled": settled, "report": str(gp.runtime_of(run).report())}
    return figures


def main() -> None:
    """Measure each pair in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "VARIANT"), help="measure in this process, print JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one, given.passes)))
        return
    console = Console(width=140)
    columns = ("ms a batch", "host us", "first pass s", "MiB", "graphs", "timed from pass", "difference")
    table = Table("model", "variant", *columns)
    found = {}
    for name in given.models:
        for variant in given.variants:
            figures = found[f"{name} {variant}"] = _in_process(name, variant, given.passes)
            cells = [f"{figures[key]:.4g}" if key in figures else "-" for key in ("ms", "host_us", "first_s", "mib")]
            counts = (str(figures.get(key, "-")) for key in ("graphs", "settled"))
            table.add_row(name, variant, *cells, *counts, f"{figures.get('difference', -1):.1e}")
            console.print(name, variant, *cells)
            if given.out:
                (given.out / "one_argument.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    console.print(table)


def _in_process(name: str, variant: str, passes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as caches:
        return in_process("one_argument", ["--one", name, variant, "--passes", str(passes)], Path(caches))


if __name__ == "__main__":
    main()
