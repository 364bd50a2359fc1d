"""What a call costs the host where padding is made: ``python -m tests.bench.made_call``.

It and a call whose padding is proved replay a padded key on the tape, whose replays do nothing: host µs, the least and
the median of rounds in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from graphpass.capture.tape import _Tape

ROUNDS, CALLS, LENGTHS = 40, 100, (5, 7, 6, 7, 9, 10, 12, 7, 7, 7, 7, 7)
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "proved": lambda x: x * 2 + 1,
    "made": lambda x: x.softmax(1) * 2 + 1,
}


def compiled(program: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A program whose lengths have keys."""
    torch.compiler.reset()
    fast = torch.compile(program, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
    for length in LENGTHS:
        fast(torch.randn(3, length))
    return fast


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    x, us = torch.randn(3, 11), {name: list[float]() for name in PROGRAMS}
    with mock.patch.object(_Tape, "replay", return_value=None):  # a plan holds its graph's method from the capture on
        ready = {name: compiled(program) for name, program in PROGRAMS.items()}
        for _ in range(ROUNDS):
            for name, fast in ready.items():
                start_s = time.perf_counter()
                for _ in range(CALLS):
                    fast(x)
                us[name].append((time.perf_counter() - start_s) / CALLS * 1e6)
    for name, found in us.items():
        Console().print(f"{name}: {min(found):.1f} µs, median {statistics.median(found):.1f}")


if __name__ == "__main__":
    main()
