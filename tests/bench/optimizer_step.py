"""Milliseconds of an optimizer's step: eager, reduce-overhead, and captured by cgpass, side by side in one process.

``python -m tests.bench.optimizer_step``; on a GPU where there is one. ``--smoke`` takes few small parameters and few
rounds. Parameters are those of 12 transformer layers (144 tensors). Each row has its own copy of them, and gradients
that stay where they are: neither reduce-overhead nor cgpass knows that, so both copy them in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from tests.bench.timing import Timing, environment, gpu_or_cpu, interleaved, parser_of, table_of, write_json

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of("optimizer_step", __doc__, "few small parameters, few rounds")
    parser.add_argument("--compiler", default="inductor", help="of cgpass; the GPU's figures are taken with Inductor")
    options = parser.parse_args(arguments)
    device = gpu_or_cpu()
    found = {kind: _measured(kind, device, options.compiler, options.smoke) for kind in KINDS}
    where = environment(device)
    title, columns = f"{where['device']}, torch {where['torch']}", "optimizer | variant | ms a step | host ms a step"
    rows = [
        (kind, variant, f"{timing.step.median / 1e3:.3f}", f"{timing.host.median / 1e3:.3f}")
        for kind, timings in found.items()
        for variant, timing in timings.items()
    ]
    Console(width=100).print(table_of(title, columns, rows))
    payload = {
        kind: {variant: {"step_us": t.step.median, "host_us": t.host.median} for variant, t in timings.items()}
        for kind, timings in found.items()
    }
    write_json(options.json, {"environment": where, "steps": payload})


def _measured(kind: str, device: torch.device, compiler: str, smoke: bool) -> dict[str, Timing]:
    torch.compiler.reset()
    steps: dict[str, Callable[[], Any]] = {
        "eager, foreach": _optimizer(kind, device, smoke, foreach=True).step,
        "eager, fused": _optimizer(kind, device, smoke, fused=True).step,
    }
    if device.type == "cuda":  # on the CPU this is Inductor without graphs
        overhead = torch.compile(_optimizer(kind, device, smoke).step, mode="reduce-overhead")
        steps["torch.compile, reduce-overhead"] = overhead
    captured = torch.compile(_optimizer(kind, device, smoke).step, backend="cgpass", options={"compiler": compiler})
    steps["torch.compile, cgpass"] = captured
    for step in steps.values():
        for _ in range(4):
            step()
    few = smoke or device.type != "cuda"
    rounds, steps_a_round = (3, 3) if few else (15, 50)
    return interleaved(steps, device=device, rounds=rounds, steps_a_round=steps_a_round, host_calls=steps_a_round)


def _optimizer(kind: str, device: torch.device, smoke: bool, **implementation: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    width, layers = (16, 2) if smoke else (768, 12)
    model = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, device=device) for _ in range(layers))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer, settings = KINDS[kind]
    on_gpu = {"capturable": True} if device.type == "cuda" and kind != "SGD" else {}
    made: torch.optim.Optimizer = optimizer(model.parameters(), **settings, **on_gpu, **implementation)
    made.step()  # makes the state, which a graph of reduce-overhead cannot return and keep
    return made


if __name__ == "__main__":
    main()
