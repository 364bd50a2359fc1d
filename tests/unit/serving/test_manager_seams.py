"""Results and state at seams: Python around a graph, writes of some sizes alone, state that was replaced, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch, BatchDescriptor, InputSpec
from graphpass.errors import DispatchError, ShapeError
from tests.unit.models import module
from tests.unit.serving.managed import LARGEST, WIDTH, X, captured, notes, refused, rows, run

MODES = ("FULL", "PIECEWISE")
Step = Callable[[Any, torch.Tensor], None]
Y = InputSpec("y", (LARGEST, WIDTH), torch.float32)


# -- Python around the only graph --------------------------------------------------------------------------------------


class Around(nn.Module):
    """A layer, state in Python and in a buffer, and what runs before and after the layer."""

    def __init__(self, before: Step | None = None, after: Step | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.steps, self.before, self.after = nn.Linear(WIDTH, WIDTH), 0, before, after
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            self.before(self, x)
        y = self.layer(x) + self.total
        if self.after:
            self.after(self, y)
        return y


@torch.compiler.disable
def count(model: Any, _: torch.Tensor) -> None:
    model.steps += 1


@torch.compiler.disable
def add_one(_: Any, x: torch.Tensor) -> None:
    x.add_(1)


@torch.compiler.disable
def add_to_total(model: Any, _: torch.Tensor) -> None:
    model.total.add_(1)


class BreaksBefore(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        torch._dynamo.graph_break()
        return self.layer(x)


class BreaksInALoop(Around):
    """Dynamo leaves this frame out, and compiles what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = module(lambda self, x: x * x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            count(self, x)
            add_to_total(self, x)
            x = self.inner(x)
        return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Around(before=count),
        lambda: Around(before=add_one),
        lambda: Around(before=add_to_total),
        lambda: Around(after=add_to_total),
        lambda: Around(after=add_one),
        BreaksBefore,
        BreaksInALoop,
    ],
    ids=["counted", "input written", "buffer written", "buffer after", "result after", "break", "break in a loop"],
)
def test_python_around_a_graph_runs_in_each_step_and_leaves_nothing_of_a_capture(
    make: Callable[[], Around], mode: str
) -> None:
    model, plain = make(), make()
    manager = captured(model, mode)
    assert (model.steps, model.total.sum()) == (0, 0)
    for num_tokens in (3, 8):
        x, expected = rows(num_tokens), rows(num_tokens)
        with torch.no_grad():
            torch.testing.assert_close(run(manager, x), plain(expected))
        torch.testing.assert_close(x, expected)
    assert model.steps == plain.steps
    torch.testing.assert_close(model.total, plain.total)
    assert "goes through Dynamo's guards" in notes(manager)
    manager.close()


def test_a_refused_first_run_leaves_no_state() -> None:
    class Nothing(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count(self, x)
            add_to_total(self, x)
            return x

    model = Nothing()
    refused("nothing was captured", model)
    assert (model.steps, model.total.sum()) == (0, 0)


# -- writes that some sizes make alone, and state that was replaced ---------------------------------------------------


def counts_small(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] <= 4:
        self.calls.add_(1)
    return x * 2


@pytest.mark.parametrize("mode", MODES)
def test_state_that_some_sizes_write_alone_stays_as_it_was(mode: str) -> None:
    model = module(counts_small, calls=torch.zeros(()))
    manager = captured(model, mode)
    assert model.calls == 0
    for _ in range(3):
        run(manager, rows(1))
    assert model.calls == 3
    manager.adapt()
    assert model.calls == 3
    manager.recapture()
    assert model.calls == 3
    manager.close()


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_some_sizes_write_alone_are_copied_back(mode: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= 4:
            x.add_(1)
        return x * 2

    manager = captured(model, mode)
    for num_tokens in (4, 8, 2):
        x, expected = rows(num_tokens), rows(num_tokens)
        torch.testing.assert_close(run(manager, x), model(expected))
        torch.testing.assert_close(x, expected)
    manager.close()


def counting() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + 0 * self.calls

    return module(forward, calls=torch.zeros(WIDTH))


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_leaves_state_that_was_replaced_since_the_first_run(mode: str) -> None:
    model = nn.Sequential(counting())
    whole = module(lambda self, x: self.inner(x), inner=model)
    manager = captured(whole, mode, on_moved_input="copy")
    model[0].calls = torch.full((WIDTH,), 10.0)
    run(manager, rows(3))
    assert model[0].calls[0] == 11
    whole.load_state_dict({"inner.0.calls": torch.full((WIDTH,), 50.0)}, assign=True)
    run(manager, rows(3))
    assert model[0].calls[0] == 51
    model[0] = counting()
    manager.dispatcher.add_key(mode, BatchDescriptor(5, num_reqs=5 if mode == "FULL" else None))
    assert manager.estimate().keys
    assert model[0].calls[0] == 0
    manager.capture()
    assert model[0].calls[0] == 0
    manager.close()


# -- aliases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_the_buffer_of_another_input_is_an_input(mode: str) -> None:
    manager = captured(lambda x, y: (x * 1, y * 1), mode, specs=(X, Y))
    first, second = rows(3), rows(3) + 1
    for x, y, expected in (
        (first, second, (first, second)),
        (first + 9, manager.buffers["x"][:3], (first + 9, first)),
        (manager.buffers["y"][:3], manager.buffers["x"][:3], (first, first + 9)),
    ):
        torch.testing.assert_close(manager.run(Batch(3, inputs={"x": x, "y": y})), expected)
    manager.close()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_result_as_an_input_that_the_model_writes(mode: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    manager, expected = captured(model, mode), rows(3)
    found = run(manager, rows(3))
    for _ in range(3):
        expected = model(expected)
        torch.testing.assert_close(found, expected)
        found = run(manager, found)
    manager.close()


# -- values that are no tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_number_that_python_counts_is_that_of_the_step(mode: str) -> None:
    def numbers(self: Any, x: torch.Tensor) -> Any:
        self.steps += 1
        return x * 2, self.steps

    manager = captured(module(numbers, steps=0), mode)
    assert [run(manager, rows(3))[1] for _ in range(4)] == [1, 2, 3, 4]
    manager.close()


def test_a_leaf_that_some_sizes_lack_is_refused() -> None:
    manager = captured(lambda x: (x * 2, x + 1 if x.shape[0] > 4 else None), "NONE")
    run(manager, rows(8))
    with pytest.raises(ShapeError, match="another structure"):
        run(manager, rows(2))


def test_a_tensor_that_some_sizes_read_from_elsewhere() -> None:
    constant = torch.ones(WIDTH)
    manager = captured(lambda x: x * 2 + constant if x.shape[0] <= 4 else x * 2)
    for num_tokens in (3, 8):
        x = rows(num_tokens)
        torch.testing.assert_close(run(manager, x), x * 2 + (constant if num_tokens <= 4 else 0))
    manager.close()


# -- what is refused, and what is not ----------------------------------------------------------------------------------


def test_a_count_that_is_not_the_product_of_the_sizes_is_refused() -> None:
    manager = captured(lambda x: x * 2, sizes={"batch": [2], "seq": [4]})  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match="num_tokens contradicts the sizes"):
        run(manager, rows(6), extra=(("batch", 2), ("seq", 2)))
    manager.close()
