"""Host microseconds a call: the pieces of a graphed step, and the whole of it, side by side in one process.

``python -m tests.bench.host_time``; needs a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cgpass
import graphpass as gp

ROUNDS, CALLS = 15, 200


def host_us(run: Callable[[], Any]) -> float:
    """Median host microseconds of one call, the device drained between rounds."""
    for _ in range(20):
        run()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds)


def _graphed(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> gp.GraphedModel:
    fast = gp.graphed(model, [len(x)], {"input": 0}, **options)
    fast.capture(x)
    return fast


def _engine(model: torch.nn.Module, x: torch.Tensor, outputs: str) -> Callable[[], Any]:
    runtime = gp.GraphRuntime()
    options = cgpass.options(outputs=outputs, runtime=runtime)
    compiled = torch.compile(model, backend="cgpass", options=options)
    key = gp.BatchDescriptor(len(x))

    def step() -> Any:
        with gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=key):
            return compiled(x)

    with runtime.capturing():
        step()
    return step


def _managed(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    dispatcher = gp.CudagraphDispatcher("FULL", [len(x)], max_num_reqs=len(x))
    manager = gp.CudaGraphManager(model, dispatcher, [gp.InputSpec("input", tuple(x.shape), x.dtype)], device=x.device)
    manager.capture()
    return partial(manager.run, gp.Batch(len(x), inputs={"input": x}))


def main() -> None:
    """Print the table."""
    console = Console(width=100)
    if not torch.cuda.is_available():
        console.print("host_time needs a GPU: skipped")
        return
    table = Table(
        "num layers", "what", "host µs a call", title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    with torch.inference_mode():
        for num_layers in (4, 60):
            layers = [torch.nn.Linear(64, 64) for _ in range(num_layers)]
            model = torch.nn.Sequential(*layers).cuda().eval()
            x = torch.randn(8, 64, device="cuda")
            graph = torch.cuda.CUDAGraph()
            model(x)
            with torch.cuda.graph(graph):
                model(x)
            reduce_overhead = torch.compile(model, mode="reduce-overhead")
            rows: dict[str, Callable[[], Any]] = {
                "raw replay": graph.replay,
                "torch.compile, reduce-overhead": partial(reduce_overhead, x),
                "compiled(x) under FULL, clone": _engine(model, x, "clone"),
                "compiled(x) under FULL, view": _engine(model, x, "view"),
                "manager.run, no padding": _managed(model, x),
                "graphed(x), no padding, clone": partial(_graphed(model, x), x),
                "graphed(x), no padding, view": partial(_graphed(model, x, outputs="view"), x),
            }
            for what, run in rows.items():
                table.add_row(str(num_layers), what, f"{host_us(run):.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
