"""Replay plans: which arguments a plan serves, and what its replays still check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cgpass.plans import PlannedReplay, ReplayPlans
from graphpass.capture.replay import GraphEntry, ReplayPlan
from graphpass.context import set_forward_context
from graphpass.errors import CaptureError, ShapeError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

X = torch.arange(8.0)
KEY = BatchDescriptor(8)


def planned(rig: Any, function: Any, args: Any, *, name: str = "g0.r0", **roles: Any) -> GraphEntry:
    """The entry of one captured region, as a compiled callable finds it after the capture."""
    wrapper = rig.wrap(function, "PIECEWISE", name=name, outputs="view", **roles)
    rig.kept = [*getattr(rig, "kept", ()), wrapper]
    rig.capture(wrapper, *args, at_mode="PIECEWISE")
    (entry,) = rig.runtime.lease.forward_entries
    return entry


def plan_for(rig: Any, entry: GraphEntry, args: Any, arguments: Any = ()) -> ReplayPlan:
    """A plan of one region whose inputs are the callable's; ``arguments`` are those it may settle by itself."""
    replay = PlannedReplay(entry, {position: position for position in arguments}, ())

    def bind(callees: Any, fixed: Any) -> Any:
        return (lambda *_: (callees["r0"](), fixed["r0"])[1]) if fixed else callees["r0"]

    plans: Any = SimpleNamespace(name="g0", bind=bind, static=frozenset(), reuses_outputs=True, eager={}, places={})
    return ReplayPlans.plan(plans, {"r0": replay}, args, "PIECEWISE")


def run(rig: Any, plan: ReplayPlan, *args: Any) -> Any:
    with set_forward_context(runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=KEY) as context:
        rig.runtime.lease.acquire(context, args, "g0")
        try:
            plan.check(args, context)
            return plan.run(args, rig.runtime.lease)
        finally:
            rig.runtime.lease.release()


def test_a_plan_serves_its_static_inputs(rig: Any) -> None:
    weight, x = torch.ones(8), torch.ones(8)
    entry = planned(rig, lambda x, w, n: x * w * n, (x, weight, 3), static_inputs=[1])
    for plan in (entry.plan, plan_for(rig, entry, (x, weight, 3))):
        assert plan.serves([x, weight, 3])
        assert plan.serves([torch.ones(8), weight, 3])
        assert not plan.serves([x, torch.ones(8), 3])


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
def test_a_plan_serves_one_way_of_sharing_memory(rig: Any, captured: Any, other: Any) -> None:
    memory, static = torch.ones(8), torch.ones(8)
    args = (*captured(memory), static)
    entry = planned(rig, lambda a, b, c, w: a + b + c + w[:4], args, static_inputs=[3])
    arguments = [static[:4] if value is None else value for value in other(memory)]
    for plan in (entry.plan, plan_for(rig, entry, args)):
        assert plan.serves([*captured(torch.ones(8)), static])
        assert not plan.serves([*arguments, static])


@pytest.mark.parametrize("arguments", [(), (0, 1)], ids=["in the region", "once a step"])
def test_a_step_checks_copies_and_counts(rig: Any, arguments: Any) -> None:
    entry = planned(rig, lambda x, n: x * n, (X, 3))
    plan = plan_for(rig, entry, (X, 3), arguments)
    (got,) = run(rig, plan, X * 2, 3)
    assert torch.equal(got, X * 6)
    with pytest.raises(ShapeError, match="does not fit"):
        run(rig, plan, X[:3], 3)
    with pytest.raises(CaptureError, match="baked"):
        run(rig, plan, X, 4)
    (got,) = run(rig, plan, X, 3)
    assert torch.equal(got, X * 3)
