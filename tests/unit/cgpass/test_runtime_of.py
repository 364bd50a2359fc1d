"""Finding a compiled callable's runtime, and what a compiled model is to copy, pickle and state_dict."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import GraphRuntime, runtime_of
from graphpass.errors import OptionError

Run = Callable[..., Any]


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def compiled_module(**options: Any) -> Any:
    return torch.compile(Shifted(), backend="cgpass", options=options)


def compiled_function(**options: Any) -> Any:
    return torch.compile(shift, backend="cgpass", options=options)


def compiled_in_place(**options: Any) -> Any:
    model = Shifted()
    model.compile(backend="cgpass", options=options)
    return model


def compiled_method(**options: Any) -> Any:
    return torch.compile(Shifted().forward, backend="cgpass", options=options)


MAKERS = pytest.mark.parametrize("make", [compiled_module, compiled_function, compiled_in_place, compiled_method])


@MAKERS
def test_runtime_of_returns_the_runtime_option_before_the_first_call(make: Callable[..., Any]) -> None:
    runtime = GraphRuntime()
    compiled = make(compiler="eager", runtime=runtime)
    assert runtime_of(compiled) is runtime
    with torch.no_grad():
        compiled(torch.randn(4, 6))
    assert runtime_of(compiled) is runtime
    assert runtime.stats().callables == 1


def test_a_model_that_dynamo_does_not_compile_is_pointed_to_its_log() -> None:
    """Dynamo runs recurrent layers as they are."""
    compiled = torch.compile(nn.LSTM(6, 6), backend="cgpass", options={"compiler": "eager"})
    with torch.no_grad():
        compiled(torch.randn(3, 4, 6))
    with pytest.raises(OptionError, match="no graphpass runtime") as raised:
        runtime_of(compiled)
    assert "TORCH_LOGS=graph_breaks" in raised.value.remedy


@MAKERS
def test_runtime_of_returns_a_private_runtime_after_the_first_call(make: Callable[..., Any], at_key: Run) -> None:
    compiled = make(compiler="eager")
    with pytest.raises(OptionError, match="no graphpass runtime") as raised:
        runtime_of(compiled)
    assert "call it once first" in raised.value.remedy
    with torch.no_grad():
        compiled(torch.randn(4, 6))
    runtime = runtime_of(compiled)
    assert runtime is runtime_of(compiled)
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=runtime)
    assert [(region, c.captured) for (region, _, _), c in runtime.counts().items()] == [("g0.full", 1)]


@pytest.mark.parametrize("other", [shift, Shifted(), None, "text"], ids=["function", "module", "none", "text"])
def test_what_was_never_compiled_has_none(other: Any) -> None:
    with pytest.raises(OptionError, match="no graphpass runtime"):
        runtime_of(other)


def test_another_backend_has_none() -> None:
    compiled = torch.compile(shift, backend="eager")
    compiled(torch.randn(4, 6))
    with pytest.raises(OptionError, match="no graphpass runtime"):
        runtime_of(compiled)


def test_equal_options_share_callable_and_runtime(at_key: Run) -> None:
    model = Shifted()
    first, second = (
        torch.compile(model, backend="cgpass", options={"compiler": "eager", "dispatch": "context"}) for _ in range(2)
    )
    with torch.no_grad():
        first(torch.randn(4, 6))
        second(torch.randn(4, 6))
    runtime = runtime_of(first)
    assert runtime_of(second) is runtime
    assert runtime.stats().callables == 1, "Dynamo ran the first one's code for the second"
    at_key(first, "FULL", 4, torch.randn(4, 6), capture=runtime)
    x = torch.randn(4, 6)
    torch.testing.assert_close(at_key(second, "FULL", 4, x), model(x).detach())
    assert runtime.stats().captured == 1


def test_different_runtimes_keep_callables_apart(at_key: Run) -> None:
    one, two = GraphRuntime(), GraphRuntime()
    for runtime in (one, two):
        compiled = torch.compile(shift, backend="cgpass", options={"compiler": "eager", "runtime": runtime})
        at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=runtime)
    assert (one.stats().callables, one.stats().captured) == (1, 1)
    assert (two.stats().callables, two.stats().captured) == (1, 1)


def test_a_captured_model_keeps_its_state_dict_and_copies_as_itself(rt: GraphRuntime, at_key: Run) -> None:
    model = Shifted()
    names = list(model.state_dict())
    compiled = torch.compile(model, backend="cgpass", options={"compiler": "eager", "runtime": rt})
    x = torch.randn(4, 6)
    at_key(compiled, "FULL", 4, x, capture=rt)
    assert list(model.state_dict()) == names
    assert {name.removeprefix("_orig_mod.") for name in compiled.state_dict()} == set(names)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.inner.bias.add_(1)
        torch.testing.assert_close(copied(x), model(x) + 1)
    torch.testing.assert_close(at_key(compiled, "FULL", 4, x), model(x).detach())


@pytest.mark.parametrize("give_runtime", [False, True])
def test_a_compiled_model_can_be_copied_and_starts_without_graphs(at_key: Run, give_runtime: bool) -> None:
    runtime = GraphRuntime()
    options = {"compiler": "eager", "dispatch": "context", **({"runtime": runtime} if give_runtime else {})}
    compiled = torch.compile(Shifted(), backend="cgpass", options=options)
    x = torch.randn(4, 6)
    with torch.no_grad():
        compiled(x)
    runtime = runtime_of(compiled)
    at_key(compiled, "FULL", 4, x, capture=runtime)
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        with torch.no_grad():
            torch.testing.assert_close(copied(x), compiled(x))
        assert list(copied.state_dict()) == list(compiled.state_dict())
    assert runtime.stats().captured == 1


def test_the_runtime_and_its_parameters_go_with_the_model(at_key: Run) -> None:
    model = Shifted()
    compiled = torch.compile(model, backend="cgpass", options={"compiler": "eager"})
    with torch.no_grad():
        compiled(torch.randn(4, 6))
    at_key(compiled, "FULL", 4, torch.randn(4, 6), capture=runtime_of(compiled))
    dead = [weakref.ref(model.inner.weight), weakref.ref(runtime_of(compiled))]
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


@pytest.mark.parametrize("first", ["cgpass", "torch"])
def test_the_backend_is_registered_whatever_was_imported_first(first: str) -> None:
    code = (
        f"import {first}, torch\n"
        "print(torch.compile(lambda x: x + 1, backend='cgpass', options={'compiler': 'eager'})(torch.ones(2)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
