"""Finding a compiled callable's runtime, and what a compiled model is to copy, pickle and state_dict."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import GraphRuntime, runtime_of
from graphpass.errors import OptionError
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import Rowwise


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def compiled_in_place(**how: Any) -> Any:
    model = Rowwise()
    model.compile(**how)
    return model


MAKERS: dict[str, Callable[..., Any]] = {
    "module": lambda **how: torch.compile(Rowwise(), **how),
    "function": lambda **how: torch.compile(shift, **how),
    "in place": compiled_in_place,
    "method": lambda **how: torch.compile(Rowwise().forward, **how),
}


def made(make: Callable[..., Any], **options: Any) -> Any:
    return make(backend="cgpass", options={"compiler": "eager", **options})


def called(fast: Any) -> Compiled:
    """What was compiled by hand, after its first call, with the runtime that it has since."""
    with torch.no_grad():
        fast(torch.randn(4, 6))
    found = Compiled(runtime_of(fast), fast)
    found.fast = fast
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_runtime_of_returns_the_runtime_option_before_the_first_call(make: str, rt: GraphRuntime) -> None:
    fast = made(MAKERS[make], runtime=rt)
    assert runtime_of(fast) is rt
    assert called(fast).rt is rt
    assert rt.stats().callables == 1


@pytest.mark.parametrize("make", MAKERS)
def test_runtime_of_returns_a_private_runtime_after_the_first_call(make: str) -> None:
    fast = made(MAKERS[make])
    with pytest.raises(OptionError, match="no graphpass runtime") as raised:
        runtime_of(fast)
    assert "call it once first" in raised.value.remedy
    compiled = called(fast)
    assert compiled.rt is runtime_of(fast)
    compiled.capture("FULL")
    assert compiled.tally("FULL") == {("g0.full", 4): (1, 1)}


def test_a_copy_of_a_model_compiled_in_place_is_to_be_compiled_again() -> None:
    fast = made(MAKERS["in place"])
    called(fast)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):  # torch leaves the compilation out
        copied(torch.randn(4, 6))
        with pytest.raises(OptionError, match="no graphpass runtime") as raised:
            runtime_of(copied)
        (call,) = re.findall(r"call its (compile\(.*?\))", raised.value.remedy)
        eval(f"copied.{call}", {"copied": copied})
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(4, 6)
                agrees(copied(x), fast(x))
        assert runtime_of(copied) is not runtime_of(fast)
        assert runtime_of(copied).stats().replayed > 0


@pytest.mark.parametrize("model", [Rowwise, lambda: nn.Sequential(Rowwise())])
def test_a_copy_made_before_the_first_call_has_the_runtime_that_serves_it(model: Callable[[], nn.Module]) -> None:
    compile_it = functools.partial(torch.compile, backend="cgpass", options={"compiler": "eager"})
    first, other = compile_it(model()), compile_it(nn.ReLU())
    copied = copy.deepcopy(first)
    with torch.no_grad():
        for fast in (first, copied, copied, copied):
            fast(torch.randn(4, 6))
    assert runtime_of(copied) is runtime_of(first)
    assert runtime_of(first).stats().replayed == 3
    with pytest.raises(OptionError, match="no graphpass runtime"):
        runtime_of(other)


@pytest.mark.parametrize("first", [pytest.param("cgpass", marks=pytest.mark.soak), "torch"])
def test_the_backend_is_registered_whatever_was_imported_first(first: str) -> None:
    code = (
        f"import {first}, torch\n"
        "print(torch.compile(lambda x: x + 1, backend='cgpass', options={'compiler': 'eager'})(torch.ones(2)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
