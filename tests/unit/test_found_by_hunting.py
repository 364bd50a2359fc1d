"""Wrong answers that once were silent, one test for each: what a harsh user did, and what it has to give."""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass
from graphpass import GraphedModel, ShapeError, compat
from graphpass.manager.guards import KeptLayouts

OPTIONS: dict[str, Any] = {"compiler": "eager"}


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Changing(nn.Module):
    """A model whose Python state Dynamo guards in many ways."""

    SCALE = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.scales = [1.0, 2.0]
        self.flags = {"first"}
        self.named: dict[str, float] = {}
        self.kind = Kind.PLAIN
        self.count: float = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        for scale in (*self.scales, *self.named.values()):
            x = x * scale
        x = x + (1 if "first" in self.flags else 3)
        x = x * (2 if self.kind is Kind.DOUBLED else 1)
        ones = torch.ones(4, dtype=torch.long) * self.count
        return (x * (5 if hasattr(self, "extra") else 1) * type(self).SCALE) + ones.sum() // 3


def transpose_in_place(model: Changing) -> None:
    weight = model.layers[0].weight
    weight.data = weight.data.t()  # type: ignore[operator, union-attr]


CHANGES: dict[str, Callable[[Changing], Any]] = {
    "a longer list": lambda m: m.scales.append(3.0),
    "a new item of a dict": lambda m: m.named.update(new=4.0),
    "a smaller set": lambda m: m.flags.clear(),
    "another enum member": lambda m: setattr(m, "kind", Kind.DOUBLED),
    "another function": lambda m: setattr(m, "activation", torch.tanh),
    "another layer": lambda m: m.layers.append(nn.Linear(4, 4)),
    "an attribute that was absent": lambda m: setattr(m, "extra", 1),
    "a float where an int was": lambda m: setattr(m, "count", 2.0),
    "a weight with other strides at its address": transpose_in_place,
    "another forward of a layer": lambda m: setattr(m.layers[0], "forward", lambda x: x * 3),
}


# Direct calls see what Dynamo guards, and older releases do not guard these two.
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_direct_calls_see_every_change_that_dynamo_guards(change: Callable[[Changing], Any]) -> None:
    model = Changing().eval()
    fast = graphpass.graphed(model, [4], {"x": 0}, **OPTIONS)
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x).detach())
    change(model)
    # Where Dynamo does not see it, graphpass does.
    is_refused = change is transpose_in_place and not compat.guards_see_layouts()
    for _ in range(2):
        with pytest.raises(ShapeError, match="another layout") if is_refused else contextlib.nullcontext():
            torch.testing.assert_close(fast(x), model(x).detach())


def test_layouts_are_compared_where_dynamo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "guards_see_layouts", lambda: False)
    weight, other = nn.Parameter(torch.randn(4, 4)), torch.randn(3)
    layouts = KeptLayouts([weight, other, weight])
    layouts.refuse_change()
    weight.requires_grad_(False)
    weight.add_(1)
    layouts.refuse_change()
    layouts.refuse_change()
    weight.data = weight.data.t()
    with pytest.raises(ShapeError, match=r"another layout than at capture.*\(1, 4\)"):
        layouts.refuse_change()


def test_direct_calls_see_a_class_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Changing().eval()
    stock = torch.compile(Changing().eval(), backend="eager")
    with torch.no_grad(), monkeypatch.context() as patched:
        before = stock(torch.ones(3, 4))
        patched.setattr(Changing, "SCALE", 5)
        if torch.equal(stock(torch.ones(3, 4)), before):
            pytest.skip("this torch's Dynamo does not guard what is read as type(self).SCALE")
    fast = graphpass.graphed(model, [4], {"x": 0}, **OPTIONS)
    x = torch.randn(3, 4)
    fast(x)
    monkeypatch.setattr(Changing, "SCALE", 7)
    torch.testing.assert_close(fast(x), model(x).detach())


def test_a_list_argument_that_grew_is_seen() -> None:
    def scaled(x: torch.Tensor, scales: list[float]) -> torch.Tensor:
        return x * sum(scales)

    scales = [1.0, 2.0]
    fast = graphpass.graphed(scaled, [4], {"x": 0}, **OPTIONS)
    fast(torch.ones(3, 4), scales)
    scales.append(4.0)
    torch.testing.assert_close(fast(torch.ones(3, 4), scales), torch.full((3, 4), 7.0))


@pytest.mark.parametrize("other", [2.0, True, [2], None])
def test_an_equal_argument_of_another_type_is_another_argument(other: Any) -> None:
    def scaled(x: torch.Tensor, by: Any = 1) -> torch.Tensor:
        return x.long() * by

    fast = graphpass.graphed(scaled, [4], {"x": 0}, **OPTIONS)
    fast(torch.ones(3, 4), by=int(other) if isinstance(other, (float, bool)) else 2)
    with pytest.raises(ShapeError, match="other arguments"):
        fast(torch.ones(3, 4), by=other)


@pytest.mark.parametrize("size", [lambda x: x.shape[0], lambda x: x.shape[0] * 2])
def test_a_padded_size_is_never_returned_as_the_real_one(size: Callable[[torch.Tensor], Any]) -> None:
    def with_size(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return x * 2, size(x)

    fast = graphpass.graphed(with_size, [4], {"x": 0}, **OPTIONS)
    with pytest.raises(ShapeError, match="padded size"):
        fast(torch.ones(3, 4))


def test_a_number_that_is_no_size_comes_back() -> None:
    def with_number(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        return x * 2, 17, True

    fast = graphpass.graphed(with_number, [4], {"x": 0}, **OPTIONS)
    assert fast(torch.ones(3, 4))[1:] == (17, True)


@pytest.mark.parametrize("separate_first", [True, False])
def test_arguments_that_share_memory_with_a_written_one_are_refused(separate_first: bool) -> None:
    def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    fast = graphpass.graphed(accumulate, [4], {"x": 0}, **OPTIONS)
    if separate_first:
        fast(torch.ones(4, 4), torch.ones(4, 4))
    both = torch.ones(6, 4)
    with pytest.raises(ShapeError, match="shares memory with"):
        fast(both[:4], both[2:])
    assert both.eq(1).all()


@torch._dynamo.disable
def _triple(x: torch.Tensor) -> None:
    x.mul_(3)


def test_what_python_between_graphs_writes_reaches_the_caller() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        _triple(x)
        return x + y

    fast = graphpass.graphed(between, [8], {"x": 0}, **OPTIONS)
    for _ in range(3):
        given = torch.ones(3, 5)
        torch.testing.assert_close(fast(given), torch.full((3, 5), 5.0))
        assert given.eq(3).all()


def test_a_width_that_equals_a_capture_size_is_never_cut() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    fast = graphpass.graphed(broken, [4, 8], {"x": 0}, **OPTIONS)
    for rows in (3, 5, 4):
        x = torch.randn(rows, 4)
        with contextlib.suppress(ShapeError):  # where the two sizes are one symbol, it asks for cut=
            torch.testing.assert_close(fast(x), x * 2 + 1)


def test_a_parameter_and_a_buffer_may_be_returned() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("total", torch.zeros(8, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.total.add_(1)  # type: ignore[operator]
            return x * self.weight, self.weight, self.total  # type: ignore[return-value]

    model = Cache()
    fast = graphpass.graphed(model, [4], {"x": 0}, **OPTIONS)
    for step in range(1, 4):
        result, weight, total = fast(torch.ones(3, 4))
        assert result.shape == (3, 4)
        assert weight is model.weight
        assert total is model.total
        assert total.eq(step).all()


def test_threads_that_share_a_graphed_model_get_their_own_results() -> None:
    model = nn.Linear(4, 4)
    fast: GraphedModel = graphpass.graphed(model, [4, 8], {"input": 0}, **OPTIONS)
    fast.capture(torch.randn(4, 4))
    wrong: list[int] = []

    def work(thread: int) -> None:
        for step in range(60):
            x = torch.full((3 + 3 * (thread % 2), 4), float(100 * thread + step))
            with torch.no_grad():
                if not torch.allclose(fast(x), model(x), atol=1e-2):
                    wrong.append(thread)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
