"""Threads that share what is compiled: results are right, captures go on beside replays, and no key is given up.

Every call has a batch of a random size and contents of its own, so that a result of another call is seen.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cgpass.autodispatch import AutoDispatcher
from cgpass.servedcalls import ExactGraphs, ServedCalls
from graphpass import GraphRuntime
from graphpass.dispatch.recurring import RecurringKey
from tests.threads import in_threads
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import module

CALLS = pytest.mark.parametrize("num_calls", [50, pytest.param(200, marks=pytest.mark.soak)])
MODES = pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])


class Served(Compiled):
    """A model, row-wise unless it is given, under auto dispatch; unless ``is_fresh``, Dynamo has compiled it."""

    def __init__(
        self,
        rt: GraphRuntime,
        model: Any = None,
        mode: str = "FULL_AND_PIECEWISE",
        *,
        is_fresh: bool = False,
        **options: Any,
    ) -> None:
        splits = ["aten::relu"] if mode == "PIECEWISE" else []
        given = {"dispatch": "auto", "dynamic": True, "mode": mode, "splitting_ops": splits, **options}
        super().__init__(rt, model or rowwise(), **given)
        if not is_fresh:  # Dynamo's own compilation is not what is tested
            self.call(3, 1)

    def call(self, *sizes: int) -> None:
        for size in sizes:
            self(torch.randn(size, 6))

    def calls(self, num_calls: int, most: int) -> Callable[[int], None]:
        """What a thread runs."""

        def run(number: int) -> None:
            sizes, contents = random.Random(number), torch.Generator().manual_seed(number)
            for _ in range(num_calls):
                x = torch.randn(sizes.randint(1, most), 6, generator=contents)
                with torch.no_grad():
                    agrees(self(x), self.model(x))

        return run

    def assert_captured_once_and_replayed(self, most: int) -> None:
        """It replays at each size after the threads have ended.

        How many calls of the threads replay depends on the machine: a call beside a capture runs without a graph. So
        each size is called three times here: two calls warm and capture what the threads did not get to, the third
        replays.
        """
        sizes = range(1, most + 1)
        self.call(*sizes, *sizes)
        replayed = self.replayed
        self.call(*sizes)
        assert self.replayed - replayed >= most
        assert self.uses("captured") == {(1,)}, "one graph a key, whichever thread captured it"
        assert not given_up(self.rt)

    @property
    def replayed(self) -> int:
        return sum(c.replayed for c in self.rt.counts().values())


def rowwise_with_choice(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = self.first(x).relu() * 2
    return self.second(hidden).tanh(), hidden.argmax(-1)


def rowwise() -> Any:
    """Row-wise, so that its batch is padded."""
    return module(rowwise_with_choice, first=nn.Linear(6, 12), second=nn.Linear(12, 6)).eval()


def given_up(rt: GraphRuntime) -> list[Any]:
    """The reasons of calls without a graph that name a failure."""
    figures = rt.report().figures
    reasons = [*rt.notes, *(calls.reason.why for calls in figures.uncaptured)]
    return [reason for reason in reasons if "failed" in reason]


@CALLS
@MODES
def test_threads_share_one_runtime(num_calls: int, mode: str, rt: GraphRuntime) -> None:
    fast = Served(rt, mode=mode)
    in_threads(fast.calls(num_calls, most=12))
    fast.assert_captured_once_and_replayed(12)


@CALLS
def test_threads_compile_and_capture_together(num_calls: int, rt: GraphRuntime) -> None:
    """Nothing is compiled when the threads start."""
    fast = Served(rt, is_fresh=True)
    in_threads(fast.calls(num_calls, most=9))
    fast.assert_captured_once_and_replayed(9)


def test_threads_that_call_a_size_first_share_its_buffer(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read a buffer at its address: with two buffers, a key would have two graphs."""
    fast, zeros, new_call, num_allocated, num_calls = Served(rt), torch.zeros, ServedCalls._new_call, 0, 0

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

    fast.call(5)
    with monkeypatch.context() as patched:
        patched.setattr(AutoDispatcher, "_permission", in_turn)
        patched.setattr(ExactGraphs, "captured", spied)
        in_threads(lambda number: fast.call(5), num_threads=2)
    assert len(measured) == 1
    fast.call(9, 9, 9)
    assert sum(c.captured for c in rt.counts().values()) == 2
