"""Several managers of a runtime, a model or a dispatcher; several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from graphpass import CudagraphDispatcher, CudaGraphManager, GraphRuntime, InputSpec
from tests.unit.engine.managed import (
    LARGEST,
    SIZES,
    WIDTH,
    Doubled,
    Rows,
    X,
    assert_right,
    captured,
    made,
    notes,
    rows,
    run,
)


def test_two_managers_in_one_runtime_keep_apart() -> None:
    runtime = GraphRuntime()
    one, two = Rows().eval(), Doubled()
    first, second = captured(one, runtime=runtime), captured(two, "PIECEWISE", runtime=runtime)
    for _ in range(2):
        assert_right(first, one)
        assert_right(second, two)
    first.close()
    assert first.needs_capture()
    first.capture()
    assert_right(second, two)
    assert_right(first, one)


def test_closing_one_manager_of_a_runtime_leaves_the_other_right() -> None:
    runtime = GraphRuntime()
    model = Rows().eval()
    first, second = captured(model, runtime=runtime), captured(model, runtime=runtime)
    assert_right(second, model)
    first.close()
    assert_right(second, model)
    before = runtime.stats().captured
    assert_right(second, model)
    assert runtime.stats().captured == before


def test_one_model_in_two_managers() -> None:
    model = Rows().eval()
    first = captured(model)
    second = captured(model, "PIECEWISE", (3, 6), [InputSpec("x", (6, WIDTH), torch.float32)])
    for _ in range(2):
        assert_right(first, model)
        assert_right(second, model, [1, 3, 5])
    model.inner.weight = nn.Parameter(torch.ones(5, WIDTH))
    assert_right(second, model, [1, 3, 5])
    assert_right(first, model)
    first.close()
    assert_right(second, model, [1, 3, 5])


def test_two_models_of_one_class() -> None:
    one, two = Rows().eval(), Rows().eval()
    nn.init.ones_(two.inner.weight)
    first, second = captured(one), captured(two)
    for _ in range(2):
        assert_right(first, one)
        assert_right(second, two)


def test_one_dispatcher_in_two_managers_gives_right_results() -> None:
    """It says a key is captured where the other manager has captured it."""
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=LARGEST)
    one, two = Rows().eval(), Doubled()
    first = CudaGraphManager(one, dispatcher, [X], compiler="eager")
    second = CudaGraphManager(two, dispatcher, [X], compiler="eager")
    first.capture()
    assert_right(second, two, [3])
    assert second.needs_capture()
    second.capture()
    assert_right(first, one)
    assert_right(second, two)
    first.close()
    assert_right(second, two)
    first.capture()
    assert_right(first, one)
    assert_right(second, two)


def test_a_lazy_dispatcher_captures_each_key_at_its_first_use() -> None:
    """As the refusal of a run before the capture says."""
    model = Rows().eval()
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=LARGEST, lazy=True)
    manager = CudaGraphManager(model, dispatcher, [X], compiler="eager", on_moved_input="error")
    assert_right(manager, model, [3, 4, 8])
    assert [key.num_tokens for _, _, key in manager.runtime.counts()] == [4, 8]
    assert "weights were replaced" not in notes(manager)


def in_threads(body: Callable[[int], None], num_threads: int = 4) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            body(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_threads_take_turns() -> None:
    model = Rows().eval()
    manager = captured(model, "FULL_AND_PIECEWISE")
    whole_step = threading.Lock()

    def body(index: int) -> None:
        for step in range(10):
            x = rows((index * 3 + step) % LARGEST + 1)
            with whole_step:
                got = run(manager, x, uniform_decode=bool(step % 2)).clone()
            torch.testing.assert_close(got, model(x).detach())

    in_threads(body)
    stats = manager.stats()
    assert stats.replays + sum(stats.fallbacks.values()) == 40


def test_threads_without_a_lock_of_their_own_harm_nothing_but_their_results() -> None:
    model = Rows().eval()
    manager = captured(model)

    def body(index: int) -> None:
        for step in range(10):
            num_tokens = (index + step) % 8 + 1
            assert run(manager, rows(num_tokens)).shape == (num_tokens, 5)

    in_threads(body)
    assert_right(manager, model)
    assert manager.stats().replays == 43


def test_captured_in_one_thread_and_run_in_another() -> None:
    model = Rows().eval()
    manager = made(model)
    in_threads(lambda _: manager.capture(), 1)
    assert_right(manager, model)
    in_threads(lambda _: assert_right(manager, model), 1)
