"""What the check of padding in float64 costs at a key's first padded call: ``python -m tests.bench.padding_check``.

A BERT encoder and a Llama decoder with random weights, sequences padded, on a GPU where there is one. *Eager* is one
run of the uncompiled model at the key's size. *Padded call* is a replay with all its preparation, *checked call* the
key's first padded call: four replays, three runs in float64, operator by operator (without padding, with less and with
all of it), and comparisons of all results. *Of eager* is what the check adds, divided by one eager run; *of eager in
float64* the same for a copy of the model in float64. *Peak* is the device memory that a checked call takes for itself,
beside the model's parameters. On a CPU the times are CPU seconds.

``--smoke`` takes tiny models: the code, not the figures.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import graphpass as gp
from tests.bench import timing
from tests.bench.timing import environment, gpu_or_cpu, parser_of

KEY, REAL = 128, 100
COLUMNS = ("model", "type", "eager ms", "padded call ms", "checked call ms", "of eager", "of eager in float64",
           "parameters MiB", "peak MiB")  # fmt: skip
Call = Callable[..., Any]


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
LARGE = {"num_hidden_layers": 16, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816}


def bert(**sizes: int) -> nn.Module:
    """A BERT encoder, of the base size where nothing is said."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes)).eval()


def llama(**sizes: int) -> nn.Module:
    """A Llama decoder without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)).eval()


class Unproved(nn.Module):
    """Hides from the proof where padding lies, so that the size is checked in float64."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The logits or hidden states, which real tokens alone enter."""
        result: torch.Tensor = self.inner(input_ids=ids.flip(1).flip(1), attention_mask=mask)[0]
        return result


def arguments(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask without holes."""
    return torch.randint(2, 1000, (4, size), device=device), torch.ones(4, size, dtype=torch.long, device=device)


def seconds(call: Call, device: torch.device, calls: int = 1) -> float:
    """Of one call, the mean of several; CPU seconds on a CPU."""
    return timing.seconds(call, device, time.perf_counter if device.type == "cuda" else time.process_time, calls)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Device memory that a call takes beyond what was allocated before; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    name: str, make: Call, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, *, smoke: bool
) -> tuple[str, ...]:
    """One row of the table."""
    torch.compiler.reset()
    model = Unproved(make(**sizes)).to(device=device, dtype=dtype).eval()
    options = {
        "compiler": "eager" if smoke else "inductor",
        "dynamic_dims": {"ids": 1, "mask": 1},
        "capture_sizes": [KEY],
        "padding": {"ids": 1, "mask": 0},
        "padding_check": "declared",
    }
    fast = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    full, padded = arguments(KEY, device), arguments(REAL, device)
    for _ in range(3):
        fast(*full)
    wide = copy.deepcopy(model).to(torch.float64)
    for one in (model, wide):
        one(*full)
    eager_s, wide_s = (seconds(lambda one=one: one(*full), device, 5) for one in (model, wide))
    del wide
    checked_s = seconds(lambda: fast(*padded), device)
    peak = peak_bytes(lambda: fast(*padded), device)  # the second padded call is checked, too, the third is not
    padded_s = seconds(lambda: fast(*padded), device)
    assert not any("no longer padded" in problem.what for problem in gp.runtime_of(fast).report().problems)
    added_s = checked_s - padded_s
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    times = (f"{one * 1e3:.1f}" for one in (eager_s, padded_s, checked_s))
    shares = (f"{added_s / one:.1f}" for one in (eager_s, wide_s))
    return name, str(dtype), *times, *shares, *(f"{one / 2**20:.0f}" for one in (parameters, peak))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    smoke = parser_of("padding_check", __doc__, "tiny models: the code, not the figures").parse_args(arguments).smoke
    device = gpu_or_cpu()
    models = (
        ("BERT", bert, SMALL if smoke else {}),
        ("Llama", llama, {**(SMALL if smoke else LARGE), "vocab_size": 32000}),
    )
    title = ", ".join(environment(device).values())
    table = Table(*COLUMNS, title=f"{title}: 4 sequences of {REAL} tokens, padded to {KEY}")
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for name, make, sizes in models:
                table.add_row(*measure(name, make, sizes, dtype, device, smoke=smoke))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
