"""The pool rule from outside: threads, tasks, several models and runtimes, forwards inside forwards.

Graphs of one runtime overwrite each other's memory, so one forward of it runs at a time, whoever asks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import GraphRuntime
from graphpass.errors import PoolBusyError
from graphpass.regions import register_padding_rule
from tests.unit.compiled import Compiled
from tests.unit.models import linear

SPLIT = "graphpasstest_pool::between"
BOTH = ["FULL", "PIECEWISE"]
WAIT_S = 60
BETWEEN: list[Callable[[], Any]] = []


@torch.library.custom_op(SPLIT, mutates_args=())
def between(x: torch.Tensor) -> torch.Tensor:
    for action in BETWEEN:
        action()
    return x * 2


between.register_fake(torch.empty_like)
register_padding_rule(SPLIT, lambda call: call.tensor("x"))


class Model(nn.Module):
    """Three regions around two calls of the op: Python runs in the middle of a PIECEWISE forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(seed=3 * seed + number) for number in range(3)])
        self.is_other = seed > 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        hidden = torch.ops.graphpasstest_pool.between(first(x).tanh())
        hidden = torch.ops.graphpasstest_pool.between(second(hidden).tanh())
        result = third(hidden) + x
        return result.exp().clamp(max=3.0) - 1 if self.is_other else result


@pytest.fixture
def in_between() -> Iterator[list[Callable[[], Any]]]:
    """What the splitting op does besides its work; empty while keys are captured, unless a test says otherwise."""
    BETWEEN.clear()
    yield BETWEEN
    BETWEEN.clear()


@contextlib.contextmanager
def nothing_between() -> Iterator[None]:
    actions = BETWEEN[:]
    BETWEEN.clear()
    try:
        yield
    finally:
        BETWEEN[:] = actions


class Captured(Compiled):
    """A model with every key captured."""

    def __init__(self, runtime: GraphRuntime, seed: int = 0, sizes: tuple[int, ...] = (4, 2), **options: Any) -> None:
        super().__init__(runtime, Model(seed).eval(), dynamic=True, splitting_ops=[SPLIT], **options)
        self.capture(sizes=sizes)

    def forward(self, mode: str, x: torch.Tensor, **given: Any) -> Any:
        """One forward, in a context of its own."""
        return self.at(mode, x.shape[0], x, **given)

    def agrees(self, mode: str, size: int = 4, **given: Any) -> None:
        x = torch.randn(size, 6)
        torch.testing.assert_close(self.forward(mode, x, **given), self.reference(x))

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The model's result without what a test put in between."""
        with nothing_between(), torch.no_grad():
            expected: torch.Tensor = self.model(x)
        return expected


def pair(rt: GraphRuntime, **options: Any) -> list[Captured]:
    return [Captured(rt, seed, **options) for seed in (0, 1)]


# -- threads and tasks


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_threads_with_contexts_of_their_own(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], compiler: str
) -> None:
    fast = Captured(rt, compiler=compiler)
    inputs = {(thread, step): torch.randn(4 - 2 * (step % 2), 6) for thread in range(4) for step in range(20)}
    expected = {key: fast.reference(x) for key, x in inputs.items()}
    before = fast.captured
    order: list[int] = []
    in_between.append(lambda: order.append(threading.get_ident()))

    def work(thread: int) -> None:
        for step in range(20):
            found = fast.forward(BOTH[(thread + step // 2) % 2], inputs[thread, step])
            torch.testing.assert_close(found, expected[thread, step])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4), timeout=WAIT_S))
    assert order[::2] == order[1::2], "a forward of another thread ran in the middle of one"
    assert len(order) == 2 * 40, "PIECEWISE runs the op's Python twice, FULL never"
    assert fast.captured == before


# -- several models, several runtimes


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_two_models_in_one_runtime(rt: GraphRuntime, outputs: str) -> None:
    first, second = both = pair(rt, outputs=outputs)
    for step in range(12):
        both[step % 2].agrees(BOTH[step // 2 % 2], (4, 2)[step // 4 % 2])
    x = torch.randn(4, 6)
    for mode, other_mode in itertools.product(BOTH, BOTH):
        found = first.forward(mode, x)
        kept = found.clone()
        second.forward(other_mode, x)
        assert torch.equal(found, kept) == (outputs == "clone"), "one model's replay overwrites the other's views"


@pytest.mark.parametrize("mode", BOTH)
def test_a_view_reshaped_in_place_is_the_callers_alone(rt: GraphRuntime, mode: str) -> None:
    """Views of pool memory are objects of their own each time, though the memory is one."""
    fast = Captured(rt, outputs="view")
    for reshape in (torch.Tensor.t_, lambda y: y.unsqueeze_(0), lambda y: y.resize_(2, 3)):
        reshape(fast.forward(mode, torch.randn(4, 6)))
        fast.agrees(mode)


@pytest.mark.parametrize("mode", BOTH)
def test_one_model_in_two_runtimes(rt: GraphRuntime, in_between: list[Callable[[], Any]], mode: str) -> None:
    with GraphRuntime() as second:
        both = [Captured(runtime) for runtime in (rt, second)]
        assert torch.equal(*(fast.forward(mode, torch.ones(4, 6)) for fast in both))
        for fast in both:
            fast.agrees(mode)
        assert [fast.rt.stats().callables for fast in both] == [1, 1]
        # Each waits in the middle of its forward for the other: pools of their own do not wait.
        if mode == "PIECEWISE":
            together = threading.Barrier(2)
            in_between.append(lambda: together.wait(WAIT_S))
        with ThreadPoolExecutor(2) as threads:
            x = torch.randn(4, 6)
            results = [threads.submit(fast.forward, mode, x) for fast in both]
            expected = [result.result(WAIT_S) for result in results]
        torch.testing.assert_close(*expected)
        torch.testing.assert_close(expected[0], both[0].reference(x))


# -- a forward inside a forward, and one that fails


@pytest.mark.parametrize("inner_mode", BOTH)
def test_a_model_inside_a_model_of_the_same_runtime_is_refused(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], inner_mode: str
) -> None:
    outer, inner = pair(rt)

    def call_inner() -> None:
        in_between.clear()
        inner.forward(inner_mode, torch.ones(4, 6))

    for _ in range(2):
        in_between.append(call_inner)
        with pytest.raises(PoolBusyError, match="GraphRuntime of its own"):
            outer.forward("PIECEWISE", torch.ones(4, 6))
        for mode in BOTH:
            outer.agrees(mode)
            inner.agrees(mode)
