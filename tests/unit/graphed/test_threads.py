"""Threads that share a graphed model, or have one each, with captures under way: everybody gets their own results."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import graphpass as gp
from tests.unit.graphed.oracle import graphed, replays

THREADS, CALLS, WAIT_S = 4, 50, 300


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


@pytest.mark.parametrize("shared", ["model", "runtime", "nothing"])
@pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])
def test_four_threads_with_captures_under_way(shared: str, declared: bool) -> None:
    reference = Model().eval()
    given = ([2, 4, 8], {"x": 0}) if declared else ()
    runtime = gp.GraphRuntime() if shared == "runtime" else None
    models = [graphed(Model().eval(), *given, runtime=runtime) for _ in range(1 if shared == "model" else THREADS)]
    for fast in models:
        for size in (3, 5):  # what Dynamo compiles in several threads at once is its own affair
            fast(torch.randn(size, 4))

    def work(thread: int) -> None:
        chosen = random.Random(thread)
        fast = models[thread % len(models)]
        for step in range(CALLS):
            x = torch.full((chosen.randint(2, 8), 4), float(10 * thread + step) / 50)
            with torch.no_grad():
                torch.testing.assert_close(fast(x), reference(x))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS), timeout=WAIT_S))
    for fast in models:  # a call of a thread beside a capture runs without a graph
        for _ in range(3):
            fast(torch.randn(4, 4))
    assert all(replays(fast) > 0 for fast in models)
    noted = [note for fast in models for note in fast.runtime.notes]
    assert not [note for note in noted if "the capture of" in note], "no key was given up"
