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

import graphpass as gp
from cgpass.auto import AutoDispatcher
from cgpass.callable import GraphedCallable
from cgpass.exactgraphs import ExactGraphs
from graphpass import GraphRuntime
from graphpass.dispatch.recurring import RecurringKey
from tests.threads import in_threads

NUM_THREADS = 4
CALLS = pytest.mark.parametrize("num_calls", [50, pytest.param(200, marks=pytest.mark.soak)])
MODES = pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])


class Rows(nn.Module):
    """Row-wise, so that its batch is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).relu() * 2
        return self.second(hidden).tanh(), hidden.argmax(-1)


class Counting(nn.Module):
    """Written state, whose sum tells whether each call counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).relu()


def options(rt: GraphRuntime, mode: str, **given: Any) -> dict[str, Any]:
    splits = ["aten::relu"] if mode == "PIECEWISE" else []
    return {"compiler": "eager", "runtime": rt, "dispatch": "auto", "mode": mode, "splitting_ops": splits, **given}


def calls_of(
    compiled: Callable[..., Any], model: Callable[..., Any], num_calls: int, most: int
) -> Callable[[int], None]:
    def run(number: int) -> None:
        sizes, contents = random.Random(number), torch.Generator().manual_seed(number)
        for _ in range(num_calls):
            x = torch.randn(sizes.randint(1, most), 6, generator=contents)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x))

    return run


def given_up(rt: GraphRuntime) -> list[Any]:
    """The reasons of calls without a graph that name a failure."""
    figures = rt.report().figures
    reasons = [*rt.notes, *(calls.reason.why for calls in figures.uncaptured)]
    return [reason for reason in reasons if "failed" in reason]


def assert_captured_once_and_replayed(rt: GraphRuntime, compiled: Callable[..., Any], most: int) -> None:
    """``compiled`` replays at each size after the threads have ended.

    How many calls of the threads replay depends on the machine: a call beside a capture runs without a graph. So each
    size is called three times here: two calls warm and capture what the threads did not get to, the third replays.
    """
    for _ in range(2):
        one_call_a_size(compiled, most)
    replayed = num_replayed(rt)
    one_call_a_size(compiled, most)
    assert num_replayed(rt) - replayed >= most
    assert {c.captured for c in rt.counts().values()} == {1}, "one graph a key, whichever thread captured it"
    assert not given_up(rt)


def one_call_a_size(compiled: Callable[..., Any], most: int) -> None:
    for size in range(1, most + 1):
        call_at(compiled, size)


def num_replayed(rt: GraphRuntime) -> int:
    return sum(c.replayed for c in rt.counts().values())


@CALLS
@MODES
def test_threads_share_one_runtime(num_calls: int, mode: str, rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, mode))
    with torch.no_grad():
        for size in (3, 1):  # Dynamo's own compilation is not what is tested
            compiled(torch.randn(size, 6))
    in_threads(calls_of(compiled, model, num_calls, most=12))
    assert_captured_once_and_replayed(rt, compiled, most=12)


@CALLS
def test_threads_compile_and_capture_together(num_calls: int, rt: GraphRuntime) -> None:
    """Nothing is compiled when the threads start."""
    model = Rows().eval()
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE"))
    in_threads(calls_of(compiled, model, num_calls, most=9))
    assert_captured_once_and_replayed(rt, compiled, most=9)


@CALLS
def test_threads_with_a_runtime_each(num_calls: int) -> None:
    models = [Rows().eval() for _ in range(NUM_THREADS)]
    runtimes = [GraphRuntime() for _ in models]
    compiled = [
        torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE"))
        for model, rt in zip(models, runtimes, strict=True)
    ]
    with torch.no_grad():
        for each in compiled:
            for size in (3, 1):
                each(torch.randn(size, 6))
    in_threads(lambda number: calls_of(compiled[number], models[number], num_calls, most=12)(number))
    for rt in runtimes:
        assert not given_up(rt)
        assert {c.captured for c in rt.counts().values()} == {1}
        assert rt.stats().replayed > num_calls // 10
        rt.close()


@CALLS
def test_two_models_of_one_runtime(num_calls: int, rt: GraphRuntime) -> None:
    """Their graphs share a pool: each replay makes the other model's outputs stale."""
    models = [Rows().eval(), nn.Sequential(nn.Linear(6, 6), nn.GELU()).eval()]
    compiled = [
        torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE"))
        for model in models
    ]
    with torch.no_grad():
        for each in compiled:
            for size in (3, 1):
                each(torch.randn(size, 6))
    in_threads(lambda number: calls_of(compiled[number % 2], models[number % 2], num_calls, most=9)(number))
    for each in compiled:
        assert_captured_once_and_replayed(rt, each, most=9)


def compiled_rows(rt: GraphRuntime, **given: Any) -> Callable[..., Any]:
    compiled = torch.compile(
        Rows().eval(), backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE", **given)
    )
    for size in (3, 1):
        call_at(compiled, size)
    return compiled


def call_at(compiled: Callable[..., Any], size: int, times: int = 1) -> None:
    for _ in range(times):
        with torch.no_grad():
            compiled(torch.randn(size, 6))


def test_threads_that_call_a_size_first_share_its_buffer(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read a buffer at its address: with two buffers, a key would have two graphs."""
    compiled, zeros, num_allocated = compiled_rows(rt), torch.zeros, 0

    def slow_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_allocated
        num_allocated += 1
        time.sleep(0.05)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", slow_zeros)
    in_threads(lambda number: call_at(compiled, 5))
    assert num_allocated == 1


def test_threads_that_capture_a_key_together_count_one_graph(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the key without a graph. The later one replays the other's graph, and measures no capture."""
    compiled = compiled_rows(rt, max_graphs=2)
    permission, timed, measured, turns = GraphedCallable._permission, ExactGraphs.captured, [], threading.Barrier(2)

    def in_turn(graphed: GraphedCallable, auto: AutoDispatcher, key: RecurringKey) -> Any:
        if turns.wait():
            while not key.is_captured:
                time.sleep(0.001)
        return permission(graphed, auto, key)

    def spied(graphs: ExactGraphs, key: RecurringKey, *how: Any) -> None:
        measured.append(key.descriptor)
        timed(graphs, key, *how)

    call_at(compiled, 5)
    with monkeypatch.context() as patched:
        patched.setattr(GraphedCallable, "_permission", in_turn)
        patched.setattr(ExactGraphs, "captured", spied)
        in_threads(lambda number: call_at(compiled, 5), num_threads=2)
    assert len(measured) == 1
    call_at(compiled, 9, times=3)
    assert sum(c.captured for c in rt.counts().values()) == 2


@CALLS
def test_what_calls_write_is_written_once_a_call(num_calls: int, rt: GraphRuntime) -> None:
    model = Counting().eval()
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE"))
    twin = nn.Sequential(model.inner, nn.ReLU())
    with torch.no_grad():
        for size in (3, 1):
            compiled(torch.randn(size, 6))
    in_threads(calls_of(compiled, twin, num_calls, most=6))
    assert not given_up(rt)
    # Calls without a graph add in Python's eager code, two of which may meet; calls over a graph are one at a time.
    replayed = sum(c.replayed for (region, _, _), c in rt.counts().items())
    assert replayed <= int(model.calls) <= NUM_THREADS * num_calls + 2


@CALLS
def test_a_capturing_scope_beside_calls_of_other_threads(num_calls: int, rt: GraphRuntime) -> None:
    model = Rows().eval()
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options(rt, "FULL_AND_PIECEWISE"))
    with torch.no_grad():
        for size in (3, 1):
            compiled(torch.randn(size, 6))
    calls = calls_of(compiled, model, num_calls, most=12)

    def run(number: int) -> None:
        if number:
            calls(number)
            return
        for size in (12, 7, 2):
            x = torch.randn(size, 6)
            while True:
                try:
                    scope = rt.capturing()
                    with (
                        torch.no_grad(),
                        scope,
                        gp.set_forward_context(
                            runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=gp.BatchDescriptor(size)
                        ),
                    ):
                        got = compiled(x)
                except gp.errors.CaptureError as error:
                    if "capturing already" not in error.problem:
                        raise
                    continue
                break
            with torch.no_grad():
                torch.testing.assert_close(got, model(x))

    in_threads(run)
    assert not given_up(rt)
    assert {c.captured for c in rt.counts().values()} == {1}
