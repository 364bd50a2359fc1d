"""Operators that take custom objects: what may change runs in each call, what is declared immutable is captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._library import opaque_object
from torch.testing._internal.torchbind_impls import init_torchbind_implementations

from graphpass import CUDAGraphMode, GraphRuntime
from graphpass.errors import CaptureError
from tests.unit.compiled import Compiled

try:
    init_torchbind_implementations()
    NO_QUEUE = False
except OSError:  # not every build of torch has its test library
    NO_QUEUE = True

NAMES = {"register_custom_class": "symbolic", "register_opaque_type": "reference"}
REGISTER = next(name for name in NAMES if hasattr(opaque_object, name))
register_type: Callable[..., None] = getattr(opaque_object, REGISTER)
OBJECT = opaque_object.CustomClassBase if hasattr(opaque_object, "CustomClassBase") else opaque_object.OpaqueBase


class Counter(OBJECT):  # type: ignore[misc,valid-type]
    def __init__(self) -> None:
        self.calls = 0


class Factor(OBJECT):  # type: ignore[misc,valid-type]
    """A constant; the second type is registered as the report of the first one says."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.number == other.number  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.number)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"{type(self).__name__}({self.number})", {type(self).__name__: type(self)}


class Constant(Factor):
    pass


for kind in (Counter, Factor):
    register_type(kind, typ=NAMES[REGISTER])


@torch.library.custom_op("graphpasstest_objects::counted", mutates_args=())
def counted(counter: Counter, x: torch.Tensor) -> torch.Tensor:
    counter.calls += 1
    return x * counter.calls


@torch.library.custom_op("graphpasstest_objects::scaled", mutates_args=())
def scaled(factor: Factor, x: torch.Tensor) -> torch.Tensor:
    return x * factor.number


for op in (counted, scaled):
    op.register_fake(lambda _, x: torch.empty_like(x))


def with_counter(state: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.graphpasstest_objects.counted(state, x + 1).relu()


def with_queue(state: Any, x: torch.Tensor) -> torch.Tensor:
    torch.ops._TorchScriptTesting.queue_push(state, x + 1)
    return torch.ops._TorchScriptTesting.queue_pop(state).relu() * 2


def with_factor(state: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.graphpasstest_objects.scaled(state, x + 1).relu()


def queue() -> Any:
    found = torch.classes._TorchScriptTesting._TensorQueue(torch.zeros(4, 6))
    for number in range(3):
        found.push(torch.full((4, 6), float(number)))
    return found


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("model", "make", "name"),
    [
        (with_counter, Counter, "Counter"),
        pytest.param(with_queue, queue, "_TensorQueue", marks=pytest.mark.skipif(NO_QUEUE, reason="no queue here")),
    ],
)
def test_what_has_state_runs_in_each_call(
    rt: GraphRuntime, model: Callable[..., Any], make: Callable[[], Any], name: str, compiler: str
) -> None:
    fast = Compiled(rt, model, dynamic=False, compiler=compiler, dispatch="auto")
    state, beside = make(), make()
    for number in range(1, 9):
        x = torch.full((4, 6), float(number))
        torch.testing.assert_close(fast(state, x), model(beside, x))
    reasons = {reason.why for region in rt.callables()[0].regions for reason in region.reasons}
    assert reasons
    assert all(f"object of type {name}" in why for why in reasons)
    assert rt.stats().replayed > 0
    with pytest.raises(CaptureError, match="object with state"):
        fast.at("FULL", 4, state, x, capture=True)


def test_a_type_declared_immutable_is_captured_whole(rt: GraphRuntime) -> None:
    fast, x = Compiled(rt, with_factor, dynamic=False, dispatch="auto"), torch.ones(4, 6)
    fast(Factor(3), x)
    problem = fast.problem("object with state")
    typ = re.search(r"typ='(\w+)'", problem.remedy)
    assert typ is not None
    register_type(Constant, typ=typ[1])
    constant = Constant(5)
    for _ in range(4):
        torch.testing.assert_close(fast(constant, x), (x + 1) * 5)
    (*_, record) = rt.callables()
    assert [region.kind for region in record.regions] == ["captured"]
    assert {mode for _, mode, _ in rt.counts()} == {CUDAGraphMode.FULL}
