"""What a capture costs inside live traffic, by part: ``python -m tests.bench.capture_cost [--models bert vit]``.

Calls of a few sizes that recur, until each has a graph of its own. Of every call that captures: its milliseconds, those
above a replayed call of the same size, and those above a run of the compiled model without a graph (the goal is 50).
Every second such call is timed by part instead, with the device idle before and after each part, so that it takes
longer; its parts are the second table, where some contain others.

``--smoke`` takes tiny models on a CPU: the code, not the figures.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import graphpass as gp
from graphpass.capture.cuda import CudaDevice
from graphpass.capture.recorder import Recorder
from graphpass.capture.tape import TapeDevice
from graphpass.capture.wrapper import CUDAGraphWrapper
from tests.bench.one_argument import MODELS, moved
from tests.bench.timing import environment, parser_of, seconds, synchronize, write_json

SIZES = (5, 7, 9, 11, 14, 18, 20, 28)
MOST_CALLS = 1000
Call = Callable[[int], Any]


def parts_of(device: torch.device) -> dict[str, tuple[Any, str]]:
    """{part: (the object, its method)}; a part includes those that it calls."""
    kind = CudaDevice if device.type == "cuda" else TapeDevice
    return {
        "capture, all": (Recorder, "record"),
        "warm-up": (kind, "warm_up"),
        "record, all": (kind, "record"),
        "end and instantiate": (torch.cuda.CUDAGraph, "capture_end"),
        "timed replays": (kind, "timed"),
        "memory readings": (kind, "reading"),
        "inputs and buffers": (Recorder, "_inputs"),
        "first replay": (CUDAGraphWrapper, "_first_replay"),
        "empty_cache": (torch.cuda, "empty_cache"),
    }


@contextlib.contextmanager
def timed_parts(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds of each part in the body, with the device idle before and after it."""
    found: dict[str, float] = defaultdict(float)
    with contextlib.ExitStack() as stack:
        for part, (owner, name) in parts_of(device).items():
            original = getattr(owner, name)

            def timed(*args: Any, part: str = part, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                is_recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                if not is_recording:
                    synchronize(device)
                start_s = time.perf_counter()
                try:
                    return original(*args, **kwargs)
                finally:
                    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                        synchronize(device)
                    found[part] += time.perf_counter() - start_s

            stack.enter_context(mock.patch.object(owner, name, timed))
        yield found


def num_exact(runtime: gp.GraphRuntime) -> int:
    """Captures of graphs for sizes that recur."""
    return sum(c.captured for (_, _, key), c in runtime.counts().items() if ("exact", True) in key.extra)


def measure(call: Call, run: Call, runtime: Callable[[], gp.GraphRuntime], device: torch.device) -> dict[str, Any]:
    """Calls until every size has a graph of its own; ``run`` is the compiled model without graphs."""
    for size in (*SIZES, *SIZES, *SIZES):
        call(size)
    for size in SIZES:
        run(size)
    replays = {size: timed(call, size, device) for size in SIZES}
    runs = {size: timed(run, size, device) for size in SIZES}
    captures: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    above_replay, above_run, sizes, calls = [], [], [], 0
    while calls < MOST_CALLS and num_exact(runtime()) < len(SIZES):  # some may have been captured above
        size = SIZES[calls % len(SIZES)]
        before, calls = num_exact(runtime()), calls + 1
        with_parts = len(captures) % 2 == 1
        with timed_parts(device) if with_parts else contextlib.nullcontext({}) as by_part:
            taken_s = seconds(lambda size=size: call(size), device)
        if num_exact(runtime()) == before:
            continue
        captures.append(taken_s)
        sizes.append(size)
        for part, value in by_part.items():
            parts[part].append(value)
        if not with_parts:
            above_replay.append(taken_s - replays[size])
            above_run.append(taken_s - runs[size])
    median = statistics.median
    return {
        "calls": calls,
        "captures": len(captures),
        "sizes": sizes,
        "call_ms": [value * 1e3 for value in captures],
        "replay_ms": median(replays.values()) * 1e3,
        "run_ms": median(runs.values()) * 1e3,
        "above_replay_ms": [value * 1e3 for value in above_replay],
        "above_run_ms": [value * 1e3 for value in above_run],
        "parts_ms": {part: median(values) * 1e3 for part, values in parts.items()},
    }


def timed(call: Call, size: int, device: torch.device) -> float:
    """Median seconds of a call on an idle device."""
    return statistics.median(seconds(lambda: call(size), device) for _ in range(5))


def smoke_model() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    """Two linear layers."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return model, lambda size: {"input": torch.randn(size, 8)}


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = parser_of("capture_cost", __doc__)
    parser.add_argument("--models", nargs="*", default=["bert", "vit"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    device = torch.device("cpu" if given.smoke else "cuda")
    console = Console(width=150)
    table = Table(
        "model", "calls", "captures", "run ms", "replay ms", "call that captures ms", "above a replay", "above a run"
    )
    by_part = Table("model", "part", "ms")
    found = {}
    for name in ["smoke"] if given.smoke else given.models:
        model, inputs = smoke_model() if given.smoke else MODELS[name]()
        model = model.eval() if given.smoke else model.cuda().bfloat16().eval()
        options = {"compiler": "eager"} if given.smoke else {}
        compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
        off = {**options, "dispatch": "context"}
        bare = torch.compile(model, backend="cgpass", dynamic=True, options=off)
        batches = {size: inputs(size) if given.smoke else moved(inputs(size)) for size in SIZES}
        with torch.inference_mode():
            result = measure(
                lambda size, batches=batches, compiled=compiled: compiled(**batches[size]),
                lambda size, batches=batches, bare=bare: bare(**batches[size]),
                lambda compiled=compiled: gp.runtime_of(compiled),
                device,
            )
        found[name] = result
        cells = (", ".join(f"{v:.1f}" for v in result[key]) for key in ("call_ms", "above_replay_ms", "above_run_ms"))
        table.add_row(
            name, str(result["calls"]), str(result["captures"]), f"{result['run_ms']:.2f}",
            f"{result['replay_ms']:.2f}", *cells,
        )  # fmt: skip
        for part, milliseconds in result["parts_ms"].items():
            by_part.add_row(name, part, f"{milliseconds:.2f}")
        if not given.smoke:
            console.print(gp.runtime_of(compiled).report())
    console.print(environment(device), table, by_part)
    write_json(given.out or given.json, found)


if __name__ == "__main__":
    main()
