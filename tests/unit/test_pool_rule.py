"""The pool rule from outside: threads, tasks, several models and runtimes, forwards inside forwards.

Graphs of one runtime overwrite each other's memory, so one forward of it runs at a time, whoever asks.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime
from graphpass.errors import PoolBusyError

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


class Model(nn.Module):
    """Three regions around two calls of the op: Python runs in the middle of a PIECEWISE forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        hidden = torch.ops.graphpasstest_pool.between(first(x).tanh())
        hidden = torch.ops.graphpasstest_pool.between(second(hidden).tanh())
        return third(hidden) + x


class Other(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).exp().clamp(max=3.0) - 1


@pytest.fixture
def in_between() -> Iterator[list[Callable[[], Any]]]:
    """What the splitting op does besides its work; empty while keys are captured, unless a test says otherwise."""
    BETWEEN.clear()
    yield BETWEEN
    BETWEEN.clear()


def forward(compiled: Callable[..., Any], mode: str, x: torch.Tensor) -> torch.Tensor:
    """One forward, in a context of its own."""
    descriptor = BatchDescriptor(x.shape[0])
    with torch.no_grad(), gp.set_forward_context(runtime_mode=CUDAGraphMode[mode], batch_descriptor=descriptor):
        result: torch.Tensor = compiled(x)
        return result


def compiled_with(model: nn.Module, runtime: GraphRuntime, sizes: tuple[int, ...] = (4, 2), **options: Any) -> Any:
    """``model`` with every key captured."""
    options = {"compiler": "eager", "splitting_ops": [SPLIT], "runtime": runtime, **options}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    with runtime.capturing():
        for mode, size in itertools.product(BOTH, sizes):
            forward(compiled, mode, torch.randn(size, 6))
    return compiled


def agrees(compiled: Callable[..., Any], model: nn.Module, mode: str, size: int = 4) -> None:
    x = torch.randn(size, 6)
    found = forward(compiled, mode, x)
    with torch.no_grad():
        expected = reference(model, x)
    torch.testing.assert_close(found, expected)


def reference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's result without what a test put in between."""
    actions = BETWEEN[:]
    BETWEEN.clear()
    try:
        expected: torch.Tensor = model(x)
    finally:
        BETWEEN[:] = actions
    return expected


# -- threads and tasks


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_threads_with_contexts_of_their_own(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], compiler: str
) -> None:
    model = Model().eval()
    compiled = compiled_with(model, rt, compiler=compiler)
    inputs = {(thread, step): torch.randn(4 - 2 * (step % 2), 6) for thread in range(4) for step in range(20)}
    with torch.no_grad():
        expected = {key: model(x) for key, x in inputs.items()}
    before = rt.stats().captured
    order: list[int] = []
    in_between.append(lambda: order.append(threading.get_ident()))

    def work(thread: int) -> None:
        for step in range(20):
            mode = BOTH[(thread + step // 2) % 2]
            found = forward(compiled, mode, inputs[thread, step])
            torch.testing.assert_close(found, expected[thread, step])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4), timeout=WAIT_S))
    assert order[::2] == order[1::2], "a forward of another thread ran in the middle of one"
    assert len(order) == 2 * 40, "PIECEWISE runs the op's Python twice, FULL never"
    assert rt.stats().captured == before


def test_one_thread_captures_while_another_replays(rt: GraphRuntime) -> None:
    model, other = Model().eval(), Other(1).eval()
    compiled = compiled_with(model, rt, sizes=(4,))
    captured_late = torch.compile(
        other, backend="cgpass", dynamic=True, options={"compiler": "eager", "splitting_ops": [SPLIT], "runtime": rt}
    )
    done = threading.Event()

    def replay() -> int:
        steps = 0
        while not done.is_set() or steps < 10:
            agrees(compiled, model, BOTH[steps % 2])
            steps += 1
        return steps

    with ThreadPoolExecutor(1) as threads:
        replays = threads.submit(replay)
        try:
            with rt.capturing():
                for mode, size in itertools.product(BOTH, (4, 2)):
                    agrees(captured_late, other, mode, size)
        finally:
            done.set()
        assert replays.result(WAIT_S) >= 10
    for mode, size in itertools.product(BOTH, (4, 2)):
        agrees(captured_late, other, mode, size)


def test_tasks_with_contexts_of_their_own(rt: GraphRuntime) -> None:
    model = Model().eval()
    compiled = compiled_with(model, rt)

    async def request(number: int) -> None:
        x = torch.randn(4 if number % 3 else 2, 6)
        mode = CUDAGraphMode[BOTH[number % 2]]
        with torch.no_grad():
            expected = model(x)
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=BatchDescriptor(x.shape[0])) as context:
            for _ in range(3):
                await asyncio.sleep(0)  # other tasks set their contexts meanwhile
                assert gp.get_forward_context() is context
                with torch.no_grad():
                    torch.testing.assert_close(compiled(x), expected)
        assert not gp.is_forward_context_available()

    async def all_requests() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(request(number))

    asyncio.run(all_requests())
    assert sum(c.replayed for (name, *_), c in rt.counts().items() if name == "g0.full") == 6 * 3 + 2


@pytest.mark.parametrize("mode", BOTH)
def test_threads_that_inherit_one_context(rt: GraphRuntime, mode: str) -> None:
    """``asyncio.to_thread`` hands the caller's context on: two threads then take turns under one and the same."""
    model = Model().eval()
    compiled = compiled_with(model, rt)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = compiled(x)
            return result

    async def both() -> None:
        inputs = [torch.randn(4, 6) for _ in range(16)]
        with gp.set_forward_context(runtime_mode=CUDAGraphMode[mode], batch_descriptor=BatchDescriptor(4)):
            found = await asyncio.gather(*(asyncio.to_thread(call, x) for x in inputs))
        with torch.no_grad():
            for x, result in zip(inputs, found, strict=True):
                torch.testing.assert_close(result, model(x))

    asyncio.run(both())


# -- several models, several runtimes


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_two_models_in_one_runtime(rt: GraphRuntime, outputs: str) -> None:
    models = [Model().eval(), Other(1).eval()]
    compiled = [compiled_with(model, rt, outputs=outputs) for model in models]
    for step in range(12):
        which, mode, size = step % 2, BOTH[step // 2 % 2], (4, 2)[step // 4 % 2]
        agrees(compiled[which], models[which], mode, size)
    x = torch.randn(4, 6)
    for mode, other_mode in itertools.product(BOTH, BOTH):
        found = forward(compiled[0], mode, x)
        kept = found.clone()
        forward(compiled[1], other_mode, x)
        assert torch.equal(found, kept) == (outputs == "clone"), "one model's replay overwrites the other's views"


@pytest.mark.parametrize("mode", BOTH)
def test_a_view_reshaped_in_place_is_the_callers_alone(rt: GraphRuntime, mode: str) -> None:
    """Views of pool memory are objects of their own each time, though the memory is one."""
    model = Model().eval()
    compiled = compiled_with(model, rt, outputs="view")
    for reshape in (torch.Tensor.t_, lambda y: y.unsqueeze_(0), lambda y: y.resize_(2, 3)):
        reshape(forward(compiled, mode, torch.randn(4, 6)))
        agrees(compiled, model, mode)


def test_one_models_result_is_the_others_input(rt: GraphRuntime) -> None:
    models = [Model().eval(), Other(1).eval()]
    compiled = [compiled_with(model, rt, outputs="view") for model in models]
    for modes in itertools.product(BOTH, BOTH):
        x = torch.randn(4, 6)
        hidden, expected = x, x
        for which, mode in zip((0, 1, 0, 1), modes * 2, strict=True):
            hidden = forward(compiled[which], mode, hidden)
            with torch.no_grad():
                expected = models[which](expected)
        torch.testing.assert_close(hidden, expected)


@pytest.mark.parametrize("mode", BOTH)
def test_one_model_in_two_runtimes(rt: GraphRuntime, in_between: list[Callable[[], Any]], mode: str) -> None:
    model = Model().eval()
    with GraphRuntime() as second:
        compiled = [compiled_with(model, runtime) for runtime in (rt, second)]
        found = [forward(fast, mode, torch.ones(4, 6)) for fast in compiled]
        assert torch.equal(*found)
        for fast in compiled:
            agrees(fast, model, mode)
        assert [runtime.stats().callables for runtime in (rt, second)] == [1, 1]
        # Each waits in the middle of its forward for the other: pools of their own do not wait.
        if mode == "PIECEWISE":
            together = threading.Barrier(2)
            in_between.append(lambda: together.wait(WAIT_S))
        with ThreadPoolExecutor(2) as threads:
            x = torch.randn(4, 6)
            results = [threads.submit(forward, fast, mode, x) for fast in compiled]
            expected = [result.result(WAIT_S) for result in results]
        torch.testing.assert_close(*expected)
        in_between.clear()
        with torch.no_grad():
            torch.testing.assert_close(expected[0], model(x))


def test_two_graphed_models_in_one_runtime(rt: GraphRuntime) -> None:
    models = [Model().eval(), Other(1).eval()]
    options = {"runtime": rt, "compiler": "eager", "padding_check": "declared"}  # nobody vouches for the op
    fast = [gp.graphed(model, [2, 4], {"x": 0}, **options) for model in models]
    for graphed in fast:
        graphed.capture(torch.randn(4, 6))

    def work(thread: int) -> None:
        for step in range(20):
            x = torch.randn(2 + (thread + step) % 3, 6)
            with torch.no_grad():
                torch.testing.assert_close(fast[(thread + step) % 2](x), models[(thread + step) % 2](x))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4), timeout=WAIT_S))
    assert rt.stats().captured == 4


# -- a forward inside a forward, and one that fails


@pytest.mark.parametrize("inner_mode", BOTH)
def test_a_model_inside_a_model_of_the_same_runtime_is_refused(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], inner_mode: str
) -> None:
    outer, inner = Model().eval(), Other(1).eval()
    compiled_outer, compiled_inner = (compiled_with(model, rt) for model in (outer, inner))

    def call_inner() -> None:
        in_between.clear()
        forward(compiled_inner, inner_mode, torch.ones(4, 6))

    for _ in range(2):
        in_between.append(call_inner)
        with pytest.raises(PoolBusyError, match="GraphRuntime of its own"):
            forward(compiled_outer, "PIECEWISE", torch.ones(4, 6))
        for mode in BOTH:
            agrees(compiled_outer, outer, mode)
            agrees(compiled_inner, inner, mode)


@pytest.mark.parametrize("inner_mode", ["NONE", *BOTH])
def test_a_model_inside_a_model_of_another_runtime(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], inner_mode: str
) -> None:
    outer, inner = Model().eval(), Other(1).eval()
    with GraphRuntime() as own:
        compiled_outer, compiled_inner = compiled_with(outer, rt), compiled_with(inner, own)
        found: list[torch.Tensor] = []

        def call_inner() -> None:
            actions = in_between[:]
            in_between.clear()
            found.append(forward(compiled_inner, inner_mode, torch.full((4, 6), float(len(found)))))
            in_between[:] = actions

        for _ in range(3):
            in_between.append(call_inner)
            agrees(compiled_outer, outer, "PIECEWISE")
            in_between.clear()
        assert len(found) == 6
        with torch.no_grad():
            for number, result in enumerate(found):
                torch.testing.assert_close(result, inner(torch.full((4, 6), float(number))))


def test_without_a_graph_a_model_of_the_same_runtime_may_run_inside(
    rt: GraphRuntime, in_between: list[Callable[[], Any]]
) -> None:
    outer, inner = Model().eval(), Other(1).eval()
    compiled_outer, compiled_inner = (compiled_with(model, rt) for model in (outer, inner))

    def call_inner() -> None:
        actions = in_between[:]
        in_between.clear()
        agrees(compiled_inner, inner, "NONE")
        in_between[:] = actions

    in_between.append(call_inner)
    agrees(compiled_outer, outer, "PIECEWISE")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call_number", [1, 2])
def test_an_error_in_the_middle_of_a_forward_leaves_the_pool_free(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], error: type[BaseException], call_number: int
) -> None:
    model = Model().eval()
    compiled = compiled_with(model, rt)
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) == call_number:
            raise error("in the middle of a forward")

    in_between.append(fail)
    with pytest.raises(error, match="in the middle"):
        forward(compiled, "PIECEWISE", torch.ones(4, 6))
    in_between.clear()
    before = rt.stats().captured
    for mode in BOTH:
        agrees(compiled, model, mode)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(agrees, compiled, model, mode).result(WAIT_S)
    assert rt.stats().captured == before


@pytest.mark.parametrize("mode", BOTH)
def test_an_error_in_the_middle_of_a_capture_leaves_the_pool_free(
    rt: GraphRuntime, in_between: list[Callable[[], Any]], mode: str
) -> None:
    model = Model().eval()
    compiled = compiled_with(model, rt)

    def fail() -> None:
        raise ValueError("in the middle of a capture")

    in_between.append(fail)
    with rt.capturing(), pytest.raises((ValueError, gp.errors.CaptureError), match="in the middle"):
        forward(compiled, mode, torch.randn(3, 6))
    in_between.clear()
    for size in (4, 2):
        agrees(compiled, model, mode, size)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(agrees, compiled, model, mode).result(WAIT_S)
    with rt.capturing():
        agrees(compiled, model, mode, 3)
    agrees(compiled, model, mode, 3)
