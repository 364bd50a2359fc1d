"""Python around the graph is what torch.compile makes of it: identity, state, branches and sharing are the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.graphed.oracle import agree, agree_with, call, each, graphed, replays, rows
from tests.unit.models import linear, module

SIZES = (5, 3, 5, 3, 6, 3, 5, 6, 4, 5)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None = None


def x_of(size: int) -> torch.Tensor:
    return torch.randn(size, 4)


def alternating(sizes: Any, *ways: Callable[[int], Any]) -> Any:
    """The calls of each way at each size."""
    return [made for size in sizes for way in ways for made in each(way, [size])]


def shapes(self: Any, x: Any, /, y: Any = None, *more: torch.Tensor, scale: float = 1.0, **named: Any) -> Any:
    """Takes its arguments in every way that Python has."""
    total = self.inner(x.x if isinstance(x, Batch) else x["x"] if isinstance(x, dict) else x) * scale
    for value in (y, *more, *named.values()):
        if isinstance(value, torch.Tensor):
            total = total + value
    return {"total": total, "names": list(named), "count": len(more)}


def of_shapes() -> nn.Module:
    return module(shapes, inner=nn.Linear(4, 4))


# -- arguments ---------------------------------------------------------------------------------------------------------


WAYS: dict[str, Callable[[int], Any]] = {
    "positional": lambda n: call(x_of(n)),
    "two positional": lambda n: call(x_of(n), x_of(n)),
    "a keyword": lambda n: call(x_of(n), scale=3.0),
    "another number": lambda n: call(x_of(n), scale=2.0),
    "an int for a float": lambda n: call(x_of(n), scale=2),
    "positional and keyword": lambda n: call(x_of(n), y=x_of(n)),
    "any number of positional": lambda n: call(x_of(n), None, x_of(n), x_of(n)),
    "names of the caller's": lambda n: call(x_of(n), first=x_of(n), second=x_of(n)),
    "the same in another order": lambda n: call(x_of(n), second=x_of(n), first=x_of(n)),
    "names that are no identifiers": lambda n: call(x_of(n), **{"not a name": x_of(n), "class": x_of(n)}),
    "a name that is in use": lambda n: call(x_of(n), x=x_of(n), graphed_model=x_of(n)),
    "a dict": lambda n: call({"x": x_of(n), "other": 1}),
    "a dataclass": lambda n: call(Batch(x_of(n))),
}


@pytest.mark.parametrize("way", WAYS)
def test_any_signature(way: str) -> None:
    assert replays(agree(of_shapes, each(WAYS[way], SIZES))) >= 2


def test_positional_and_keyword_arguments_are_one_call() -> None:
    def model(x: torch.Tensor, y: torch.Tensor, *, scale: int = 1) -> torch.Tensor:
        return (x - y) * scale

    fast = graphed(model, [4, 8], {"x": 0, "y": 0})
    x, y = x_of(3), x_of(3)
    fast.capture(x, y, scale=2)
    captured = fast.runtime.stats().captured
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})):
        torch.testing.assert_close(fast(*args, scale=2, **kwargs), (x - y) * 2)
    assert fast.runtime.stats().captured == captured
    assert replays(fast) == captured + 3


def test_missing_and_unknown_arguments_are_pythons_errors() -> None:
    fast = graphed(linear(4))
    for args, kwargs in (call(), call(x_of(2), x_of(2)), call(x_of(2), z=1)):
        with pytest.raises(TypeError):
            fast(*args, **kwargs)


# -- identity ----------------------------------------------------------------------------------------------------------


def views_of_a_result(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y, y[:, 0], y.t()


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x,
        lambda x: (x, x * 2, x),
        lambda x: x[:, :2],
        lambda x: x.t(),
        lambda x: (x.view(-1), x[1:], x * 2),
        lambda x: [x + 1] * 2,
        views_of_a_result,
        lambda x: {"x": x, "shape": x.shape, "size": x.shape[0], "half": x.shape[0] / 2},
    ],
    ids=["itself", "with others", "columns", "turned", "views", "twice", "views of a result", "sizes"],
)
def test_results_share_what_eager_results_share(model: Callable[..., Any]) -> None:
    agree_with(model, rows(*SIZES))


LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "transposed": lambda n: torch.randn(4, n).t(),
    "every other row": lambda n: torch.randn(2 * n, 4)[::2],
    "columns": lambda n: torch.randn(n, 8)[:, 2:6],
    "expanded": lambda n: torch.randn(1, 4).expand(n, 4),
    "one column expanded": lambda n: torch.randn(n, 1).expand(n, 4),
    "from the middle": lambda n: torch.randn(n + 3, 4)[2:-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_in_any_layout(layout: str) -> None:
    def model(x: torch.Tensor) -> Any:
        return x * 2, x.is_contiguous(), x.stride(1), x.reshape(-1).cos()

    laid: Any = lambda n: call(LAYOUTS[layout](n))  # noqa: E731
    agree_with(model, alternating((5, 3, 5), lambda n: call(x_of(n)), laid, laid))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "expanded" not in name])
def test_writing_to_arguments_in_any_layout(layout: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x.sum(1)

    agree_with(model, each(lambda n: call(LAYOUTS[layout](n), x_of(n)), (5, 3, 5, 3, 5, 6)))


def shifted(n: int) -> Any:
    memory = torch.randn(n + 2, 4)
    return call(memory[:n], memory[2:])


def test_arguments_that_overlap_where_one_is_written() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    agree_with(model, alternating((5, 3, 5, 3), shifted, lambda n: call(x_of(n), x_of(n))) * 2)


# -- state -------------------------------------------------------------------------------------------------------------


def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps a tensor of each call, and reads that of the last one."""
    y = self.inner(x)
    last = self.prev
    self.prev = {"argument": x, "result": y, "view": x[:, :2], "none": None}[self.what]
    self.named["last"] = self.prev
    if len(self.kept) < 3:
        self.kept.append(self.prev)
    return y if last is None else y + last.sum()


@pytest.mark.parametrize("what", ["argument", "result", "view", "none"])
def test_what_the_model_keeps_of_a_call_stays_what_it_was(what: str) -> None:
    agree(lambda: module(keeps, inner=linear(4), what=what, prev=None, kept=[], named={}), rows(*SIZES))


def steps(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.total += x.sum(0)
    self.seen.append(self.step)
    self.registry.add(str(self.step % 3))
    return x * self.step + self.total


def of_steps() -> Any:
    return module(steps, step=0, total=torch.zeros(4), seen=[], registry=set())


def test_python_state_and_buffers_advance_once_a_call() -> None:
    agree(of_steps, rows(*SIZES))
