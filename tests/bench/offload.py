"""Offloaded weights: what of their copies is hidden behind compute: ``python -m tests.bench.offload``.

A stack of equal layers whose weights lie in pinned host memory, two layers at a time on the device, beside the same
stack with all weights on the device (*resident*: compute alone) and beside the copies alone. Interleaved rounds in one
process; each form's result is compared with the resident model's before anything is timed. The share of the copies'
time that is hidden is ``(resident + copies - offloaded) / min(resident, copies)``: 1 where the shorter of the two costs
nothing, 0 where one comes after the other. From one profiled forward a mode: the time in which a copy and a kernel ran
at once, and, with ``--png PATH``, a picture of both.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphpass as gp
from tests.bench.timing import (
    Timing,
    environment,
    gpu_or_cpu,
    interleaved,
    is_skipped,
    parser_of,
    synchronize,
    table_of,
    write_json,
)

MODES = ("NONE", "PIECEWISE", "FULL")
RESIDENT, COPIES = "resident, FULL", "copies alone"
TOLERANCE = 2e-2
Step = Callable[[], Any]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured: ``num_layers`` layers of ``width``, a batch of ``num_tokens``, ``num_slots`` layers' room."""

    num_layers: int
    width: int
    num_tokens: int
    num_slots: int
    device: torch.device
    dtype: torch.dtype
    rounds: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward on the device: when copies from the host ran and when kernels did, in microseconds."""

    copies: tuple[Interval, ...]
    kernels: tuple[Interval, ...]

    @property
    def copied_us(self) -> float:
        """Time in which a copy ran."""
        return sum(end - start for start, end in merged(self.copies))

    @property
    def both_us(self) -> float:
        """Time in which a copy and a kernel ran."""
        return sum(
            max(0.0, min(end, end_k) - max(start, start_k))
            for start, end in merged(self.copies)
            for start_k, end_k in merged(self.kernels)
        )


class Layer(nn.Module):
    """Norm, up, activation, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [tokens, width]."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times, in order, none overlapping another."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def timeline(step: Step, device: torch.device) -> Timeline:
    """Profile one step."""
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        synchronize(device)
    copies, kernels = [], []
    for event in prof.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        interval = event.time_range.start, event.time_range.end
        if "Memcpy HtoD" in event.name:
            copies.append(interval)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(interval)
    return Timeline(tuple(sorted(copies)), tuple(sorted(kernels)))


def made(setup: Setup) -> nn.Sequential:
    """The stack, in host memory."""
    torch.manual_seed(0)
    layers = [Layer(setup.width).to(setup.dtype) for _ in range(setup.num_layers)]
    return nn.Sequential(*layers).eval()


def manager_of(
    model: nn.Module, setup: Setup, mode: str, offloader: gp.offload.WeightOffloader | None
) -> gp.CudaGraphManager:
    """A manager with a graph for the batch, where the mode has graphs."""
    dispatcher = gp.CudagraphDispatcher(mode, [setup.num_tokens], max_num_reqs=setup.num_tokens)
    inputs = [gp.InputSpec("input", (setup.num_tokens, setup.width), setup.dtype)]
    manager = gp.CudaGraphManager(
        model,
        dispatcher,
        inputs,
        offloader=offloader,
        device=setup.device,
        compiler="inductor" if setup.device.type == "cuda" else "aot_eager",
    )
    if manager.needs_capture():
        manager.capture()
    return manager


def copies_alone(setup: Setup, model: nn.Module) -> Step:
    """As many copies of as many bytes as one offloaded forward makes, one behind the other."""
    num_bytes = sum(weight.nbytes for weight in model[0].parameters())
    is_cuda = setup.device.type == "cuda"
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(setup.num_layers)]
    slot = torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device)

    def copy_all() -> None:
        for memory in host:
            slot.copy_(memory, non_blocking=True)

    return copy_all


@contextmanager
def forms(setup: Setup) -> Iterator[dict[str, Step]]:
    """Name -> step, each checked against the resident model."""
    resident = made(setup)
    model = copy.deepcopy(resident)
    offloader = gp.offload.WeightOffloader(model, num_slots=setup.num_slots, device=setup.device)
    resident.to(setup.device)
    x = torch.randn(setup.num_tokens, setup.width, dtype=setup.dtype, device=setup.device)
    managers = {RESIDENT: manager_of(resident, setup, "FULL", None)}
    managers |= {f"offloaded, {mode}": manager_of(model, setup, mode, offloader) for mode in MODES}
    try:
        with torch.inference_mode():
            expected = resident(x)
            steps: dict[str, Step] = {}
            for name, manager in managers.items():
                step = partial(manager.run, gp.Batch(setup.num_tokens, inputs={"input": x}))
                difference = float((step() - expected).float().norm() / expected.float().norm())
                assert difference <= TOLERANCE, f"{name}: differs from the resident model by {difference:.2e}"
                steps[name] = step
            steps[COPIES] = copies_alone(setup, resident)
            yield steps
    finally:
        for manager in managers.values():
            manager.close()


def hidden_share(timings: Mapping[str, Timing], name: str) -> float:
    """Of the shorter of compute and copies, the part that costs no time."""
    compute, copies = timings[RESIDENT].step.median, timings[COPIES].step.median
    return (compute + copies - timings[name].step.median) / min(compute, copies)


def printed(console: Console, setup: Setup, timings: Mapping[str, Timing], lines: Mapping[str, Timeline]) -> None:
    """The table."""
    where, rows = environment(setup.device), []
    for name, timing in timings.items():
        share = f"{hidden_share(timings, name):.2f}" if name.startswith("offloaded") else ""
        line = lines.get(name)
        profiled = ("", "") if line is None else (f"{line.copied_us:.0f}", f"{line.both_us:.0f}")
        rows.append((name, timing.step, timing.host, share, *profiled))
    title = (
        f"{setup.num_layers} layers of {setup.width}, {setup.num_tokens} tokens, {setup.num_slots} slots, "
        f"{setup.dtype}; {where['device']}, torch {where['torch']}"
    )
    columns = "form | step µs (quartiles) | host µs | hidden share | copies µs | of it beside kernels µs"
    console.print(table_of(title, columns, rows))


def drawn(path: Path, lines: Mapping[str, Timeline]) -> None:
    """A picture of the profiled forwards: copies above kernels, one pair of rows a mode."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(lines), 1, sharex=True, figsize=(10, 1.4 * len(lines) + 0.6), squeeze=False)
    for axis, (name, line) in zip(axes[:, 0], lines.items(), strict=True):
        start = min(first for first, _ in (*line.copies, *line.kernels))
        for row, (intervals, color) in enumerate(((line.kernels, "tab:blue"), (line.copies, "tab:orange"))):
            bars = [(first - start, last - first) for first, last in intervals]
            axis.broken_barh(bars, (row + 0.1, 0.8), color=color, edgecolor="white", linewidth=0.3)
        axis.set_yticks([0.5, 1.5], ["kernels", "copies"])
        axis.set_title(name, fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("µs")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    parser = parser_of("offload", __doc__, "tiny sizes, on a CPU if there is no GPU", rounds=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--png", type=Path, help="write a picture of the last batch's forwards here")
    given = parser.parse_args(arguments)
    if is_skipped("offload", given):
        return
    console, device = Console(), gpu_or_cpu()
    is_cuda = device.type == "cuda"
    rows: list[dict[str, Any]] = []
    for num_tokens in [8] if given.smoke else given.tokens:
        setup = (
            Setup(8, 16, num_tokens, 2, device, torch.float32, 2)
            if given.smoke
            else Setup(16, 4096, num_tokens, 4, device, torch.bfloat16, given.rounds)
        )
        with forms(setup) as steps:
            timings = interleaved(
                steps, device=device, rounds=setup.rounds, steps_a_round=2 if given.smoke else 10, host_calls=2
            )
            offloaded = {name: step for name, step in steps.items() if name.startswith("offloaded")}
            lines = {name: timeline(step, device) for name, step in offloaded.items()} if is_cuda else {}
        printed(console, setup, timings, lines)
        rows += [
            {"tokens": num_tokens, "form": name, "step_us": asdict(timing.step), "host_us": asdict(timing.host)}
            | ({"hidden_share": hidden_share(timings, name)} if name in offloaded else {})
            | ({"copied_us": lines[name].copied_us, "both_us": lines[name].both_us} if name in lines else {})
            for name, timing in timings.items()
        ]
        if given.png is not None and lines:
            drawn(given.png, lines)
    write_json(given.json, {**environment(device), "rows": rows})


if __name__ == "__main__":
    main()
