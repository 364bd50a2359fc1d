"""What a capture takes, estimated and measured, and what estimating costs: ``python -m tests.bench.memory``.

Each model is compiled and warmed up by a first estimate. Then its ladder gets one more key, is estimated anew on the
clock, and captured on the clock; *taken* is by how much the device's free memory shrank in that capture.

``--smoke`` runs tiny sizes on a CPU, where a tape takes no pool: the code, not the figures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from tests.bench.decoder import SPLITTING_OP, DecoderSizes, make_decoder
from tests.bench.timing import (
    environment,
    free_bytes,
    gpu_or_cpu,
    is_skipped,
    parser_of,
    seconds,
    table_of,
    write_json,
)

MIB = 1 << 20
LADDER = (1, 2, 4, *range(8, 129, 8), *range(160, 513, 32))
SMOKE_LADDER = (1, 2, 4, 8)
ONE_MORE, SMOKE_ONE_MORE = 144, 3
Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model."""
    options = parser_of("memory", __doc__).parse_args(arguments)
    if is_skipped("memory", options):
        return
    device = gpu_or_cpu(options.smoke)
    figures: Figures = {"environment": environment(device), "models": []}
    for name, make in MODELS.items():
        figures["models"].append({"name": name, **_measured(make(device, options.smoke), device, options.smoke)})
        write_json(options.json, figures)
        gc.collect()
    Console(width=140).print(_table(figures))


# -- models ------------------------------------------------------------------------------------------------------------


def _manager(model: Any, inputs: Sequence[gp.InputSpec], smoke: bool, **options: Any) -> gp.CudaGraphManager:
    sizes = SMOKE_LADDER if smoke else LADDER
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, max_num_reqs=sizes[-1])
    compiler = "eager" if smoke else "inductor"
    return gp.CudaGraphManager(model, dispatcher, inputs, compiler=compiler, **options)


def _stack(device: torch.device, smoke: bool) -> gp.CudaGraphManager:
    width, depth = (16, 2) if smoke else (4096, 16)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16).eval()
    return _manager(model, [gp.InputSpec("input", (_largest(smoke), width), torch.bfloat16)], smoke)


def _encoder(device: torch.device, smoke: bool) -> gp.CudaGraphManager:
    width, side = (4, 8) if smoke else (32, 64)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3, padding=1),
        torch.nn.GELU(),
        torch.nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        torch.nn.GELU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )
    inputs = [gp.InputSpec("input", (_largest(smoke), 3, side, side), torch.float32)]
    return _manager(model.to(device).eval(), inputs, smoke)


def _decoder(device: torch.device, smoke: bool) -> gp.CudaGraphManager:
    sizes = DecoderSizes.small(2) if smoke else DecoderSizes(28)
    dtype = torch.float32 if smoke else torch.bfloat16
    decoder, hidden, positions = make_decoder(sizes, _largest(smoke), device, dtype=dtype)
    inputs = [
        gp.InputSpec("hidden", tuple(hidden.shape), dtype),
        gp.InputSpec("positions", tuple(positions.shape), positions.dtype),
    ]
    return _manager(decoder, inputs, smoke, splitting_ops=[SPLITTING_OP])


def _largest(smoke: bool) -> int:
    return (SMOKE_LADDER if smoke else LADDER)[-1]


MODELS: Mapping[str, Callable[[torch.device, bool], gp.CudaGraphManager]] = {
    "16 linear layers": _stack,
    "convolutions": _encoder,
    "28-layer decoder": _decoder,
}


# -- figures -----------------------------------------------------------------------------------------------------------


def _measured(manager: gp.CudaGraphManager, device: torch.device, smoke: bool) -> Figures:
    manager.estimate()
    manager.dispatcher.add_key("PIECEWISE", gp.BatchDescriptor(SMOKE_ONE_MORE if smoke else ONE_MORE))
    estimate = manager.estimate()
    free = free_bytes(device)
    capture_s = seconds(manager.capture, device)
    taken = free - free_bytes(device)
    groups = manager.stats().groups
    found = {
        "keys": sum(group.num_keys for group in groups),
        "sampled": sum(len(group.sampled) for group in estimate.groups),
        "estimated_bytes": estimate.total_bytes,
        "taken_bytes": taken,
        "estimated_pool_bytes": estimate.pool_bytes,
        "pool_bytes": sum(group.memory.pool_bytes for group in groups),
        "cached_bytes": sum(group.memory.cached_bytes for group in groups),
        "driver_bytes": sum(group.memory.driver_bytes for group in groups),
        "buffer_bytes": estimate.buffer_bytes,
        "estimate_seconds": estimate.seconds,
        "capture_seconds": capture_s,
    }
    manager.close()
    return found


def _table(figures: Figures) -> Table:
    def mib(row: Figures, *names: str) -> list[str]:
        return [f"{row[f'{name}_bytes'] / MIB:.1f}" for name in names]

    rows = [
        (
            row["name"], row["keys"], row["sampled"], *mib(row, "estimated", "taken"),
            f"{(row['estimated_bytes'] - row['taken_bytes']) / MIB:+.1f}",
            *mib(row, "estimated_pool", "pool", "cached", "driver", "buffer"),
            f"{row['estimate_seconds']:.2f}", f"{row['capture_seconds']:.2f}",
            f"{row['estimate_seconds'] / row['capture_seconds']:.2f}",
        )
        for row in figures["models"]
    ]  # fmt: skip
    columns = (
        "model | keys | sampled | estimated | taken | off by | pool: estimated | pool | cached | driver | buffers | "
        "estimate s | capture s | share"
    )
    return table_of(f"Memory of a capture, MiB; {', '.join(figures['environment'].values())}", columns, rows)


if __name__ == "__main__":
    main()
