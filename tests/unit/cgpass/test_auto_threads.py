"""Threads that share what is compiled: results are right, captures go on beside replays, and no key is given up.

Every call has a batch of a random size and contents of its own, so that a result of another call is seen.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from cgpass.autodispatch import AutoDispatcher
from cgpass.servedcalls import ExactGraphs, ServedCalls
from graphpass import GraphRuntime
from graphpass.dispatch.recurring import RecurringKey
from tests.threads import in_threads
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import Rowwise


class Served(Compiled):
    """A model that is padded, under auto dispatch."""

    def __init__(self, rt: GraphRuntime, **options: Any) -> None:
        super().__init__(rt, Rowwise().eval(), dispatch="auto", dynamic=True, **options)

    def call(self, *sizes: int) -> None:
        for size in sizes:
            self(torch.randn(size, 6))

    @property
    def replayed(self) -> int:
        return sum(c.replayed for c in self.rt.counts().values())


@pytest.mark.parametrize("num_calls", [50, pytest.param(200, marks=pytest.mark.soak)])
def test_threads_compile_and_capture_together(num_calls: int, rt: GraphRuntime) -> None:
    """Nothing is compiled when the threads start; how many of their calls replay depends on the machine.

    So each size is called three times afterwards: two calls warm and capture what the threads did not get to.
    """
    fast, sizes = Served(rt), range(1, 10)

    def run(number: int) -> None:
        drawn, contents = random.Random(number), torch.Generator().manual_seed(number)
        for _ in range(num_calls):
            x = torch.randn(drawn.choice(sizes), 6, generator=contents)
            with torch.no_grad():
                agrees(fast(x), fast.model(x))

    in_threads(run)
    fast.call(*sizes, *sizes)
    replayed = fast.replayed
    fast.call(*sizes)
    assert fast.replayed - replayed >= len(sizes)
    assert fast.uses("captured") == {(1,)}, "one graph a key, whichever thread captured it"
    reasons = [*rt.notes, *(calls.reason.why for calls in rt.report().figures.uncaptured)]
    assert not [reason for reason in reasons if "failed" in reason]


def test_threads_that_call_a_size_first_share_its_buffer(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read a buffer at its address: with two buffers, a key would have two graphs."""
    fast, zeros, new_call, num_allocated, num_calls = Served(rt), torch.zeros, ServedCalls._new_call, 0, 0
    fast.call(3, 1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return new_call(*args, **kwargs)

    def slow_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_allocated
        num_allocated += 1
        until = time.monotonic() + 10
        while num_calls < 4 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(ServedCalls, "_new_call", counted)
    monkeypatch.setattr(torch, "zeros", slow_zeros)
    in_threads(lambda number: fast.call(5))
    assert num_calls == 4
    assert num_allocated == 1


def test_threads_that_capture_a_key_together_count_one_graph(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the key without a graph. The later one replays the other's graph, and measures no capture."""
    fast = Served(rt, max_graphs=2)
    permission, timed, measured, turns = AutoDispatcher._permission, ExactGraphs.captured, [], threading.Barrier(2)

    def in_turn(auto: AutoDispatcher, key: RecurringKey) -> Any:
        if turns.wait():
            while not key.is_captured:
                time.sleep(0.001)
        return permission(auto, key)

    def spied(graphs: ExactGraphs, key: RecurringKey, *how: Any) -> None:
        measured.append(key.descriptor)
        timed(graphs, key, *how)

    fast.call(3, 1, 5)
    with monkeypatch.context() as patched:
        patched.setattr(AutoDispatcher, "_permission", in_turn)
        patched.setattr(ExactGraphs, "captured", spied)
        in_threads(lambda number: fast.call(5), num_threads=2)
    assert len(measured) == 1
    fast.call(9, 9, 9)
    assert sum(c.captured for c in rt.counts().values()) == 2
