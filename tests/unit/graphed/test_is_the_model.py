"""A graphed module is a module of its class: whatever is done to it is done to the model, and it stays graphed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import GraphedModel
from graphpass.errors import OptionError
from tests.unit.graphed.oracle import graphed, replays


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, 5)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.factor = 2.0

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return self.drop(self.inner(x)) * self.factor + shift

    def describe(self) -> str:
        return f"factor {self.factor}"

    @property
    def doubled(self) -> float:
        return 2 * self.factor


def still_graphed(fast: Any, model: Callable[..., Any], x: torch.Tensor | None = None, **kwargs: Any) -> None:
    """It agrees with the model, and replays by its third call."""
    x = torch.randn(3, 6) if x is None else x
    for step in range(4):
        torch.manual_seed(step)
        want = model(x, **kwargs).detach()
        before = replays(fast)
        torch.manual_seed(step)
        torch.testing.assert_close(fast(x, **kwargs), want)
    assert replays(fast) > before


def test_it_is_a_module_of_its_class() -> None:
    model = Net().eval()
    fast = graphed(model)
    assert isinstance(fast, nn.Module)
    assert isinstance(fast, Net)
    assert isinstance(fast, GraphedModel)
    assert repr(fast) == "Graphed" + repr(model)
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    still_graphed(fast, model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.double(),
        lambda m: m.to(torch.float64),
        lambda m: m.requires_grad_(False),
        lambda m: m.half(),
        lambda m: m.apply(lambda part: part),
        lambda m: m.to("cpu"),
        lambda m: m.share_memory(),
    ],
    ids=["eval", "train", "double", "to", "requires_grad_", "half", "apply", "cpu", "share_memory"],
)
def test_methods_that_return_the_module_return_the_graphed_one(change: Callable[[Any], Any]) -> None:
    model, reference = Net().eval(), Net().eval()
    fast = graphed(model)
    still_graphed(fast, model)
    assert change(fast) is fast
    change(reference)
    assert fast.training == model.training == reference.training
    x = torch.randn(3, 6, dtype=model.inner.weight.dtype)
    assert model.inner.weight.dtype == reference.inner.weight.dtype
    still_graphed(fast, reference, x)


def test_attributes_are_the_models_to_read_and_to_set() -> None:
    model = Net().eval()
    fast = graphed(model)
    still_graphed(fast, model)
    assert (fast.factor, fast.describe(), fast.doubled) == (2.0, "factor 2.0", 4.0)
    fast.factor = 5.0
    assert model.factor == 5.0
    still_graphed(fast, model)
    model.factor = 7.0
    still_graphed(fast, model)
    fast.inner = nn.Linear(6, 5)
    assert model.inner is fast.inner
    still_graphed(fast, model)
    fast.extra = nn.Parameter(torch.ones(2))
    assert "extra" in dict(model.named_parameters())
    del fast.extra
    assert not hasattr(model, "extra")
    with pytest.raises(AttributeError, match="missing"):
        _ = fast.missing


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.out = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.child(x))


def test_as_a_child_it_is_the_model_and_stays_graphed() -> None:
    model = Net()
    fast = graphed(model)
    parent = Parent(fast).eval()
    assert list(parent.state_dict()) == list(Parent(model).state_dict())
    assert not model.training
    parent.double()
    assert model.inner.weight.dtype is torch.float64
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(4):
        with torch.no_grad():
            torch.testing.assert_close(parent(x), parent.out(model(x)))
    assert replays(fast) >= 2
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(parent)(x), parent(x))


@pytest.mark.parametrize("compile_parent", ["graphed", "torch.compile"])
def test_inside_of_another_compiled_model_it_is_a_part_of_that(compile_parent: str) -> None:
    fast = graphed(Net().eval())
    parent = Parent(fast).eval()
    outer: Any = (
        graphed(parent)
        if compile_parent == "graphed"
        else torch.compile(parent, backend="cgpass", options={"compiler": "eager"})
    )
    x = torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(outer(x), parent.out(fast._graphed.model(x)))
    assert replays(fast) == 0
    assert gp.runtime_of(outer).stats().replayed >= 2
    assert gp.runtime_of(outer).stats().callables == 1


def test_graphed_twice_is_graphed_once() -> None:
    model = Net().eval()
    fast = graphed(graphed(model))
    assert type(fast).__name__ == "GraphedNet"
    still_graphed(fast, model)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda fast: pickle.loads(pickle.dumps(fast))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_a_copy_is_graphed_and_has_no_graphs(copied: Callable[[Any], Any]) -> None:
    model = Net().eval()
    fast = graphed(model, [2, 4], {"x": 0})
    fast.capture(torch.randn(3, 6))
    other = copied(fast)
    assert isinstance(other, GraphedModel)
    assert isinstance(other, Net)
    assert other.runtime is not fast.runtime
    assert other.runtime.stats().captured == 0
    still_graphed(other, model)
    assert {key.num_tokens for _, _, key in other.runtime.counts()} == {4}, "the same options"
    other.factor = 9.0
    assert fast.factor == 2.0


@pytest.mark.parametrize("function", [torch.tanh, lambda x: x * 2, nn.Linear(6, 6).eval().forward])
def test_a_function_is_a_callable_object(function: Callable[..., Any]) -> None:
    fast = graphed(function)
    assert not isinstance(fast, nn.Module)
    still_graphed(fast, function)
    assert repr(fast).startswith("GraphedModel(")


class TestHooks:
    def test_hooks_of_the_module_itself_run_once_a_call_whenever_they_were_added(self) -> None:
        model = Net().eval()
        fast = graphed(model)
        x = torch.randn(3, 6)
        seen: list[str] = []
        fast(x)
        handle = fast.register_forward_hook(lambda module, args, out: seen.append("after") or out + 1)
        model.register_forward_pre_hook(lambda module, args: seen.append("before"))
        for _ in range(3):
            seen.clear()
            torch.testing.assert_close(fast(x), model.forward(x).detach() + 1)
            assert seen == ["before", "after"]
        handle.remove()
        torch.testing.assert_close(fast(x), model.forward(x).detach())

    def test_hooks_with_keyword_arguments(self) -> None:
        model = Net().eval()
        fast = graphed(model)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "shift": 10.0}), with_kwargs=True
        )
        still_graphed(fast, model, shift=1.0)


def test_another_forward_of_the_instance() -> None:
    model = Net().eval()
    fast = graphed(model)
    still_graphed(fast, model)
    model.forward = lambda x: model.inner(x) * 11  # type: ignore[method-assign]
    still_graphed(fast, model)
    fast.forward = lambda x: model.inner(x) * 13
    still_graphed(fast, model)
    torch.testing.assert_close(model(torch.ones(1, 6)), model.inner(torch.ones(1, 6)) * 13)


def test_a_class_that_minds_its_subclasses() -> None:
    class Registered(Net):
        def __init_subclass__(cls, *, name: str) -> None:
            raise AssertionError("no class of the user's was written")

    class Called(Net):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + 1

    still_graphed(graphed(Called().eval()), Called().eval())
    still_graphed(graphed(Registered().eval()), Registered().eval())


def test_a_module_without_parameters_yet_is_refused() -> None:
    with pytest.raises(OptionError, match="without a shape"):
        graphed(nn.Sequential(nn.LazyLinear(3)))
