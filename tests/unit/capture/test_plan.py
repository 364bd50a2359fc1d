"""Replay plans: which arguments a plan serves, and what its replays still check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import cgpass
import graphpass as gp
from cgpass.plans import PlannedReplay, ReplayPlans
from graphpass.capture.replay import GraphEntry, ReplayPlan
from graphpass.compat import memory
from graphpass.context import set_forward_context
from graphpass.errors import CaptureError, ShapeError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from tests.observed import reached

X = torch.arange(8.0)
KEY, FOUR = BatchDescriptor(8), BatchDescriptor(4)


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


FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
NUM_STATIC = 300


class Questions(TorchFunctionMode):
    """Counts what is asked of parameters while it is active: methods, properties, operations."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.nn.Parameter):
            self.asked.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(NUM_STATIC // 2)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = (x + y).flip(-1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each comparison of addresses; what does the comparing is out of the picture."""
    sizes: list[int] = []

    def equal(tensors: list[Any], expected: list[int | None], positions: list[int]) -> bool:
        sizes.append(len(positions))
        with torch._C.DisableTorchFunction():
            return all(tensors[p].data_ptr() == expected[p] for p in positions)

    monkeypatch.setattr(memory, "data_ptrs_equal", equal)
    return sizes


def wrapper_call(num_instances: int) -> Callable[[], Any]:
    """A step through a wrapper that has a graph for each of several sets of parameters."""
    runtime = gp.GraphRuntime()
    wrapper = gp.CUDAGraphWrapper(lambda x, y, *_: x + y, FULL, runtime=runtime, name="f")
    staged = [torch.randn(4, 4) for _ in range(2)]
    every = [[*staged, *(torch.nn.Parameter(torch.randn(4)) for _ in range(NUM_STATIC))] for _ in range(num_instances)]

    def step(args: list[Any]) -> Any:
        with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=FOUR) as context:
            return wrapper.call_flat(context, args)

    with runtime.capturing():
        for args in every:
            step(args)
    return lambda: step(every[-1])


def compiled_call(mode: gp.CUDAGraphMode) -> Callable[[], Any]:
    """A step of a compiled model, past Dynamo: PIECEWISE is a plan of two regions with 300 static inputs together."""
    runtime = gp.GraphRuntime()
    options = cgpass.options(splitting_ops=["aten::flip"], compiler="eager", runtime=runtime)
    compiled = torch.compile(Layers().eval(), backend="cgpass", options=options)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with runtime.capturing():
        (call,) = reached(runtime, lambda: compiled(x, y), runtime_mode=mode, batch_descriptor=FOUR)

    def step() -> Any:
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=FOUR):
            return call.callable.call(call.args)  # type: ignore[attr-defined]

    return step


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "make_call",
    [
        pytest.param(lambda: wrapper_call(1), id="wrapper"),
        pytest.param(lambda: wrapper_call(4), id="wrapper with four instances"),
        pytest.param(lambda: compiled_call(FULL), id="compiled, FULL"),
        pytest.param(lambda: compiled_call(PIECEWISE), id="compiled, PIECEWISE"),
    ],
)
def test_static_inputs_are_compared_once_a_step(make_call: Callable[[], Any], comparisons: list[int]) -> None:
    call = make_call()
    call()  # the first step asks for layouts one by one, if Dynamo does not guard them
    comparisons.clear()
    with Questions() as questions:
        call()
    assert comparisons == [NUM_STATIC]
    # One parameter's address tells the instances of a class apart.
    assert questions.asked in ([], ["data_ptr"])
