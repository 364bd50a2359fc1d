"""Host microseconds a call of each way to replay, side by side in one process: ``python -m tests.bench.host_time``.

``--json FILE`` writes the figures, too, so that two trees can be compared; needs a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cgpass
import graphpass as gp
from tests.e2e.hugging_face import Place
from tests.e2e.towers import TOWERS

ROUNDS, CALLS = 15, 200


def host_us(run: Callable[[], Any], rounds: int = ROUNDS, calls: int = CALLS) -> float:
    """Median host microseconds of one call, the device drained between rounds."""
    for _ in range(20):
        run()
    took = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        took.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(took)


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


def _piecewise(layers: list[torch.nn.Linear], x: torch.Tensor) -> Callable[[], Any]:
    """A step over one region for each layer, cut at the activations between them."""
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU()))).eval()
    options = {"splitting_ops": [torch.nn.functional.relu], "outputs": "view", "capture_sizes": [len(x)]}
    fast = torch.compile(model, backend="cgpass", options=options)
    for _ in range(4):
        fast(x)
    return partial(fast, x)


def _padded(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """A call of one argument whose rows are padded to those of ``x``."""
    fast = torch.compile(model, backend="cgpass", dynamic=True, options={"capture_sizes": [len(x)]})
    few = x[: len(x) - 3].clone()
    for _ in range(4):
        fast(few)
    return partial(fast, few)


def _encoded() -> Callable[[], Any]:
    """A request of two images of a small stock tower."""
    tower = next(tower for tower in TOWERS if tower.family == "qwen3_vl")
    model = tower.build(Place("cuda", torch.float16, 0.0))
    options = gp.EncoderOptions(token_budgets=[16, 32, 64], costs=None)  # always a replay
    manager = gp.EncoderCudaGraphManager.from_model(model, options=options, **tower.options)
    manager.capture()
    grids = torch.tensor([[1, 4, 4], [1, 6, 8]])
    patch = 3 * model.config.temporal_patch_size * model.config.patch_size**2
    pixels = torch.randn(int(grids.prod(1).sum()), patch, device="cuda")
    return partial(manager.execute, {"pixel_values": pixels, "image_grid_thw": grids})


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
    figures: dict[str, float] = {}
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
                "one argument, padded": _padded(model, x),
                "PIECEWISE, a region for each layer": _piecewise(layers, x),
            }
            if num_layers == 4:
                rows["encoder.execute, two images"] = _encoded()
            for what, run in rows.items():
                figures[f"{num_layers}: {what}"] = us = host_us(run)
                table.add_row(str(num_layers), what, f"{us:.1f}")
    console.print(table)
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
