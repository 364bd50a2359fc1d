"""What a step asks of 300 static inputs: one native comparison for all of them, and nothing of each from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import cgpass
import graphpass as gp
from graphpass.compat import memory

FULL, PIECEWISE = gp.CUDAGraphMode.FULL, gp.CUDAGraphMode.PIECEWISE
NUM_STATIC = 300
KEY = gp.BatchDescriptor(4)


class Questions(TorchFunctionMode):
    """Counts what is asked of parameters while it is active: methods, properties, operations."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.nn.Parameter):
            self.asked.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(NUM_STATIC // 2)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = (x + y).flip(-1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each comparison of addresses; what does the comparing is out of the picture."""
    sizes: list[int] = []

    def equal(tensors: list[Any], expected: list[int | None], positions: list[int]) -> bool:
        sizes.append(len(positions))
        with torch._C.DisableTorchFunction():
            return all(tensors[p].data_ptr() == expected[p] for p in positions)

    monkeypatch.setattr(memory, "_data_ptrs_equal", equal)
    return sizes


def wrapper_call(num_instances: int) -> Callable[[], Any]:
    """A step through a wrapper that has a graph for each of several sets of parameters."""
    runtime = gp.GraphRuntime()
    wrapper = gp.CUDAGraphWrapper(lambda x, y, *_: x + y, FULL, runtime=runtime, name="f")
    staged = [torch.randn(4, 4) for _ in range(2)]
    every = [[*staged, *(torch.nn.Parameter(torch.randn(4)) for _ in range(NUM_STATIC))] for _ in range(num_instances)]

    def step(args: list[Any]) -> Any:
        with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=KEY) as context:
            return wrapper.call_flat(context, args)

    with runtime.capturing():
        for args in every:
            step(args)
    return lambda: step(every[-1])


def compiled_call(mode: gp.CUDAGraphMode) -> Callable[[], Any]:
    """A step of a compiled model, past Dynamo: PIECEWISE is a plan of two regions with 300 static inputs together."""
    runtime = gp.GraphRuntime()
    options = cgpass.options(splitting_ops=["aten::flip"], compiler="eager", runtime=runtime)
    compiled = torch.compile(Layers().eval(), backend="cgpass", options=options)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with gp.set_forward_context(runtime_mode=mode, batch_descriptor=KEY), runtime.capturing() as scope:
        compiled(x, y)
        (call,) = scope.reached
        reached, args = call.callable, call.args

    def step() -> Any:
        with gp.set_forward_context(runtime_mode=mode, batch_descriptor=KEY):
            return reached.call(args)

    return step


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "make_call",
    [
        pytest.param(lambda: wrapper_call(1), id="wrapper"),
        pytest.param(lambda: wrapper_call(4), id="wrapper with four instances"),
        pytest.param(lambda: compiled_call(FULL), id="compiled, FULL"),
        pytest.param(lambda: compiled_call(PIECEWISE), id="compiled, PIECEWISE"),
    ],
)
def test_static_inputs_are_compared_once_a_step(make_call: Callable[[], Any], comparisons: list[int]) -> None:
    call = make_call()
    call()  # the first step asks for layouts one by one, if Dynamo does not guard them
    comparisons.clear()
    with Questions() as questions:
        call()
    assert comparisons == [NUM_STATIC]
    # One parameter's address tells the instances of a class apart.
    assert questions.asked in ([], ["data_ptr"])
