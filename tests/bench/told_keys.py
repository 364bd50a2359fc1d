"""What hiding padded keys costs attention, and whether kernels that are told the number of keys cost less.

``python -m tests.bench.told_keys [--json PATH]``; needs a GPU. *Kernels*: six calls of attention in one graph, without
padding (*plain*), with a mask of the padded keys, and told the number of keys: by the flash kernel over sequences of
any length (16 bits), and by the efficient one (any dtype). Both take it only where they are given the starts of
sequences; in their dense form they ignore it. Each form is compared with attention over the real keys alone, once more
with NaN behind them: what then differs needs zeros there. A form that this torch or device lacks says so.

*Layers*: six transformer layers in one graph, by ``backend="cgpass"`` at a size of the ladder, compiled by Inductor:
with ``padding="never"`` (*plain*), as they come (*made*), and with a mask in place of the number of keys.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import graphpass as gp
from graphpass.compat import operators
from tests.bench.timing import (
    HandCapture,
    environment,
    gpu_or_cpu,
    interleaved,
    is_skipped,
    parser_of,
    table_of,
    write_json,
)

SIZES, SMOKE_SIZES = ((8, 64), (8, 256), (4, 1024), (2, 4096)), ((2, 16),)
HEADS, WIDTH, CALLS = 16, 64, 6
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-3}
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries, keys and values [batch, heads, length, width], of which so many keys are real: int32, 0-d."""


# -- forms ------------------------------------------------------------------------------------------------------------


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Over all keys."""
    return F.scaled_dot_product_attention(q, k, v)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """With a mask, and zeros behind the real keys."""
    is_real = torch.arange(k.shape[2], device=k.device) < keys
    k, v = (torch.where(is_real[:, None], one, 0) for one in (k, v))
    row = torch.zeros(k.shape[2], dtype=q.dtype, device=q.device).masked_fill(~is_real, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=row.expand(*q.shape[:3], -1))


def flash_told(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The flash kernel over sequences of any length, which all have the padded one here."""
    starts = _starts(q), _starts(k)
    lengths = q.shape[2], k.shape[2]
    used = keys.expand(q.shape[0]).contiguous()
    made = torch.ops.aten._flash_attention_forward(
        *map(_rows, (q, k, v)), *starts, *lengths, 0.0, False, False, seqused_k=used
    )
    return _batch(made[0], q)


def efficient_told(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The efficient kernel in the same way."""
    starts = _starts(q), _starts(k)
    lengths = q.shape[2], k.shape[2]
    used = keys.expand(q.shape[0]).contiguous()
    rows = (_rows(one)[None] for one in (q, k, v))
    made = torch.ops.aten._efficient_attention_forward(*rows, None, *starts, *lengths, 0.0, 0, False, seqlen_k=used)
    return _batch(made[0][0], q)


FORMS: Mapping[str, Form] = {
    "plain": plain,
    "mask": masked,
    "flash, told": flash_told,
    "efficient, told": efficient_told,
}


def _rows(one: torch.Tensor) -> torch.Tensor:
    return one.transpose(1, 2).flatten(0, 1)


def _batch(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _starts(one: torch.Tensor) -> torch.Tensor:
    return torch.arange(one.shape[0] + 1, dtype=torch.int32, device=one.device) * one.shape[2]


def heard(form: Form, inputs: Sequence[torch.Tensor], num_keys: int) -> tuple[bool, bool]:
    """Whether a form attends to the real keys alone, with finite numbers behind them and with NaN."""
    q, k, v = inputs
    keys = torch.tensor(num_keys, dtype=torch.int32, device=q.device)
    expected = F.scaled_dot_product_attention(q.float(), k[:, :, :num_keys].float(), v[:, :, :num_keys].float())
    found = []
    for behind in (1e3, math.nan):
        padded = [one.clone() for one in (k, v)]
        for one in padded:
            one[:, :, num_keys:] = behind
        difference = (form(q, *padded, keys).float() - expected).norm() / expected.norm()
        found.append(bool(difference <= TOLERANCES[q.dtype]))
    return found[0], found[1]


def kernels(size: tuple[int, int], dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """Times of all forms at a size, of which seven eighths are real."""
    batch, length = size
    shape = (batch, length, HEADS, WIDTH)
    inputs = [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)]
    num_keys = length - length // 8
    keys, captures = torch.tensor(num_keys, dtype=torch.int32, device=device), HandCapture(device)
    figures: dict[str, Any] = {"lacks": {}, "hides": {}}
    steps = {}
    for name, form in FORMS.items():
        try:
            figures["hides"][name] = heard(form, inputs, num_keys)
            steps[name], _ = captures.capture(partial(_in_a_row, form, inputs, keys))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            figures["lacks"][name] = str(error).partition("\n")[0][:200]
    timings = interleaved(steps, device=device, rounds=rounds, steps_a_round=10, host_calls=1)
    return {**figures, "us": {name: asdict(timing.step) for name, timing in timings.items()}}


def _in_a_row(form: Form, inputs: Sequence[torch.Tensor], keys: torch.Tensor) -> tuple[torch.Tensor]:
    q, k, v = inputs
    for _ in range(CALLS):
        q = form(q, k, v, keys)
    return (q,)


# -- layers -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer layer that attends by ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@torch.inference_mode()
def layers(
    sizes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, rounds: int, *, smoke: bool
) -> dict[str, Any]:
    """Times of six layers at these sizes, with and without what makes their padding neutral."""
    heads = 2 if smoke else HEADS
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(heads * WIDTH, heads) for _ in range(CALLS))).to(device, dtype).eval()
    options: dict[str, Any] = {"compiler": "aot_eager"} if smoke else {}
    runs, first = {}, torch.randn(2, 24, heads * WIDTH, device=device, dtype=dtype)
    torch.compiler.reset()
    for name, padding in (("made", {}), ("mask", {}), ("plain", {"padding": "never"})):
        own = {**options, **padding, "runtime": gp.GraphRuntime()}  # Dynamo shares artifacts of equal options
        runs[name] = torch.compile(model, backend="cgpass", dynamic=True, options=own)
        lacks = mock.patch.object(operators, "attention_to_lengths", return_value=None)
        with lacks if name == "mask" else contextlib.nullcontext():
            runs[name](first)
    found: dict[str, Any] = {}
    for batch, length in sizes:
        x = torch.randn(batch, length, heads * WIDTH, device=device, dtype=dtype)
        for run, _ in itertools.product(runs.values(), range(4)):
            run(x)
        steps = {name: partial(run, x) for name, run in runs.items()}
        timings = interleaved(steps, device=device, rounds=rounds, steps_a_round=5, host_calls=1)
        found[f"{batch} x {length} {_short(dtype)}"] = {name: asdict(timing.step) for name, timing in timings.items()}
    found["insertions"] = str(gp.runtime_of(runs["made"]).report())
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Print both tables; figures are written after each row."""
    options = parser_of("told_keys", __doc__, rounds=25).parse_args(arguments)
    if is_skipped("told_keys", options):
        return {}
    device, sizes = gpu_or_cpu(options.smoke), SMOKE_SIZES if options.smoke else SIZES
    figures: dict[str, Any] = {"environment": environment(device), "kernels": {}, "layers": {}}
    rows, console = [], Console(width=140)
    for dtype, size in itertools.product((torch.bfloat16, torch.float16, torch.float32), sizes):
        at = f"{size[0]} x {size[1]} {_short(dtype)}"
        found = figures["kernels"][at] = kernels(size, dtype, device, options.rounds)
        rows.append((at, *(_cell(found, name) for name in FORMS)))
        write_json(options.json, figures)
    console.print(table_of("Six calls of attention in one graph, us", "size | " + " | ".join(FORMS), rows))
    for name, why in found["lacks"].items():
        console.print(f"{name}: {why}", markup=False)
    of_layers = []
    for dtype in (torch.float32,) if options.smoke else (torch.bfloat16, torch.float32):
        found = layers(sizes, dtype, device, options.rounds, smoke=options.smoke)
        figures["layers"] |= {_short(dtype): found}
        of_layers += [(at, *_of_layers(us)) for at, us in found.items() if at != "insertions"]
        write_json(options.json, figures)
    titles = "size | plain | made | mask | made over plain | mask over plain"
    console.print(table_of("Six layers in one graph, us", titles, of_layers))
    return figures


def _cell(found: Mapping[str, Any], name: str) -> str:
    if name in found["lacks"]:
        return "-"
    hides, hides_nan = found["hides"][name]
    median, least = found["us"][name]["median"], found["us"]["plain"]["median"]
    note = "" if name == "plain" else " WRONG" if not hides else "" if hides_nan else " (needs zeros)"
    return f"{median:.0f} ({median / least:.2f}){note}"


def _of_layers(us: Mapping[str, Any]) -> tuple[str, ...]:
    without, made, mask = (us[name]["median"] for name in ("plain", "made", "mask"))
    return f"{without:.0f}", f"{made:.0f}", f"{mask:.0f}", f"{made / without:.3f}", f"{mask / without:.3f}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
