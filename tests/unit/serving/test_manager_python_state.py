"""What a model keeps in Python: captures and estimates leave it alone, and steps change it as eager calls do."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.models import module
from tests.unit.serving.managed import WIDTH, captured, notes, refused, rows, run

Change = Callable[[Any, torch.Tensor], object]


class Record:
    """An object that is no module."""

    def __init__(self, rows: Any = None) -> None:
        self.calls, self.rows = 0, rows


class Keeps(nn.Module):
    """Everything of a module that Python code can change, and a child with some more."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.calls, self.flag = 0, False
        self.seen: list[int] = []
        self.sizes: dict[str, int] = {}
        self.names: set[int] = set()
        self.last_sizes: collections.deque[int] = collections.deque()
        self.nested: dict[str, list[int]] = {"inner": []}
        self.stats = Record()
        self.numbers = iter(range(100))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)
        self.child.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return self.child(x) * 2

    def python_state(self) -> Any:
        held = (self.seen, self.sizes, self.names, self.last_sizes, self.nested["inner"])
        return (self.calls, self.flag, *map(list, held), self.child.calls, hasattr(self, "added"))


def count(model: Keeps, _: torch.Tensor) -> None:
    model.calls += 1


def count_in_child(model: Keeps, _: torch.Tensor) -> None:
    model.child.calls += 1


def set_flag(model: Keeps, _: torch.Tensor) -> None:
    model.flag, model.added = True, 1


UNDONE: dict[str, Change] = {
    "an attribute counted": count,
    "an attribute of a child counted": count_in_child,
    "an attribute set, and a new one": set_flag,
    "a longer list": lambda model, _: model.seen.append(len(model.seen)),
    "an item of a dict": lambda model, _: model.sizes.update({f"call {len(model.sizes)}": 1}),
    "a larger set": lambda model, _: model.names.add(len(model.names)),
    "a longer list in a dict": lambda model, _: model.nested["inner"].append(1),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "FULL") for name in UNDONE),
        ("an attribute counted", "PIECEWISE"),
        ("a longer list", "FULL_AND_PIECEWISE"),
    ],
)
def test_capture_leaves_python_state_as_it_was_and_each_step_changes_it_as_eager_does(mode: str, name: str) -> None:
    model, eager = Keeps(UNDONE[name]), Keeps(UNDONE[name])
    eager.load_state_dict(model.state_dict())
    untouched = model.python_state()
    manager = captured(model, mode)
    assert model.python_state() == untouched
    assert "every step goes through Dynamo's guards: the model " in notes(manager)
    with torch._dynamo.config.patch(recompile_limit=64):
        for num_tokens in (3, 4, 8, 1):
            torch.testing.assert_close(run(manager, rows(num_tokens)), eager(rows(num_tokens)).detach())
            assert model.python_state() == eager.python_state()


def set_to_the_values_they_have(model: Keeps, _: torch.Tensor) -> None:
    model.flag = False
    before, model.calls = model.calls, 7
    model.calls = before


def make_objects(_: Keeps, x: torch.Tensor) -> None:
    made_here = Record(x)
    made_here.more = [x]


@pytest.mark.parametrize("change", [set_to_the_values_they_have, make_objects])
def test_objects_that_a_call_makes_are_no_change(change: Change) -> None:
    assert "Dynamo's guards" not in notes(captured(Keeps(change)))


# -- between graphs


class Breaks(nn.Module):
    """Python that Dynamo does not trace, between two graphs, and changes in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.between = self.after = 0
        self.register_buffer("sum", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(1))
        self.generator = torch.Generator()
        self.inner = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def _untraced(self) -> None:
        self.between += 1
        self.count.add_(1)
        torch.rand(1, generator=self.generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before += 1
        x = self.inner(x)
        self._untraced()
        self.after += 1
        self.sum.add_(1)
        return x + self.sum

    def python_state(self) -> Any:
        tensors = (self.sum, self.count, self.generator.get_state())
        return (self.before, self.between, self.after, *(tensor.tolist() for tensor in tensors))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_capture_leaves_a_model_of_several_graphs_as_it_was(mode: str) -> None:
    model = Breaks()
    untouched = model.python_state()
    with torch._dynamo.config.patch(recompile_limit=64):
        manager = captured(model, mode)
        assert model.python_state() == untouched
        manager.estimate()
        assert model.python_state() == untouched
        for step in range(1, 4):
            torch.testing.assert_close(run(manager, rows(3)), model.inner(rows(3)).detach() + step)
            assert model.python_state()[:3] == (step, step, step)
            assert model.count.tolist() == [step]


def test_capture_leaves_python_s_random_numbers_as_they_were() -> None:
    class Draws(nn.Module):
        @torch._dynamo.disable
        def draw(self) -> float:
            return random.random()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            self.draw()
            return x * 2

    random.seed(5)
    captured(Draws())
    drawn = random.random()
    random.seed(5)
    assert drawn == random.random()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_tensor_that_python_between_graphs_keeps_is_refused(mode: str) -> None:
    class Remembers(nn.Module):
        @torch._dynamo.disable
        def remember(self, x: torch.Tensor) -> None:
            self.last = x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            self.remember(x)
            return x * 2

    model = Remembers()
    error = refused("stores a tensor in a Python object", model, mode)
    assert "'last'" in error.found
    assert not hasattr(model, "last")


# -- what cannot be undone


STEPS = [0]
counted = 0


def count_globally(_: Keeps, __: torch.Tensor) -> None:
    global counted
    counted += 1


def count_in_object(model: Keeps, _: torch.Tensor) -> None:
    model.stats.calls += 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (count_globally, "sets the global variable 'counted'"),
        (lambda _, __: STEPS.append(1), "changes a list"),
        (count_in_object, "sets the attribute 'calls' of Record"),
        (lambda model, _: next(model.numbers), "iterator"),
    ],
)
def test_python_state_outside_of_modules_is_refused_before_anything_has_changed(change: Change, found: str) -> None:
    model = Keeps(change)
    held = (counted, list(STEPS), model.stats.calls)
    error = refused("cannot be restored after a capture", model)
    assert found in error.found
    assert "test_manager_python_state.py:" in error.found
    assert (counted, STEPS, model.stats.calls) == held


def test_a_function_that_counts_its_calls_is_refused() -> None:
    calls = 0

    def model(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    error = refused("cannot be restored after a capture", model)
    assert "a variable of an enclosing function (test_manager_python_state.py:" in error.found
    assert calls == 0


def keep_in_object(model: Keeps, x: torch.Tensor) -> None:
    model.last = Record(x * 2)


def replace_buffer(model: Keeps, x: torch.Tensor) -> None:
    model.total = model.total + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x: setattr(model, "last", x),
        lambda model, x: setattr(model, "last", x * 2),
        lambda model, x: model.seen.append(x * 2),
        lambda model, x: model.sizes.update(last=(x * 2, 1)),
        keep_in_object,
        replace_buffer,
    ],
    ids=["the input", "a result", "in a list", "in a tuple", "in an object", "as a buffer"],
)
def test_a_tensor_that_outlives_its_call_is_refused(change: Change) -> None:
    """It would lie in memory that the next step overwrites."""
    model = Keeps(change)
    error = refused("stores a tensor in a Python object", model)
    assert "test_manager_python_state.py:" in error.found
    assert "registered buffer" in error.remedy
    assert not hasattr(model, "last")
    assert model.seen == []


def test_a_tensor_of_the_model_itself_may_be_stored() -> None:
    def change(model: Keeps, _: torch.Tensor) -> None:
        model.active = model.child.weight

    model, eager = Keeps(change), Keeps(change)
    eager.load_state_dict(model.state_dict())
    manager = captured(model)
    assert not hasattr(model, "active")
    torch.testing.assert_close(run(manager, rows(3)), eager(rows(3)).detach())
    assert model.active is model.child.weight


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_buffer_that_counts_with_an_operator_in_place_is_served(mode: str, compiler: str) -> None:
    """``self.total += 1`` stores what it has written to: the buffer itself."""

    def counts(model: Keeps, _: torch.Tensor) -> None:
        model.total += 1
        model.total *= 2

    def total_of(steps: int) -> float:
        return 0.0 if not steps else (total_of(steps - 1) + 1) * 2

    model = Keeps(counts).eval()
    model.register_buffer("total", torch.zeros(WIDTH))
    buffer = model.total
    manager = captured(model, mode, compiler=compiler)
    for step, size in enumerate((3, 8, 1, 3, 10, 8)):
        torch.testing.assert_close(buffer, torch.full((WIDTH,), total_of(step)))
        run(manager, rows(size))
        assert model.total is buffer


def test_python_that_only_some_sizes_run_has_its_effect_there() -> None:
    """The first run, at the largest size, has no side effect."""

    def sometimes(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 4:
            self.small += 1
        return x * 2

    model: Any = module(sometimes, small=0)
    with torch._dynamo.config.patch(recompile_limit=64):
        manager = captured(model)
        assert model.small == 0
        for num_tokens, expected in ((2, 1), (8, 1), (1, 2), (2, 3)):
            torch.testing.assert_close(run(manager, rows(num_tokens)), rows(num_tokens) * 2)
            assert model.small == expected
