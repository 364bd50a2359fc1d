"""Forwards that give a tensor other memory (``tensor.data = new``): results, arguments and buffers are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import cgpass
import graphpass as gp
from graphpass import partition
from graphpass.regions import execute
from tests.unit.models import module

X = (3, 4)


def exchanging(program: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A compiled model of what the programs below read and exchange, the model, and its eager twin."""
    torch.manual_seed(0)
    state = {"weight": nn.Parameter(torch.randn(4)), "ema": torch.zeros(4), "book": torch.randn(6, 4)}
    model = module(program, **state)
    options = cgpass.options(**{"compiler": "eager", **options})
    compiled = torch.compile(model, backend="cgpass", dynamic=dynamic, options=options)
    return compiled, model, copy.deepcopy(model)


def average(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.ema.data = 0.9 * self.ema.data + 0.1 * x.mean(0)
    return x.tanh() + self.ema


def decay(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.data = self.weight.data * 0.99
    return (x.tanh() * self.weight).exp()


def argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    x.data = y
    x.add_(1)
    return y.tanh()


def result_shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.mean(0)
    self.ema.data = y
    y.add_(1)
    return y


def view_of_the_argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.ema.data = x[0]
    self.ema.mul_(2)
    return x.tanh().exp()


def twice(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    self.ema.data = self.ema.data + 1
    y = x.tanh() + self.ema
    self.ema.data = self.ema.data * 1.5
    return y, x.exp() * self.ema


def two_exchanged(self: Any, x: torch.Tensor) -> torch.Tensor:
    kept = self.ema.data
    self.ema.data = self.weight.data + x.tanh().mean(0)
    self.weight.data = kept
    return x.exp() + self.ema - self.weight


def other_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.ema.data = x.flatten()
    return x.tanh().exp()


def swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.utils.swap_tensors(self.ema, x.mean(0) + self.ema)
    return x.tanh() + self.ema


def rows_kept(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    self.book.data = y + 1
    return y.exp()


PROGRAMS = [
    average, decay, argument, result_shared, view_of_the_argument, twice, two_exchanged, other_shape, rows_kept,
    swapped,
]  # fmt: skip


def steps(call: Callable[..., Any], model: nn.Module, sizes: list[int]) -> Iterator[list[torch.Tensor]]:
    """The tensors that a caller sees after each call: results, argument, state."""
    for step, size in enumerate(sizes):
        x = torch.randn((size, 4), generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            result = call(x)
        results = result if isinstance(result, tuple) else (result,)
        yield [*results, x, *model.state_dict().values()]


def assert_equal(call: Callable[..., Any], model: nn.Module, reference: nn.Module, sizes: list[int]) -> None:
    """Results stay what they were, too: they are compared after all calls."""
    found, expected = [], []
    for seen, right in zip(steps(call, model, sizes), steps(reference, reference, sizes), strict=True):
        torch.testing.assert_close(seen, right)
        found.append(seen[0])
        expected.append(right[0])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [{"compiler": "eager"}, {"compiler": "aot_eager"}, {"compiler": "aot_eager", "mode": "PIECEWISE"},
     {"compiler": "eager", "mode": "FULL", "on_fallback": "silent"}],
    ids=["default", "aot_eager", "PIECEWISE", "FULL"],
)  # fmt: skip
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_memory_is_exchanged_in_each_call(program: Callable[..., Any], options: dict[str, Any]) -> None:
    compiled, *models = exchanging(program, **options)
    assert_equal(compiled, *models, [3] * 9)
    report = str(gp.runtime_of(compiled).report())
    if program is not swapped:  # where Dynamo ends the graph before the exchange
        assert "exchanged memory" in report
        assert "copy_" in report


@pytest.mark.parametrize("program", [decay, argument, rows_kept], ids=lambda p: p.__name__)
def test_no_size_is_padded_where_memory_is_exchanged(program: Callable[..., Any]) -> None:
    """Padded, the exchanged tensor would get padded memory, or the caller's argument none."""
    padded = {"dynamic_dims": {"x": 0}, "padding": {"x": 0.0}, "on_fallback": "silent"}
    compiled, *models = exchanging(program, dynamic=True, **padded)
    assert_equal(compiled, *models, [3, 3, 3, 5, 5, 7, 3, 5, 7])
    sizes = [size for record in gp.runtime_of(compiled).callables() for size in record.sizes]
    assert sizes
    assert not any(size.is_padded for size in sizes)


def test_what_exchanges_no_memory_still_replays() -> None:
    compiled, *models = exchanging(average)
    assert_equal(compiled, *models, [3] * 9)
    assert {counts.replayed for counts in gp.runtime_of(compiled).counts().values()} == {8}


@pytest.mark.soak
def test_inductor_compiles_what_is_left() -> None:
    assert_equal(*exchanging(decay, compiler="inductor"), [3] * 9)


def give(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    target.data = source
    return target


def write(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    target.copy_(source)
    return target


@pytest.mark.parametrize(
    ("function", "by_name", "exchanges"),
    [(give, "", True), (torch.Tensor.set_, "", True), (write, "", False), (write, "aten::copy_", True)],
    ids=["given", "set", "written", "by name"],
)
def test_an_exchange_is_known_by_what_happens_or_by_its_name(
    function: Callable[..., Any], by_name: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the operator is called: the storage of each argument is compared before and after it.

    Fake tensors do not show what ``aten::shallow_copy_data_`` of torch 2.15 does; a writing operator stands for it.
    """
    monkeypatch.setattr(execute, "_TAKE_OVER", frozenset({by_name}))
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    new = graph.call_function(torch.tanh, (x,))
    given = graph.call_function(function, (y, new))
    graph.output((graph.call_function(torch.exp, (x,)), given))
    parts = partition(fx.GraphModule(nn.Module(), graph), example_inputs=(torch.randn(X), torch.randn(X)))
    reasons = {reason.kind for region in parts.regions for reason in region.reasons}
    assert ("exchanged memory" in reasons) == exchanges
    assert (parts.never_full() is not None) == exchanges
    assert (parts.never_padded() is not None) == exchanges
    assert parts.mutated_inputs == (1,)
    x_now, y_now, y_eager = torch.randn(X), torch.zeros(X), torch.zeros(X)
    parts.stitched(x_now, y_now)
    function(y_eager, torch.tanh(x_now))
    assert torch.equal(y_now, y_eager)
