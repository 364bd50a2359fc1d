"""How the benchmarks are asked, measure, and print: arguments, interleaved rounds, processes, graphs by hand, tables.

Two figures for one step. *Step time*: several steps are enqueued between two synchronisations, and the time divided by
their number, so that the slower of host and device counts. *Host time*: the device is idle when one step is enqueued,
and only the enqueueing is timed; what the device does with it afterwards is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from graphpass.capture.modelstate import entry_of
from graphpass.cli.benchmark import Spread, host_us, in_rounds

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant: ``step`` is the time of a step, host and device together, ``host`` the time to enqueue one."""

    step: Spread
    host: Spread


def free_bytes(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU."""
    synchronize(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parser_of(name: str, doc: str | None, smoke: str = "tiny sizes on a CPU", **numbers: int | None) -> Any:
    """A parser with ``--smoke``, ``--json PATH``, and an option for each number with its default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help=smoke)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    for number, default in numbers.items():
        parser.add_argument(f"--{number}", type=int, default=default, help="default: as published, fewer with --smoke")
    return parser


def listed(text: str) -> list[int]:
    """Numbers with commas between them, of the command line."""
    return [int(part) for part in text.split(",")]


def is_skipped(name: str, options: Any) -> bool:
    """Whether there is no GPU for what needs one, and says so."""
    if options.smoke or torch.cuda.is_available():
        return False
    Console().print(f"{name} needs a GPU: skipped (--smoke runs tiny sizes on a CPU)")
    return True


def gpu_or_cpu(smoke: bool = False) -> torch.device:
    """The GPU where there is one, unless for a smoke test."""
    is_cuda = torch.cuda.is_available() and not smoke
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def table_of(title: str, columns: str, rows: Iterable[Sequence[Any]]) -> Table:
    """A table with these columns, ``|`` between them; all but the first are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns.split(" | ")):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def seconds(call: Step, device: torch.device, clock: Callable[[], float] = time.perf_counter, calls: int = 1) -> float:
    """Of one call, device work included; the mean of several."""
    synchronize(device)
    start_s = clock()
    for _ in range(calls):
        call()
    synchronize(device)
    return (clock() - start_s) / calls


def in_process(module: str, arguments: Sequence[str], caches: Path) -> dict[str, Any]:
    """The figures that the last line of a process of its own holds as JSON; compiler caches lie in a folder."""
    command = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
    done = subprocess.run(command, env=own_environment(caches), capture_output=True, text=True, check=False)
    if done.returncode:
        Console(stderr=True).print(done.stderr[-3000:], markup=False)
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def own_environment(caches: Path) -> dict[str, str]:
    """The environment of a process with compiler caches in a folder, and with the bytecode that installations have.

    Where Python may not write bytecode next to the libraries, processes share a folder of it; the first one fills it.
    """
    environ = {**os.environ, **cache_folders(caches)}
    if environ.pop("PYTHONDONTWRITEBYTECODE", None):
        environ["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "graphpass-bytecode")
    return environ


def cache_folders(caches: Path) -> dict[str, str]:
    """Settings of the environment that keep what is compiled in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}


def interleaved(
    steps: Mapping[str, Step], *, device: torch.device, rounds: int, steps_a_round: int, host_calls: int
) -> dict[str, Timing]:
    """Measure every variant once a round, see :func:`graphpass.cli.benchmark.in_rounds`.

    A round's step time is that of ``steps_a_round`` steps between two synchronisations; its host time is the median of
    ``host_calls`` steps, enqueued on an idle device one at a time.
    """
    figures = {
        "step": partial(_step_us, device=device, count=steps_a_round),
        "host": partial(host_us, device=device, calls=host_calls),
    }
    return {name: Timing(**found) for name, found in in_rounds(steps, figures, rounds).items()}


def _step_us(step: Step, device: torch.device, count: int) -> float:
    return seconds(step, device, calls=count) * 1e6


def environment(device: torch.device) -> dict[str, str]:
    """Hardware and versions that a figure belongs to."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_json(path: Path | None, payload: Mapping[str, Any]) -> None:
    """Write the figures as JSON; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")


def plain_compiled(call: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """``torch.compile`` for static shapes."""
    return torch.compile(entry_of(call), backend=compiler, dynamic=False)


class HandCapture:
    """CUDA graphs captured by hand into one pool, warmed up on the stream they are captured on.

    What a graph returned is kept as long as this object is, so that no later graph of the pool is given its memory, and
    so is the body, which holds what the graph reads. On a CPU there is nothing to capture: the body runs again and its
    results are copied to where the first ones lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Any] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Step, tuple[torch.Tensor, ...]]:
        """A replay of ``body``, and where its results lie."""
        if self._device.type != "cuda":
            outputs = body()
            return partial(self._run_again, body, outputs), outputs
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                body()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = body()
        self._kept.append((graph, outputs, body))
        graph.replay()
        return graph.replay, outputs

    @staticmethod
    def _run_again(body: Callable[[], tuple[torch.Tensor, ...]], outputs: tuple[torch.Tensor, ...]) -> None:
        for kept, made in zip(outputs, body(), strict=True):
            kept.copy_(made)


@torch.inference_mode()
def behind(model: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], device: torch.device) -> float:
    """How far the eager logit of a chosen token is behind the best, as a part of the largest logit; at worst."""
    worst = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([[*prompt, *text]], device=device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float(((logits.max(1).values - chosen) / logits.abs().max()).max()))
    return worst
