"""An op of a compiled region that fails while it is captured: the error names it, with the user's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass import GraphRuntime
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import ATTEND, compiled_with


@torch.library.custom_op("cgpasstest::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    _fail("fails")
    return x.clone()


@torch.library.custom_op("cgpasstest::fails_eagerly", mutates_args=())
def fails_eagerly(x: torch.Tensor) -> torch.Tensor:
    _fail("fails_eagerly")
    return x.clone()


def _fail(name: str) -> None:
    if gp.is_forward_context_available() and gp.get_forward_context().extra == name:
        raise ValueError(f"{name} has failed")


for op in (fails, fails_eagerly):
    op.register_fake(torch.empty_like)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = fails_eagerly(self.inner(x)).relu()
        return fails(y + 1) * 2


def failure(rt: GraphRuntime, compiler: str, mode: str, op_name: str) -> Exception:
    options = {"compiler": compiler, "splitting_ops": [ATTEND, "cgpasstest::fails_eagerly"]}
    compiled = compiled_with(rt, Model(), **options)
    x = torch.randn(4, 6)
    with torch.no_grad(), rt.capturing():
        compiled(x)
        context = {"runtime_mode": gp.CUDAGraphMode.parse(mode), "batch_descriptor": gp.BatchDescriptor(4)}
        with gp.set_forward_context(**context, extra=op_name), pytest.raises((CaptureError, ValueError)) as raised:
            compiled(x)
        with gp.set_forward_context(**context):
            torch.testing.assert_close(compiled(x), compiled(x))
    return raised.value


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("mode", "op_name", "region", "line", "remedy"),
    [
        (
            "FULL",
            "fails",
            "g0.full failed at FULL 4 tokens, in g0.r2",
            "return fails(y + 1) * 2",
            "splitting_ops, and set mode='PIECEWISE'",
        ),
        (
            "FULL",
            "fails_eagerly",
            "g0.full failed at FULL 4 tokens, in g0.r1",
            "y = fails_eagerly(self.inner(x))",
            "set mode='PIECEWISE', which leaves it out",
        ),
        ("PIECEWISE", "fails", "g0.r2 failed at PIECEWISE 4 tokens", "return fails(y + 1) * 2", "in splitting_ops"),
    ],
)
def test_the_error_names_op_and_line(
    rt: GraphRuntime, compiler: str, mode: str, op_name: str, region: str, line: str, remedy: str
) -> None:
    error: Any = failure(rt, compiler, mode, op_name)
    assert isinstance(error, CaptureError)
    for text in (region, f"cgpasstest.{op_name}.default at test_failures.py:", line, f"{op_name} has failed"):
        assert text in error.problem + error.found
    assert isinstance(error.__cause__, ValueError)
    assert remedy in error.remedy
    assert ("mode=" in error.remedy) == (mode == "FULL")
    assert remedy in error.remedy
    assert ("mode=" in error.remedy) == (mode == "FULL")


def test_an_eager_region_s_own_error_stays_what_it_is(rt: GraphRuntime) -> None:
    assert type(failure(rt, "eager", "PIECEWISE", "fails_eagerly")) is ValueError


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_op_that_cannot_be_captured_is_named(rt: GraphRuntime, compiler: str) -> None:
    with torch.library._scoped_library("cgpasstest_host", "FRAGMENT") as library:
        library.define("reads(Tensor x) -> Tensor")
        library.impl("reads", lambda x: x * x.sum().item(), "CPU")
        library.impl("reads", torch.empty_like, "Meta")

        def model(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            return torch.ops.cgpasstest_host.reads(y) * 2

        compiled = compiled_with(rt, model, compiler=compiler)
        with torch.no_grad(), rt.capturing():
            context = gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=gp.BatchDescriptor(4))
            with context, pytest.raises(CaptureError) as raised:
                compiled(torch.ones(4))
    for text in (
        "cgpasstest_host.reads",
        "at test_failures.py:",
        "reads(y) * 2",
        "aten::item cannot be captured",
        "splitting_ops",
    ):
        assert text in str(raised.value)
