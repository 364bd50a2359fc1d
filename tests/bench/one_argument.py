"""One argument on a ragged stream: eager, torch.compile, reduce-overhead and ``backend="cgpass"``, a process each.

``python -m tests.bench.one_argument [--out DIR] [--models vit convnext ...] [--variants cgpass-dynamic ...]``; needs a
GPU, timm and diffusers. All processes compile side by side, from empty caches, and are timed in turns. Timing begins
when graphpass has made no graph for 150 passes, or after a minute. ``lengths`` is another workload: BERT over 1,000
texts, each of another length, timed as a whole with its compilation.
"""

from __future__ import annotations

import argparse
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
from tests.bench.timing import write_json
from tests.bench.turns import in_turn, take_turn

NUM_BATCHES, LARGEST = 60, 32
NUM_LENGTHS = 1000
QUIET_PASSES, SETTLES_WITHIN_S = 150, 60
TURNS = 5
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


def unet() -> tuple[torch.nn.Module, Inputs]:
    """A UNet of diffusers, 64 x 64 latents."""
    from diffusers import UNet2DConditionModel

    def inputs(n: int) -> dict[str, torch.Tensor]:
        states = {"sample": torch.randn(n, 4, 64, 64), "encoder_hidden_states": torch.randn(n, 77, 768)}
        return {**states, "timestep": torch.tensor(500)}

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, layers_per_block=1), inputs


def t5() -> tuple[torch.nn.Module, Inputs]:
    """The encoder of T5-large, 77 tokens."""
    from transformers import T5Config, T5EncoderModel

    def inputs(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(3, 32128, (n, 77)), "attention_mask": torch.ones(n, 77, dtype=torch.long)}

    return T5EncoderModel(T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16)), inputs


def whisper() -> tuple[torch.nn.Module, Inputs]:
    """The encoder of Whisper-small, 30 seconds."""
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072)
    return WhisperModel(config).encoder, lambda n: {"input_features": torch.randn(n, config.num_mel_bins, 3000)}


def lengths() -> tuple[torch.nn.Module, Inputs]:
    """BERT-base, one text of a length of its own."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(max_position_embeddings=1024)), lambda n: {
        "input_ids": torch.randint(0, 30522, (1, n)),
        "attention_mask": torch.ones(1, n, dtype=torch.long),
    }


MODELS = {
    "vit": vit,
    "convnext": convnext,
    "bert": bert,
    "dit": dit,
    "unet": unet,
    "t5": t5,
    "whisper": whisper,
    "lengths": lengths,
}


def compiled(model: torch.nn.Module, variant: str) -> Callable[..., Any]:
    """The model as the variant runs it."""
    if variant == "eager":
        return model
    if variant == "compile":
        return torch.compile(model, dynamic=True)
    if variant == "reduce-overhead":
        return torch.compile(model, dynamic=True, mode="reduce-overhead")
    options: dict[str, Any] = {"tune": "measure"} if variant == "cgpass-tuned" else {}
    dynamic = None if variant == "cgpass" else True
    return torch.compile(model, backend="cgpass", dynamic=dynamic, options=options)


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


def measure(name: str, variant: str, passes: int, wait: Callable[[], None]) -> dict[str, Any]:
    """The figures of one model and variant, in this process."""
    torch.manual_seed(0)
    rng = random.Random(1)
    sizes = [rng.randint(1, LARGEST) for _ in range(NUM_BATCHES)]
    if name == "lengths":
        sizes = rng.sample(range(1, NUM_LENGTHS + 1), NUM_LENGTHS)
    model, inputs = MODELS[name]()
    model = model.cuda().bfloat16().eval()
    batches = [moved(inputs(n)) for n in sizes]
    torch.cuda.synchronize()
    figures: dict[str, Any]
    with torch.inference_mode():
        expected = [first_tensor(model(**batch)).float().cpu() for batch in batches[:NUM_BATCHES]]
        torch.cuda.empty_cache()
        run = compiled(model, variant)
        if name == "lengths":
            wait()
            first_s = _pass_s(run, batches)
            figures = {"first_s": first_s, "ms": first_s / NUM_LENGTHS * 1e3}
        else:
            figures = _settled(run, variant, batches, passes, wait)
        found = [first_tensor(run(**batch)).float().cpu() for batch in batches[:NUM_BATCHES]]
    pairs = zip(found, expected, strict=True)
    figures["difference"] = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    if variant.startswith("cgpass"):
        figures |= {"graphs": captured(run, variant), "report": str(gp.runtime_of(run).report())}
    return figures


def _settled(
    run: Callable[..., Any], variant: str, batches: list[Any], passes: int, wait: Callable[[], None]
) -> dict[str, Any]:
    """Compile in the first pass; in this process's turn, make graphs until several passes make none, then time."""
    first_s = _pass_s(run, batches)
    wait()
    settled, quiet, before = 1, 0, captured(run, variant)
    until = time.monotonic() + SETTLES_WITHIN_S
    while quiet < QUIET_PASSES and time.monotonic() < until:
        _pass_s(run, batches)
        settled, quiet = settled + 1, quiet + 1 if captured(run, variant) == before else 0
        before = captured(run, variant)
    step_ms, host_us = [], []
    for _ in range(TURNS):
        wait()
        step_ms += [_pass_s(run, batches) / NUM_BATCHES * 1e3 for _ in range(passes // TURNS)]
        for batch in batches:
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(**batch)
            host_us.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    quartiles = statistics.quantiles(step_ms, n=4)
    times = {"ms": quartiles[1], "spread": quartiles[::2], "host_us": statistics.median(host_us), "first_s": first_s}
    return {**times, "settled": settled - quiet, "still": captured(run, variant) - before}


def _pass_s(run: Callable[..., Any], batches: list[Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        run(**batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure each pair in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[name for name in MODELS if name != "lengths"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--ready-s", type=float, default=400, help="what compiles longer is left out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "VARIANT"), help="a process that waits for its turn")
    given = parser.parse_args()
    if given.one:
        take_turn(lambda wait: measure(*given.one, given.passes, wait))
        return
    console = Console(width=140)
    columns = (
        "ms a batch",
        "quartiles",
        "host us",
        "first pass s",
        "MiB of the process",
        "graphs",
        "last graph in pass",
        "graphs while timed",
    )
    table = Table("model", "variant", *columns)
    keys = ("ms", "spread", "host_us", "first_s", "process_mib", "graphs", "settled", "still")
    pairs = {f"{name} {variant}": (name, variant) for name in given.models for variant in given.variants}
    commands = {pair: ["--one", *which, "--passes", str(given.passes)] for pair, which in pairs.items()}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for pair, figures in in_turn("one_argument", commands, Path(folder), given.ready_s, measured_s=300):
            found[pair] = figures
            cells = [_cell(figures[key]) if key in figures else "-" for key in keys]
            table.add_row(*pairs[pair], *cells)
            console.print(pair, *cells, figures.get("problem", ""), markup=False)
            write_json(given.out and given.out / "one_argument.json", found)
    console.print(table)


def _cell(value: Any) -> str:
    return "..".join(map(_cell, value)) if isinstance(value, list) else f"{value:.4g}"


if __name__ == "__main__":
    main()
