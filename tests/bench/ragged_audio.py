"""Clips of random length: eager, ``backend="cgpass"`` with no option, and a bucketed runner written by hand.

``python -m tests.bench.ragged_audio [--model NAME ...] [--json FILE]``; needs a GPU and transformers. Each call is a
batch of 1 to 8 clips of one length, 1 to 8 s; of a model named ``masked``, of several lengths with an attention mask.
Models have real sizes and seeded weights. All variants of a model run in this process, in turn, over the same calls,
and are compared with eager at real entries. A hand-written runner has buckets of 1, 2, 4 and 8 clips and of whole
seconds, and captures the eager model. *First pass* includes compilation and capture; *kept* is the device memory that a
variant holds after it. Timing begins when graphpass has made no graph for ten passes, or after ``--settle`` seconds.
``--small`` runs tiny models on any machine: the code, not the figures.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import graphpass as gp
from tests.bench.bucketed_runners import (
    BucketedRunner,
    HifiGanRunner,
    MaskedRunner,
    MimiRunner,
    ParakeetRunner,
    Wav2Vec2Runner,
)
from tests.bench.timing import environment, free_bytes, gpu_or_cpu, interleaved, seconds, table_of, write_json

LARGEST_BATCH, LONGEST_S = 8, 8
QUIET_PASSES = 10
#: The largest norm of a difference that counts as equal, as a share of the norm: convolutions may use TF32.
TOLERANCES = {torch.float32: 5e-3, torch.float16: 3e-2, torch.bfloat16: 8e-2}
COLUMNS = (
    "model | dtype | eager ms | by hand ms | graphpass ms | over eager | of by hand | equal | first pass s | MiB kept"
)
Clips = Callable[[int, int], torch.Tensor]
Call = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sound:
    """A model with its clips."""

    make: Callable[..., Any]  #: the model, small or of its real size, or with other settings
    clips: Clips  #: of a batch size and a length
    per_second: float  #: entries along the length of a clip
    by_hand: Callable[[Any, Sequence[int]], BucketedRunner]
    is_masked: bool = False  #: whether the clips of a batch differ in length

    def calls(self, count: int, longest_s: int, batches: tuple[int, int]) -> list[Call]:
        """Seeded calls."""
        rng = random.Random(1)
        return [self._call(rng, rng.randint(*batches), rng.uniform(1, longest_s)) for _ in range(count)]

    def _call(self, rng: random.Random, batch: int, length_s: float) -> Call:
        length = int(length_s * self.per_second)
        clips = self.clips(batch, length)
        if not self.is_masked:
            return {_name_of(clips): clips}
        real = torch.tensor([length, *(rng.randint(length // 2, length) for _ in range(batch - 1))])
        mask = torch.arange(length) < real[:, None]
        clips = clips * mask.view(batch, length, *[1] * (clips.dim() - 2))
        return {_name_of(clips): clips, "attention_mask": mask.long()}

    def buckets(self, longest_s: int) -> list[int]:
        """The lengths of a hand-written runner."""
        return [math.ceil(length * self.per_second) for length in range(1, longest_s + 1)]


def _name_of(clips: torch.Tensor) -> str:
    if not clips.is_floating_point():
        return "codes"
    return "input_values" if clips.dim() == 2 else "input_features"


# -- models -----------------------------------------------------------------------------------------------------------


def _small(small: bool, **settings: Any) -> dict[str, Any]:
    return settings if small else {}


_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def parakeet(small: bool, **sizes: int) -> Any:
    """The encoder of Parakeet, 0.6B."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    return ParakeetEncoder(ParakeetEncoderConfig(**{**_small(small, **_LAYERS, subsampling_conv_channels=8), **sizes}))


def wav2vec2(small: bool, **sizes: int) -> Any:
    """Wav2Vec2 large, with layer norm in the convolutions."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    tiny = {**_LAYERS, "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    kind = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    return Wav2Vec2Model(Wav2Vec2Config(**{**kind, **(tiny if small else large), **sizes}))


def wav2vec2_bert(small: bool, **sizes: int) -> Any:
    """Wav2Vec2-BERT, 0.6B."""
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    return Wav2Vec2BertModel(Wav2Vec2BertConfig(**{**_small(small, **_LAYERS), **sizes}))


def hifi_gan(small: bool) -> Any:
    """The vocoder of SpeechT5."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    tiny = {"upsample_initial_channel": 32, "upsample_rates": (4, 2), "upsample_kernel_sizes": (8, 4)}
    return Vocoder(SpeechT5HifiGan(SpeechT5HifiGanConfig(**_small(small, **tiny))))


def mimi(small: bool) -> Any:
    """The decoder of Mimi."""
    from transformers import MimiConfig, MimiModel

    tiny = {**_LAYERS, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 16}
    tiny |= {"vector_quantization_hidden_dimension": 16, "num_key_value_heads": 2, "upsample_groups": 32}
    return MimiDecoder(MimiModel(MimiConfig(**_small(small, **tiny))))


class Vocoder(nn.Module):
    """A vocoder whose argument has the name of the others'."""

    def __init__(self, vocoder: Any) -> None:
        super().__init__()
        self.vocoder, self.config = vocoder, vocoder.config

    def forward(self, input_features: torch.Tensor) -> Any:
        return self.vocoder(input_features)


class MimiDecoder(nn.Module):
    """Mimi's decoder with numbers where the class has tensors of one number, which no graph can read."""

    def __init__(self, mimi: Any) -> None:
        super().__init__()
        self.mimi = mimi
        self.samples_a_code = 2 * math.prod(mimi.config.upsampling_ratios)
        for part in mimi.modules():
            if hasattr(part, "padding_total"):
                padding = int(part.padding_total)
                del part.padding_total
                part.padding_total = padding
                part._get_extra_padding_for_conv1d = lambda _: 0  # each convolution of the decoder moves by one

    def forward(self, codes: torch.Tensor) -> Any:
        return self.mimi.decode(codes, return_dict=False)[0]


def features(bins: int) -> Clips:
    """Spectrograms."""
    return lambda batch, length: torch.randn(batch, length, bins)


SOUNDS = {
    "parakeet": Sound(parakeet, features(80), 100, ParakeetRunner),
    "wav2vec2": Sound(wav2vec2, lambda batch, length: torch.randn(batch, length), 16000, Wav2Vec2Runner),
    "wav2vec2_bert": Sound(wav2vec2_bert, features(160), 50, MaskedRunner),
    "hifi_gan": Sound(hifi_gan, features(80), 62.5, HifiGanRunner),
    "mimi": Sound(mimi, lambda batch, length: torch.randint(0, 16, (batch, 32, length)), 12.5, MimiRunner),
}
SOUNDS |= {f"{name}_masked": replace(SOUNDS[name], is_masked=True) for name in list(SOUNDS)[:3]}


# -- one model --------------------------------------------------------------------------------------------------------


def built(sound: Sound, small: bool, layers: int | None = None) -> Any:
    """The model with seeded weights; convolutions keep the size of what they read, as trained ones do."""
    torch.manual_seed(0)
    model = sound.make(small, **({"num_hidden_layers": layers} if layers else {})).eval()
    for part in model.modules():
        if isinstance(part, nn.Conv1d | nn.ConvTranspose1d | nn.Conv2d):
            part.reset_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):  # the codes of Mimi, which are zeros without trained weights
            buffer.normal_()
    return model


def moved(call: Call, device: torch.device, dtype: torch.dtype) -> Call:
    """On the device, floats in the dtype."""
    return {name: given.to(device, dtype if given.is_floating_point() else None) for name, given in call.items()}


def first_tensor(result: Any) -> torch.Tensor:
    """What is compared."""
    first: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return first


@torch.inference_mode()
def measure(name: str, dtype: torch.dtype, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model."""
    sound, device = SOUNDS[name], gpu_or_cpu(given.small)
    model = built(sound, given.small, given.layers).to(device, dtype)
    longest_s = 2 if given.small else LONGEST_S
    batches = given.smallest, 3 if given.small else LARGEST_BATCH
    calls = [moved(call, device, dtype) for call in sound.calls(given.clips, longest_s, batches)]
    runner = sound.by_hand(model, sound.buckets(longest_s))
    torch.compiler.reset()
    options: Any = {"options": {"compiler": "aot_eager"}} if given.small else {}
    fast = torch.compile(model, backend="cgpass", dynamic=True, **options)
    runs: dict[str, Callable[..., Any]] = {"eager": model, "by hand": runner, "graphpass": fast}
    figures: dict[str, Any] = {"first_pass_s": {}, "kept_mib": {}, "difference": {}, "problem": ""}
    expected = [first_tensor(model(**call)).cpu() for call in calls]
    for variant, run in list(runs.items()):
        before = _free_bytes(device)
        try:
            figures["first_pass_s"][variant] = seconds(partial(_pass, run, calls), device)
        except Exception as error:
            if variant != "by hand":
                raise
            figures["problem"] = f"{variant}: {type(error).__name__}: {error}"[:500]
            del runs[variant]
            continue
        print(f"{name}: {variant}, first pass {figures['first_pass_s'][variant]:.1f} s", file=sys.stderr, flush=True)
        if variant == "graphpass":
            figures["passes"] = _settled(fast, partial(_pass, run, calls), given)
        figures["kept_mib"][variant] = (before - _free_bytes(device)) / 2**20
        figures["difference"][variant] = max(map(partial(_difference, run, runner), calls, expected))
    steps = {variant: partial(_pass, run, calls) for variant, run in runs.items()}
    timings = interleaved(steps, device=device, rounds=given.rounds, steps_a_round=1, host_calls=1)
    figures["pass_us"] = {variant: asdict(timing.step) for variant, timing in timings.items()}
    medians = {variant: timing.step.median for variant, timing in timings.items()}
    figures["ms"] = {variant: median / len(calls) / 1e3 for variant, median in medians.items()}
    figures["over_eager"] = medians["eager"] / medians["graphpass"]
    figures["of_by_hand"] = medians["graphpass"] / medians.get("by hand", math.nan)
    figures["is_equal"] = max(figures["difference"].values()) <= TOLERANCES[dtype]
    runtime = gp.runtime_of(fast)
    figures["graphs"] = {"by hand": len(runner.buckets), "graphpass": runtime.stats().captured}
    figures["report"] = str(runtime.report())
    runtime.close()
    return figures


def _pass(run: Callable[..., Any], calls: Sequence[Call]) -> None:
    for call in calls:
        run(**call)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()  # the graphs of another model
        torch.cuda.empty_cache()
    return free_bytes(device)


def _settled(fast: Any, step: Callable[[], None], given: argparse.Namespace) -> int:
    """Run passes until graphpass makes no graph any more; how many that took."""
    stats, quiet, passes = gp.runtime_of(fast).stats, 0, 0
    until, most = time.monotonic() + given.settle, 1 if given.small else QUIET_PASSES
    while quiet < most and time.monotonic() < until:
        before = stats().captured
        step()
        passes, quiet = passes + 1, quiet + 1 if stats().captured == before else 0
    return passes - quiet


def _difference(run: Callable[..., Any], runner: BucketedRunner, call: Call, expected: torch.Tensor) -> float:
    """From eager at the real entries of a call, as a share of their norm."""
    found = first_tensor(run(**call)).cpu()
    if found.shape != expected.shape:
        return math.inf
    mask = call.get("attention_mask")
    if mask is not None:
        real = torch.tensor([runner.entries(int(length)) for length in mask.sum(-1)])
        is_real = torch.arange(expected.shape[1]) < real[:, None]
        found, expected = found[is_real], expected[is_real]
    return float((found.float() - expected.float()).norm() / expected.float().norm())


# -- all --------------------------------------------------------------------------------------------------------------


def row_of(name: str, dtype: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    ms, first, kept = figures["ms"], figures["first_pass_s"], figures["kept_mib"]
    return (
        name,
        dtype,
        *(f"{ms[variant]:.3g}" if variant in ms else "-" for variant in ("eager", "by hand", "graphpass")),
        f"{figures['over_eager']:.2f}",
        f"{figures['of_by_hand']:.3f}",
        "yes" if figures["is_equal"] else "NO",
        " / ".join(f"{first[variant]:.1f}" for variant in ms),
        " / ".join(f"{kept[variant]:.0f}" for variant in ms),
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, and write the figures after each model."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.ragged_audio",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="*", choices=SOUNDS, default=list(SOUNDS), help="default: all")
    parser.add_argument("--dtype", nargs="*", default=["float16", "float32"])
    parser.add_argument("--clips", type=int, default=60, metavar="N", help="calls in a pass")
    parser.add_argument("--layers", type=int, metavar="N", help="of an encoder, in place of its real depth")
    parser.add_argument("--smallest", type=int, default=1, metavar="N", help="least batch: one of 1 is traced apart")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settle", type=float, default=60, metavar="S", help="seconds for graphs of recurring sizes")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = environment(gpu_or_cpu(given.small)) | {"models": {}}
    console, rows = Console(width=160), []
    for name in given.model:
        for dtype in given.dtype:
            figures = found["models"].setdefault(name, {})[dtype] = measure(name, getattr(torch, dtype), given)
            rows.append(row_of(name, dtype, figures))
            console.print(*rows[-1], figures["problem"], sep="  ", markup=False)
            write_json(given.json, found)
    console.print(table_of("Clips of random length", COLUMNS, rows))
    return found


if __name__ == "__main__":
    main()
