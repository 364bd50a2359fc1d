"""What a model keeps in Python: captures and estimates leave it alone, and steps change it as eager calls do."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.managed import WIDTH, captured, made, notes, refused, rows, run


class Record:
    """An object that is no module."""

    def __init__(self, rows: Any = None) -> None:
        self.calls, self.rows = 0, rows


class Keeps(nn.Module):
    """Everything of a module that Python code can change, and a child with some more."""

    def __init__(self, change: Callable[[Any, torch.Tensor], object]) -> None:
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
    model.flag = True


def add_attribute(model: Keeps, _: torch.Tensor) -> None:
    model.added = 1


def grow_list(model: Keeps, _: torch.Tensor) -> None:
    model.seen.append(len(model.seen))


def fill_dict(model: Keeps, _: torch.Tensor) -> None:
    model.sizes[f"call {len(model.sizes)}"] = 1


def grow_set(model: Keeps, _: torch.Tensor) -> None:
    model.names.add(len(model.names))


def grow_nested_list(model: Keeps, _: torch.Tensor) -> None:
    model.nested["inner"].append(1)


UNDONE = [count, count_in_child, set_flag, add_attribute, grow_list, fill_dict, grow_set, grow_nested_list]


@pytest.mark.parametrize(
    ("change", "mode"),
    [*((change, "FULL") for change in UNDONE), (count, "PIECEWISE"), (grow_list, "FULL_AND_PIECEWISE")],
)
def test_capture_leaves_python_state_as_it_was_and_each_step_changes_it_as_eager_does(
    mode: str, change: Callable[[Any, torch.Tensor], object]
) -> None:
    model, eager = Keeps(change), Keeps(change)
    eager.load_state_dict(model.state_dict())
    untouched = model.python_state()
    manager = captured(model, mode)
    assert model.python_state() == untouched
    assert "every step goes through Dynamo's guards: the model " in notes(manager)
    with torch._dynamo.config.patch(recompile_limit=64):
        for num_tokens in (3, 4, 8, 1):
            torch.testing.assert_close(run(manager, rows(num_tokens)), eager(rows(num_tokens)).detach())
            assert model.python_state() == eager.python_state()


@pytest.mark.parametrize("change", [count, grow_list])
def test_an_estimate_leaves_python_state_as_it_was(change: Callable[[Any, torch.Tensor], object]) -> None:
    model = Keeps(change)
    untouched = model.python_state()
    made(model).estimate()
    assert model.python_state() == untouched


def test_a_capture_that_fails_leaves_python_state_as_it_was() -> None:
    def change(model: Keeps, x: torch.Tensor) -> None:
        model.calls += 1
        if x.shape[0] == 4:
            raise FloatingPointError("on purpose")

    model = Keeps(change)
    with pytest.raises(FloatingPointError):
        made(model).capture()
    assert model.calls == 0


def test_what_a_call_sets_to_the_value_that_it_has_is_no_change() -> None:
    def change(model: Keeps, _: torch.Tensor) -> None:
        model.flag = False
        before, model.calls = model.calls, 7
        model.calls = before

    manager = captured(Keeps(change))
    assert "Dynamo's guards" not in notes(manager)


def test_objects_that_a_call_makes_are_no_change() -> None:
    def change(_: Keeps, x: torch.Tensor) -> None:
        made_here = Record(x)
        made_here.more = [x]

    manager = captured(Keeps(change))
    assert "Dynamo's guards" not in notes(manager)


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


class Elsewhere:
    """Python state that hangs on no module."""

    steps = 0


STEPS = [0]
counted = 0


def count_globally(_: Keeps, __: torch.Tensor) -> None:
    global counted
    counted += 1


def grow_global_list(_: Keeps, __: torch.Tensor) -> None:
    STEPS.append(1)


def count_in_object(model: Keeps, _: torch.Tensor) -> None:
    model.stats.calls += 1


def count_in_class(_: Keeps, __: torch.Tensor) -> None:
    Elsewhere.steps += 1


def advance_iterator(model: Keeps, _: torch.Tensor) -> None:
    next(model.numbers)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (count_globally, "sets the global variable 'counted'"),
        (grow_global_list, "changes a list"),
        (count_in_object, "sets the attribute 'calls' of Record"),
        (advance_iterator, "iterator"),
    ],
)
def test_python_state_outside_of_modules_is_refused_before_anything_has_changed(
    change: Callable[[Any, torch.Tensor], object], found: str
) -> None:
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


def keep_input(model: Keeps, x: torch.Tensor) -> None:
    model.last = x


def keep_result(model: Keeps, x: torch.Tensor) -> None:
    model.last = x * 2


def keep_in_list(model: Keeps, x: torch.Tensor) -> None:
    model.seen.append(x * 2)


def keep_in_tuple(model: Keeps, x: torch.Tensor) -> None:
    model.sizes["last"] = (x * 2, 1)


def keep_in_object(model: Keeps, x: torch.Tensor) -> None:
    model.last = Record(x * 2)


def replace_buffer(model: Keeps, x: torch.Tensor) -> None:
    model.total = model.total + 1


@pytest.mark.parametrize(
    "change", [keep_input, keep_result, keep_in_list, keep_in_tuple, keep_in_object, replace_buffer]
)
def test_a_tensor_that_outlives_its_call_is_refused(change: Callable[[Any, torch.Tensor], object]) -> None:
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


def test_python_that_only_some_sizes_run_has_its_effect_there() -> None:
    """The first run, at the largest size, has no side effect."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] < 4:
                self.small += 1
            return x * 2

    model = Sometimes()
    with torch._dynamo.config.patch(recompile_limit=64):
        manager = captured(model)
        assert model.small == 0
        for num_tokens, expected in ((2, 1), (8, 1), (1, 2), (2, 3)):
            torch.testing.assert_close(run(manager, rows(num_tokens)), rows(num_tokens) * 2)
            assert model.small == expected
