"""Replay plans: which arguments a plan serves, and what its replays still check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpass.capture.entry import GraphEntry
from graphpass.capture.plan import ReplayPlan, entries_by_region, replay_of
from graphpass.context import set_forward_context
from graphpass.errors import CaptureError, ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

X = torch.arange(8.0)
KEY = BatchDescriptor(8)


def plan_for(args: Any, static: Any = (), generation: int = 0) -> ReplayPlan:
    dynamic = [p for p, value in enumerate(args) if isinstance(value, torch.Tensor) and p not in static]
    return ReplayPlan.of(
        "g0",
        KEY,
        [("r0", "replay")],
        lambda *_: [],
        args=args,
        static_positions=static,
        dynamic_positions=dynamic,
        generation=generation,
    )


def test_a_plan_serves_its_static_inputs_and_its_generation() -> None:
    weight, x = torch.ones(8), torch.ones(8)
    plan = plan_for((x, weight, 3), static=[1], generation=4)
    assert plan.serves((x, weight, 3), 4)
    assert plan.serves((torch.ones(8), weight, 3), 4)
    assert not plan.serves((x, torch.ones(8), 3), 4)
    assert not plan.serves((x, weight, 3), 5)


@pytest.mark.parametrize(
    ("captured", "other"),
    [
        (lambda m: (m[:4], m[4:], torch.ones(4)), lambda m: (m[:4], torch.ones(4), torch.ones(4))),
        (lambda m: (m[:4], torch.ones(4), torch.ones(4)), lambda m: (m[:4], m[4:], torch.ones(4))),
        (lambda m: (m[:4], m[4:], torch.ones(4)), lambda m: (m[:4], m[3:7], torch.ones(4))),
        (lambda m: (m[:4], torch.ones(4), torch.ones(4)), lambda m: (m[:4], torch.ones(4), None)),
    ],
    ids=["now apart", "now shared", "other offset", "now inside a static input"],
)
def test_a_plan_serves_one_way_of_sharing_memory(captured: Any, other: Any) -> None:
    memory, static = torch.ones(8), torch.ones(8)
    plan = plan_for((*captured(memory), static), static=[3])
    assert plan.serves((*captured(torch.ones(8)), static), 0)
    arguments = [static[:4] if value is None else value for value in other(memory)]
    assert not plan.serves((*arguments, static), 0)


@pytest.fixture
def entry(rig: Any) -> GraphEntry:
    """The entry of one captured region, as a compiled callable finds it after the capture."""
    wrapper = rig.wrap(lambda x, n: x * n, "PIECEWISE", name="g0.r0", outputs="view")
    rig.kept = wrapper
    rig.capture(wrapper, X, 3, at_mode="PIECEWISE")
    (entry,) = rig.runtime.forward_entries()
    return entry


def test_entries_are_found_by_region(rig: Any, entry: GraphEntry) -> None:
    assert entries_by_region([entry], "g0.") == {"r0": entry}
    assert entries_by_region([entry], "g01.") == {}


def test_a_plans_replay_checks_what_the_plan_cannot_know(rig: Any, entry: GraphEntry) -> None:
    replay = replay_of(entry, rig.runtime)
    with set_forward_context(runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=KEY) as context:
        rig.runtime.enter_forward(context, [X], "g0")
        (got,) = replay(X * 2, 3)
        assert torch.equal(got, X * 6)
        with pytest.raises(ShapeError, match="does not fit"):
            replay(X[:3], 3)
        with pytest.raises(CaptureError, match="baked"):
            replay(X, 4)
        rig.runtime.exit_forward()
    assert rig.counts(rig.kept).replayed == 2
    assert rig.runtime.is_current_forward(context)


def test_dropped_graphs_void_plans(rig: Any, entry: GraphEntry) -> None:
    plan = plan_for((X,), generation=rig.runtime.generation)
    assert plan.serves((X,), rig.runtime.generation)
    rig.runtime.close()
    assert not plan.serves((X,), rig.runtime.generation)
