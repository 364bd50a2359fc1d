"""Transforms of ``torch.func`` and forward-mode AD around what is compiled: right, or refused by name; never frozen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import nn

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, CUDAGraphWrapper, GraphRuntime
from graphpass.errors import CaptureError

Tensors = Any
Around = Callable[[Callable[..., Any], torch.Tensor], Tensors]
MODES = pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh() * 2 + 1


def batched(call: Callable[..., Any], x: torch.Tensor) -> Tensors:
    return torch.func.vmap(call)(torch.stack([x, x + 1, x * 2]))


def forward_derivative(call: Callable[..., Any], x: torch.Tensor) -> Tensors:
    return torch.func.jvp(call, (x,), (torch.ones_like(x),))


def gradient(call: Callable[..., Any], x: torch.Tensor) -> Tensors:
    return torch.func.grad(lambda y: call(y).sum())(x)


def dual(call: Callable[..., Any], x: torch.Tensor) -> Tensors:
    with fwad.dual_level():
        made = fwad.unpack_dual(call(fwad.make_dual(x, torch.ones_like(x))))
        assert made.tangent is not None, "a tangent that was lost is a wrong result"
        return made.primal, made.tangent


def beside(call: Callable[..., Any], x: torch.Tensor) -> Tensors:
    """The model's own argument is an ordinary tensor."""
    return torch.func.vmap(lambda y: call(x) + y)(torch.stack([x, x + 1]))


AROUND = pytest.mark.parametrize("around", [batched, forward_derivative, gradient, dual, beside])


@contextlib.contextmanager
def directed(mode: str | None, capture: GraphRuntime | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            key = BatchDescriptor(4)
            stack.enter_context(gp.set_forward_context(runtime_mode=CUDAGraphMode[mode], batch_descriptor=key))
        if capture is not None and mode is not None:
            stack.enter_context(capture.capturing())
        yield


def right_or_refused(around: Around, call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> bool:
    """Whether it was refused."""
    try:
        got = around(call, x)
    except CaptureError as error:
        refused: CaptureError | None = error
    else:
        refused = None
        torch.testing.assert_close(got, around(model, x), rtol=1e-4, atol=1e-5)
    assert refused is None or "cannot replay under" in refused.problem
    return refused is not None


@AROUND
@MODES
@pytest.mark.parametrize("first", ["transform", "plain"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_transform_around_a_compiled_model(around: Around, mode: str | None, first: str, compiler: str) -> None:
    model = Model().eval().requires_grad_(False)
    rt = GraphRuntime()
    options = {"compiler": compiler, "runtime": rt, "dispatch": "auto"}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    x = torch.randn(4, 6)
    with directed(mode, rt):
        if first == "plain":
            for _ in range(3):
                compiled(x)
        for _ in range(3):
            refused = right_or_refused(around, compiled, model, torch.randn(4, 6))
            assert not (refused and mode in (None, "NONE")), "without a graph asked for, it runs"
        for _ in range(3):
            x = torch.randn(4, 6)
            torch.testing.assert_close(compiled(x), model(x))
    # Dynamo leaves a function alone for good whose first call is under torch.func; so does 2.15 under forward-mode AD.
    if mode != "NONE" and (first == "plain" or rt.stats().callables):
        assert rt.stats().captured == 1, "the plain calls have their graph, and nothing gave the key up"
        assert rt.stats().replayed >= 2


@AROUND
@pytest.mark.parametrize("is_captured", [True, False])
def test_a_transform_around_a_wrapper(around: Around, is_captured: bool) -> None:
    model = Model().eval().requires_grad_(False)
    rt = GraphRuntime()
    wrapper = CUDAGraphWrapper(model, "FULL", runtime=rt, name="region")
    x = torch.randn(4, 6)
    with directed("FULL", rt):
        if is_captured:
            wrapper(x)
        refused = right_or_refused(around, wrapper, model, x)
        assert refused == (around is not beside)
        torch.testing.assert_close(wrapper(x + 1), model(x + 1))
    assert {(c.captured, c.static_sets) for c in rt.counts().values()} == {(1, 1)}


@MODES
def test_tangents_of_parameters(mode: str | None) -> None:
    model = Model().eval().requires_grad_(False)
    rt = GraphRuntime()
    options = {"compiler": "aot_eager", "runtime": rt, "dispatch": "auto"}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    x = torch.randn(4, 6)

    def derivative(call: nn.Module, prefix: str) -> Any:
        parameters = {prefix + name: value for name, value in model.named_parameters()}
        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
        return torch.func.jvp(lambda given: torch.func.functional_call(call, given, (x,)), (parameters,), (tangents,))

    want = derivative(model, "")
    with directed(mode, rt):
        for _ in range(3):
            compiled(x)
        for _ in range(2):
            try:
                torch.testing.assert_close(derivative(compiled, "_orig_mod."), want, rtol=1e-4, atol=1e-5)
            except CaptureError:
                assert mode in ("PIECEWISE", "FULL")


def test_vmap_inside_the_model_is_part_of_its_graph() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row.cumsum(0) * row.sum())(x)

    rt = GraphRuntime()
    compiled = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager", "runtime": rt})
    with directed("FULL", rt):
        for _ in range(3):
            x = torch.randn(4, 6)
            torch.testing.assert_close(compiled(x), model(x))
    (counts,) = rt.counts().values()
    assert (counts.captured, counts.replayed) == (1, 3)
