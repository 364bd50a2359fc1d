"""What surrounds a compiled call: options of Inductor, autocast, grad modes, transforms of ``torch.func``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, CUDAGraphWrapper, GraphRuntime
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import COMPILERS, FULL, Make
from tests.unit.compiled import agrees
from tests.unit.models import module


def plain(layer: nn.Module | None = None) -> nn.Module:
    """Autograd does not go through the tests' custom ops."""
    return module(lambda self, x: self.inner(x).tanh() * 2 + 1, inner=layer or nn.Linear(6, 6))


class LookedAtError(Exception):
    """Ends Inductor's work once its settings were seen: the kernels are not what is tested."""


@pytest.mark.parametrize("training", [False, True], ids=["a region", "under autograd"])
def test_inductors_own_graphs_stay_off_whatever_the_user_set(training: bool) -> None:
    import torch._inductor.config as config

    seen: list[tuple[bool, bool]] = []

    def look(_graph: torch.fx.Graph) -> None:
        seen.append((config.triton.cudagraphs, config.triton.cudagraph_trees))
        raise LookedAtError

    compiled = torch.compile(plain(), backend="cgpass", mode="default", dynamic=True)  # no preset of Inductor's
    users = {"triton.cudagraphs": True, "triton.cudagraph_trees": True, "post_grad_custom_post_pass": look}
    with config.patch(users), torch.set_grad_enabled(training):
        with pytest.raises(BackendCompilerFailed, match="LookedAtError"):
            compiled(torch.randn(4, 6))
        assert config.triton.cudagraphs, "what the user set is the user's again"
    assert seen == [(False, False)]


def test_a_compilation_at_the_second_call_has_the_settings_of_the_trace() -> None:
    import torch._inductor.config as config

    seen: list[bool] = []
    compiled = torch.compile(plain(), backend="cgpass")
    with torch.no_grad():
        with config.patch({"post_grad_custom_post_pass": lambda graph: seen.append(config.triton.cudagraphs)}):
            compiled(torch.randn(4, 6))
        assert seen == []
        compiled(torch.randn(4, 6))
    assert seen == [False]


# -- autocast


def test_a_wrapped_module_freezes_no_cast_weights(rt: GraphRuntime) -> None:
    """The weights are no inputs of the wrapper: a cached cast would not be part of the graph."""
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    wrapped = CUDAGraphWrapper(model, FULL, runtime=rt, name="step")
    at_four = gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)  # leaves the cast weights in autocast's cache
        with rt.capturing(), at_four:
            wrapped(x)
    with torch.no_grad():
        model.weight.mul_(-2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = model(x)
        with at_four:
            agrees(wrapped(x), want)


# -- grad mode


@COMPILERS
def test_under_grad_it_compiles_never_captures_and_gradients_are_right(keyed: Make, compiler: str) -> None:
    model = plain()
    eager = copy.deepcopy(model)
    fast = keyed(model, compiler=compiler, lazy_capture=True)
    x = torch.randn(4, 6, requires_grad=True)
    eagers = x.detach().clone().requires_grad_()
    for run, given in ((fast.fast, x), (eager, eagers)) * 2:
        with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
            run(given).square().sum().backward()
    agrees([x.grad, *(p.grad for p in model.parameters())], [eagers.grad, *(p.grad for p in eager.parameters())])
    assert fast.rt.counts() == {}
    fast.check("FULL")
    assert fast.tally("FULL") == {("g1.full", 4): (1, 1)}


# Transforms of ``torch.func`` and forward-mode AD around what is compiled: right, or refused by name; never frozen.


Around = Callable[[Callable[..., Any], torch.Tensor], Any]
MODES = pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL"])


def dual(call: Callable[..., Any], x: torch.Tensor) -> Any:
    with fwad.dual_level():
        made = fwad.unpack_dual(call(fwad.make_dual(x, torch.ones_like(x))))
        assert made.tangent is not None, "a tangent that was lost is a wrong result"
        return made.primal, made.tangent


AROUND: dict[str, Around] = {
    "batched": lambda call, x: torch.func.vmap(call)(torch.stack([x, x + 1, x * 2])),
    "forward_derivative": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
    "gradient": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "dual": dual,
    # The model's own argument is an ordinary tensor.
    "beside": lambda call, x: torch.func.vmap(lambda y: call(x) + y)(torch.stack([x, x + 1])),
}


@contextlib.contextmanager
def directed(mode: str | None, capture: GraphRuntime) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            key = BatchDescriptor(4)
            stack.enter_context(gp.set_forward_context(runtime_mode=CUDAGraphMode[mode], batch_descriptor=key))
            stack.enter_context(capture.capturing())
        yield


def is_refused_or_right(around: Around, call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> bool:
    try:
        got = around(call, x)
    except CaptureError as error:
        refused: CaptureError | None = error
    else:
        refused = None
        agrees(got, around(model, x), rtol=1e-4, atol=1e-5)
    assert refused is None or "cannot replay under" in refused.problem
    return refused is not None


@pytest.mark.parametrize("around", AROUND)
@MODES
@pytest.mark.parametrize("first", ["transform", "plain"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_transform_around_a_compiled_model(
    around: str, mode: str | None, first: str, compiler: str, compiled: Make
) -> None:
    model = plain().eval().requires_grad_(False)
    fast = compiled(model, compiler=compiler, dynamic=True)
    with directed(mode, fast.rt):
        if first == "plain":
            fast.serve([4] * 3)
        for _ in range(3):
            refused = is_refused_or_right(AROUND[around], fast.fast, model, torch.randn(4, 6))
            assert not (refused and mode in (None, "NONE")), "without a graph asked for, it runs"
        fast.serve([4] * 3)
    # Dynamo leaves a function alone for good whose first call is under torch.func; so does 2.15 under forward-mode AD.
    if mode != "NONE" and (first == "plain" or fast.rt.stats().callables):
        assert fast.captured == 1, "the plain calls have their graph, and nothing gave the key up"
        assert fast.rt.stats().replayed >= 2


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("is_captured", [True, False])
def test_a_transform_around_a_wrapper(around: str, is_captured: bool, rt: GraphRuntime) -> None:
    model = plain().eval().requires_grad_(False)
    wrapper = CUDAGraphWrapper(model, "FULL", runtime=rt, name="region")
    x = torch.randn(4, 6)
    with directed("FULL", rt):
        if is_captured:
            wrapper(x)
        assert is_refused_or_right(AROUND[around], wrapper, model, x) == (around != "beside")
        agrees(wrapper(x + 1), model(x + 1))
    assert {(c.captured, c.static_sets) for c in rt.counts().values()} == {(1, 1)}
