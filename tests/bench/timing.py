"""How the benchmarks measure: interleaved rounds in one process, and graphs captured by hand to measure against.

Two figures for one step. *Step time*: several steps are enqueued between two synchronisations, and the time divided by
their number, so that the slower of host and device counts. *Host time*: the device is idle when one step is enqueued,
and only the enqueueing is timed; what the device does with it afterwards is not.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphpass.cli.benchmark import Spread, host_us, in_rounds
from graphpass.ladder.modelstate import entry_of

__all__ = [
    "HandCapture",
    "Spread",
    "Timing",
    "environment",
    "interleaved",
    "plain_compiled",
    "synchronize",
    "write_json",
]

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


def interleaved(
    steps: Mapping[str, Step], *, device: torch.device, rounds: int, steps_a_round: int, host_calls: int
) -> dict[str, Timing]:
    """Measure every variant once a round, see :func:`graphpass.cli.benchmark.in_rounds`.

    Args:
        steps: name -> what one step calls.
        device: what to wait for.
        rounds: values behind each median.
        steps_a_round: steps between two synchronisations.
        host_calls: steps enqueued on an idle device, one at a time; their median is the value of the round.
    """
    figures = {
        "step": partial(_step_us, device=device, count=steps_a_round),
        "host": partial(host_us, device=device, calls=host_calls),
    }
    return {name: Timing(**found) for name, found in in_rounds(steps, figures, rounds).items()}


def _step_us(step: Step, device: torch.device, count: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count * 1e6


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
