"""Compiled code inside of what is captured: its graph is recorded, though Dynamo skips it under a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.capture.tape import call_compiled

KEY = gp.BatchDescriptor(4)


def ran_in_python(x: torch.Tensor) -> None:
    """Told of calls that nothing compiled."""


def double(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        ran_in_python(x)
    return (x * 2).sin()


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x.sin()


def capture_around(compiled: Callable[..., Any], runtime: gp.GraphRuntime) -> gp.CUDAGraphWrapper:
    def around(x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = call_compiled(compiled, x + 1)
        return inner.cos()

    wrapper = gp.CUDAGraphWrapper(around, gp.CUDAGraphMode.FULL, runtime=runtime, name="around")
    with runtime.capturing():
        run(wrapper, torch.ones(4, 3))
    return wrapper


def run(wrapper: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=KEY):
        result: torch.Tensor = wrapper(x)
    return result


def compiled_by(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    torch.compiler.reset()
    options = {"compiler": compiler, "runtime": gp.GraphRuntime(), "mode": "NONE"}
    compiled: Callable[..., Any] = torch.compile(function, backend="cgpass", options=options)
    with torch.no_grad(), gp.set_forward_context():
        compiled(torch.ones(4, 3))
    return compiled


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_compiled_callable_is_captured_by_its_graph(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_by(double, compiler)
    seen: list[torch.Tensor] = []
    monkeypatch.setitem(globals(), "ran_in_python", seen.append)
    with gp.GraphRuntime(device="cpu") as runtime:
        wrapper = capture_around(compiled, runtime)
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(run(wrapper, x), ((x + 1) * 2).sin().cos())
        assert wrapper.counts()[KEY].replayed == 4
        with torch.no_grad(), gp.set_forward_context():
            compiled(torch.ones(4, 3))
    assert seen == [], "it was skipped while it was recorded, or is ever after"


@pytest.mark.parametrize(
    "compiled",
    [lambda: compiled_by(breaks, "eager"), lambda: torch.compile(double, backend="eager")],
    ids=["graph break", "another backend"],
)
def test_what_is_not_one_graph_is_refused(compiled: Callable[[], Callable[..., Any]]) -> None:
    """Ops between two graphs, or of somebody else's, would not be recorded."""
    with (
        gp.GraphRuntime(device="cpu") as runtime,
        pytest.raises(gp.errors.CaptureError, match="compiled callable cannot be captured on the CPU tape"),
    ):
        capture_around(compiled(), runtime)
