"""Captures functions alone and times their replays on the device, for the tuning of regions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from graphpass.capture.cuda import CudaDevice
from graphpass.capture.pool import GraphDevice

_WARM_UPS = 3
_ROUNDS, _ROUND_S, _MOST_REPLAYS = 15, 2e-3, 50


class CapturedRun:
    """A function that was captured alone; see ``graphpass.compile.tuning.Run``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Sequence[torch.Tensor]) -> None:
        self._graph, self.results, self.replay = graph, results, graph.replay

    def close(self) -> None:
        """Free the graph."""
        torch.cuda.synchronize()
        self.results = ()
        self._graph.reset()


class CudaMeasurement:
    """Captures into a pool of its own and times by events; see ``graphpass.compile.tuning.Measurement``."""

    def __init__(self, device: torch.device) -> None:
        self._device = CudaDevice(device)
        self.now = time.perf_counter

    def capture(self, name: str, body: Callable[[], Sequence[torch.Tensor]]) -> CapturedRun:
        """Call ``body`` a few times, in which its kernels are chosen, and capture it."""
        with torch.cuda.device(self._device.device), torch.profiler.record_function(f"tuning {name}"):
            for _ in range(_WARM_UPS):
                body()
            torch.cuda.synchronize()
            return CapturedRun(*self._device.record(body, ()))

    def seconds(self, runs: Sequence[CapturedRun]) -> list[float]:
        """Medians over rounds of several replays, in which all runs take turns."""
        with torch.cuda.device(self._device.device):
            counts = [min(_MOST_REPLAYS, 1 + int(_ROUND_S / _time(run, 3))) for run in runs]
            rounds = [[_time(run, count) for run, count in zip(runs, counts, strict=True)] for _ in range(_ROUNDS)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def close(self) -> None:
        """Free the pool."""
        self._device.close()


def _time(run: CapturedRun, count: int) -> float:
    """Seconds of one of ``count`` replays, after one that brings the run's data back into the caches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.replay()
    start.record()
    for _ in range(count):
        run.replay()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3 / count, 1e-9)


def measurement_on(device: GraphDevice) -> CudaMeasurement | None:
    """A measurement on a GPU; None on the CPU tape, whose replays are no faster than calls."""
    return CudaMeasurement(device.device) if isinstance(device, CudaDevice) else None
