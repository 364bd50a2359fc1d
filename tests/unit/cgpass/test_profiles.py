"""Names in a profile: each replay by its key, each region by its name and module; nothing runs without a profiler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cgpass
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime, set_forward_context

KEY = BatchDescriptor(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cumsum(self.first(x), dim=1))


def step_of(rt: GraphRuntime, mode: str) -> Callable[[], torch.Tensor]:
    """A captured model's step: a replay of its key."""
    options = cgpass.options(compiler="eager", splitting_ops=["aten::cumsum"], runtime=rt)
    compiled = torch.compile(Model().eval(), backend="cgpass", options=options, fullgraph=True)
    x = torch.ones(4, 6)

    def step() -> torch.Tensor:
        with torch.inference_mode(), set_forward_context(runtime_mode=CUDAGraphMode.parse(mode), batch_descriptor=KEY):
            return compiled(x)

    with rt.capturing():
        step()
    step()
    return step


def ranges(step: Callable[[], Any]) -> list[str]:
    """The names of ours in a profile of one step, in the order of their start."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        step()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("g0")]


def calls(step: Callable[[], Any]) -> Counter[str]:
    """How often each function, of Python or of C, is called in one step."""
    seen: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            seen[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            seen[f"C {getattr(called, '__qualname__', called)}"] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def test_a_replay_has_the_name_of_its_key(rt: GraphRuntime) -> None:
    assert ranges(step_of(rt, "FULL")) == [f"g0.full FULL {KEY}"]


def test_regions_have_their_names_and_modules(rt: GraphRuntime) -> None:
    assert ranges(step_of(rt, "PIECEWISE")) == [
        f"g0 PIECEWISE {KEY}",
        "g0.r0 replay first",
        "g0.r1 eager",
        "g0.r2 replay layers",
    ]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_results_are_the_same_under_a_profiler(rt: GraphRuntime, mode: str) -> None:
    step = step_of(rt, mode)
    expected, before = step(), rt.stats().replayed
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        seen = step()
    assert torch.equal(seen, expected)
    assert rt.stats().replayed - before == (1 if mode == "FULL" else 2)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_without_a_profiler_no_function_of_python_runs_for_it(rt: GraphRuntime, mode: str) -> None:
    step = step_of(rt, mode)
    before = calls(step)
    assert ranges(step)
    after = calls(step)
    assert after == before, "a profile leaves nothing behind"
    assert not [name for name in before if "in_range" in name or "record_function" in name]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_the_check_for_a_profiler_is_no_call_of_python(
    rt: GraphRuntime, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(rt, mode)
    with_check = calls(step)
    monkeypatch.setattr("graphpass.compat.operators.is_profiled", lambda: False)
    without = calls(step)
    extra = without - with_check
    assert sum(extra.values()) == 1, "the function in its place, once a replay of a callable"
