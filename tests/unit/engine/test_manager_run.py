"""Any batch through a manager: right, over which graph, with how many replays and copies, past Dynamo."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch, CUDAGraphMode, DispatchReason
from graphpass.errors import ShapeError
from tests.unit.engine import managed
from tests.unit.engine.managed import (
    EVENTS,
    LARGEST,
    MODES,
    NONE,
    PIECEWISE,
    SIZES,
    WIDTH,
    Attends,
    Doubled,
    Requests,
    Rows,
    SlotBuilder,
    assert_right,
    captured,
    hits,
    of_x,
    replays,
    rows,
    run,
)

# -- run: sizes, modes, counts


def expected_mode(mode: str, num_tokens: int, uniform: bool) -> CUDAGraphMode:
    parsed = CUDAGraphMode.parse(mode)
    if num_tokens == 0 or num_tokens > SIZES[-1]:
        return NONE
    return parsed.decode_mode() if uniform else parsed.mixed_mode()


@pytest.mark.parametrize(
    ("mode", "compiler"), [*((mode, "eager") for mode in MODES), ("FULL", "aot_eager"), ("PIECEWISE", "aot_eager")]
)
def test_every_batch_of_every_size_is_right_and_replays(mode: str, compiler: str) -> None:
    model = Rows().eval()
    manager = captured(model, mode, compiler=compiler)
    expected: dict[tuple[CUDAGraphMode, int], int] = {}
    for uniform in (False, True):
        for num_tokens in range(LARGEST + 1):
            x = rows(num_tokens)
            before, of_keys = replays(manager), hits(manager)
            torch.testing.assert_close(run(manager, x, uniform_decode=uniform), model(x).detach())
            level = expected_mode(mode, num_tokens, uniform)
            assert replays(manager) - before == (level is not NONE), (num_tokens, uniform)
            if level is not NONE:
                key = (level, next(size for size in SIZES if size >= num_tokens))
                expected[key] = expected.get(key, 0) + 1
            else:
                assert hits(manager) == of_keys
    assert hits(manager) == expected
    stats = manager.stats()
    assert sum(stats.fallbacks.values()) + stats.replays == 2 * (LARGEST + 1)
    assert stats.fallbacks[DispatchReason.EMPTY] == 2
    with pytest.raises(ShapeError, match="does not fit the buffers") as raised:
        run(manager, rows(LARGEST + 1))
    assert f"0 to {LARGEST}" in raised.value.expected
    assert f"{LARGEST + 1}" in raised.value.found
    assert_right(manager, model)


@pytest.mark.soak
def test_with_inductor() -> None:
    manager = captured(Doubled(), "FULL", (4,), compiler="inductor")
    assert_right(manager, manager.model, [1, 3, 4])
    assert manager.stats().replays == 3


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_inputs_may_lie_in_the_buffers_already(mode: str) -> None:
    model = Rows().eval()
    manager = captured(model, mode)
    buffer = manager.buffers["x"]
    assert buffer.shape == (LARGEST, WIDTH)
    for num_tokens in (3, 8, 1, 9, 10, 5):
        x = rows(num_tokens)
        buffer[:num_tokens] = x
        torch.testing.assert_close(manager.run(Batch(num_tokens)), model(x).detach())
        torch.testing.assert_close(manager.run(Batch(num_tokens)), model(x).detach())
    assert manager.buffers["x"] is buffer, "they are persistent"


def test_staged_inputs_and_inputs_in_place_take_turns() -> None:
    model = Rows().eval()
    manager = captured(model)
    for num_tokens in (8, 3, 9, 2):
        x = rows(num_tokens)
        torch.testing.assert_close(run(manager, x), model(x).detach())
        manager.buffers["x"][:num_tokens] = x + 1
        torch.testing.assert_close(manager.run(Batch(num_tokens)), model(x + 1).detach())


def test_a_step_copies_nothing_inside_of_the_graph() -> None:
    manager = captured(Rows().eval())
    for num_tokens in range(1, 9):
        run(manager, rows(num_tokens))
    assert {counts.copied for counts in manager.runtime.counts().values()} == {0}
    assert {counts.static_sets for counts in manager.runtime.counts().values()} == {1}


def test_the_caller_of_any_grad_mode_gets_results_without_gradient() -> None:
    model = Rows().eval()
    manager = captured(model)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for num_tokens in (3, 9):
            with mode():
                got = run(manager, rows(num_tokens))
            assert not got.requires_grad
            torch.testing.assert_close(got, model(rows(num_tokens)).detach())
    assert manager.runtime.stats().captured == 3


@pytest.mark.parametrize("scope", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_manager_made_and_captured_in_any_grad_mode(scope: Any) -> None:
    model = Rows().eval()
    with scope():
        manager = captured(model)
    assert_right(manager, model, [3, 9])
    with torch.inference_mode():
        assert_right(manager, model, [3, 9])
    assert manager.runtime.stats().captured == 3


def test_inputs_that_require_grad_leave_the_buffers_as_they_are() -> None:
    """Embeddings, made by a layer outside of the manager."""
    model = Rows().eval()
    embeds = nn.Embedding(5, WIDTH)
    manager = captured(model)
    for num_tokens in (3, 5, 9):
        x = embeds(torch.arange(num_tokens) % 5)
        torch.testing.assert_close(run(manager, x), model(x).detach())
        assert not manager.buffers["x"].requires_grad
    assert_right(manager, model, [4, 9, 8])


# -- past Dynamo


SHARED = Path(managed.__file__).name
"""Where the models are whose frames are looked for."""


@contextlib.contextmanager
def frames_seen() -> Iterator[set[str]]:
    """File and name of the Python functions that are called in the body."""
    seen: set[str] = set()

    def remember(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    sys.setprofile(remember)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_step_enters_neither_dynamo_nor_the_model(mode: str) -> None:
    builder = SlotBuilder()
    model = Attends().eval()
    manager = captured(model, mode, attention=builder)
    requests = Requests(model)
    for uniform in (False, True):
        x, slots = rows(3), [5, 1, 7]
        batch = of_x(x, attention=slots, uniform_decode=uniform)
        expected = requests.step(x, slots)
        with frames_seen() as seen:
            got = manager.run(batch)
        torch.testing.assert_close(got, expected)
        assert "modelstate.py:call_model" not in seen, "the compiled model"
        assert f"{SHARED}:forward" not in seen, "its own Python"
        assert (f"{SHARED}:add_to_slots" in seen) == (expected_mode(mode, 3, uniform) is PIECEWISE)
    with frames_seen() as seen:
        manager.run(of_x(rows(9), attention=[9] * 9))
    assert "modelstate.py:call_model" in seen, "it is seen where a batch has no graph"
    before = replays(manager)
    torch.compiler.set_stance("force_eager")
    try:
        x, slots = rows(4), [0, 1, 2, 3]
        torch.testing.assert_close(run(manager, x, attention=slots), requests.step(x, slots))
    finally:
        torch.compiler.set_stance("default")
    assert replays(manager) > before, "Dynamo would have run it eagerly"


def test_python_of_the_model_runs_in_no_step() -> None:
    calls = []

    class Counted(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1) if not torch.compiler.is_compiling() else None
            return super().forward(x)

    model = Counted().eval()
    manager = captured(model)
    for num_tokens in range(1, 9):
        run(manager, rows(num_tokens))
    assert not calls


def test_regions_are_a_flat_plan_with_attention_between_them() -> None:
    builder = SlotBuilder()
    model = Attends().eval()
    manager = captured(model, "PIECEWISE", attention=builder)
    requests = Requests(model)
    EVENTS.clear()
    builder.built_for.clear()
    before = replays(manager)
    for num_tokens in range(1, 9):
        x, slots = rows(num_tokens), list(range(num_tokens))
        torch.testing.assert_close(run(manager, x, attention=slots), requests.step(x, slots))
    assert EVENTS == ["build", "op"] * 8
    assert builder.built_for == [None] * 8, "at real sizes"
    assert replays(manager) == before + 2 * 8
    torch.testing.assert_close(builder.sums[: builder.num_slots], requests.sums)
