"""Graphs of constant sizes are compiled at their second call: the next size may make Dynamo trace symbolic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch.utils.checkpoint import checkpoint

from graphpass import GraphRuntime
from graphpass.compat import memory
from tests.unit.compiled import agrees
from tests.unit.models import module


def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.first(x).relu() * 3


def model() -> nn.Module:
    return module(scaled, first=nn.Linear(6, 12)).eval()


def artifacts(rt: GraphRuntime) -> list[int]:
    return [record.artifacts for record in rt.callables()]


def test_a_size_that_comes_once_is_not_compiled(rt: GraphRuntime) -> None:
    eager = model()
    fast = torch.compile(eager, backend="cgpass", options={"runtime": rt, "dispatch": "auto"})
    found = []
    for size in (5, 7, 7, 9, 1, 5):
        x = torch.randn(size, 6)
        with torch.no_grad():
            agrees(fast(x), eager(x))
        found.append(artifacts(rt))
    assert found == [[0], [0, 1], [0, 1], [0, 1], [0, 1, 0], [0, 1, 0]]


def test_a_higher_order_operator_is_compiled_at_once(rt: GraphRuntime) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=False) * 2

    fast, x = torch.compile(call, backend="cgpass", options={"runtime": rt, "dispatch": "auto"}), torch.randn(5, 6)
    with torch.no_grad():
        agrees(fast(x), x.tanh() * 2)
    assert artifacts(rt) == [1]


def test_what_waits_for_another_graph_is_compiled_for_a_capture(rt: GraphRuntime) -> None:
    options = {"runtime": rt, "dispatch": "auto"}
    first, second = (torch.compile(f, backend="cgpass", options=options) for f in (lambda x: x * 3, lambda y: y * 3))
    x = torch.randn(5, 6)
    with torch.no_grad():
        first(x)
        with rt.capturing():
            second(x)
        assert artifacts(rt) == [0, 1]
        agrees(second(x), x * 3)


def test_nothing_is_compiled_inside_a_capture_of_the_user(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, x = model(), torch.randn(5, 6)
    fast = torch.compile(eager, backend="cgpass", options={"runtime": rt, "dispatch": "auto"})
    found = []
    for is_capturing in (False, True, False):
        monkeypatch.setattr(memory, "is_capturing_stream", lambda device, now=is_capturing: now)
        with torch.no_grad():
            agrees(fast(x), eager(x))
        found += artifacts(rt)
    assert found == [0, 0, 1]


def test_an_error_at_the_second_call_comes_as_one_at_the_first(
    rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    eager, x = model(), torch.randn(5, 6)
    fast = torch.compile(eager, backend="cgpass", options={"runtime": rt, "dispatch": "auto"})
    with torch.no_grad():
        agrees(fast(x), eager(x))
        with monkeypatch.context() as patch:
            patch.setattr(compile_fx, "compile_fx", fails)
            for _ in range(2):
                with pytest.raises(BackendCompilerFailed, match="backend='cgpass' raised:\nRuntimeError: no kernel"):
                    fast(x)
        agrees(fast(x), eager(x))
    assert artifacts(rt) == [1]
