"""Times variants of one step in interleaved rounds of one process."""

from __future__ import annotations

import gc
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Spread", "host_us", "in_rounds", "with_own_code"]

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
        return f"{self.median:.{digits}f} ({self.q1:.{digits}f} to {self.q3:.{digits}f})"


def in_rounds(
    steps: Mapping[str, Step], figures: Mapping[str, Callable[[Step], float]], rounds: int
) -> dict[str, dict[str, Spread]]:
    """Measure every variant once a round, each round starting with another one.

    A slow moment of the machine then falls on all of them. The garbage collector is off in the meantime.

    Args:
        steps: {variant: runs one step}.
        figures: {name: measures a step once}, in this order.
        rounds: values behind each median.

    Returns:
        {variant: {figure: its spread}}.
    """
    values: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in figures} for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                steps[name]()  # the caches of host and device hold another variant's data
                for figure, measure in figures.items():
                    values[name][figure].append(measure(steps[name]))
    finally:
        gc.enable()
    return {name: {figure: Spread.of(found) for figure, found in of.items()} for name, of in values.items()}


def host_us(step: Step, device: torch.device, calls: int) -> float:
    """Median time of a call on an idle device until it returns; what the device then does is not included."""
    taken = []
    for _ in range(calls):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        step()
        taken.append((time.perf_counter() - start_s) * 1e6)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(taken)


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``call``, with a code object of its own.

    Dynamo stores compiled code, and counts recompiles, by code object: variants of one model would share one list.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = entry.__code__.replace()
    return types.FunctionType(code, entry.__globals__, entry.__name__, None, entry.__closure__)
