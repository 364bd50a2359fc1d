"""How the benchmarks measure: interleaved rounds in one process, and graphs captured by hand to measure against.

Two figures for one step. *Step time*: several steps are enqueued between two synchronisations, and the time divided by
their number, so that the slower of host and device counts. *Host time*: the device is idle when one step is enqueued,
and only the enqueueing is timed; what the device does with it afterwards is not.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "HandCapture",
    "Spread",
    "Timing",
    "environment",
    "interleaved",
    "plain_compiled",
    "synchronize",
    "with_own_code",
    "write_json",
]

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a figure over the rounds, in microseconds."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1
        return f"{self.median:.{digits}f} ({self.q1:.{digits}f}..{self.q3:.{digits}f})"


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
    """Measure every variant once a round, the first one of a round another each time.

    A slow moment of the machine then falls on all of them. The garbage collector is off meanwhile.

    Args:
        steps: name -> what one step calls.
        device: what to wait for.
        rounds: values behind each median.
        steps_a_round: steps between two synchronisations.
        host_calls: steps enqueued on an idle device, one at a time; their median is the value of the round.
    """
    step_us: dict[str, list[float]] = {name: [] for name in steps}
    host_us: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                steps[name]()  # the caches of host and device are another variant's
                step_us[name].append(_step_us(steps[name], device, steps_a_round))
                host_us[name].append(_host_us(steps[name], device, host_calls))
    finally:
        gc.enable()
    return {name: Timing(Spread.of(step_us[name]), Spread.of(host_us[name])) for name in names}


def _step_us(step: Step, device: torch.device, count: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count * 1e6


def _host_us(step: Step, device: torch.device, count: int) -> float:
    taken = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        step()
        taken.append((time.perf_counter() - start) * 1e6)
    synchronize(device)
    return statistics.median(taken)


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


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``call``, with code of its own.

    Dynamo keeps compiled code, and counts recompiles, by code object: forms of one model would share one list.
    """

    def entry(*args: Any) -> Any:
        return call(*args)

    return types.FunctionType(entry.__code__.replace(), entry.__globals__, entry.__name__, None, entry.__closure__)


def plain_compiled(call: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """``torch.compile`` for static shapes."""
    return torch.compile(with_own_code(call), backend=compiler, dynamic=False)


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
