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
from graphpass.errors import CaptureError, OptionError
from tests.observed import reported_regions
from tests.unit.cgpass.attended import (
    BOTH,
    COMPILERS,
    FULL,
    Attended,
    Run,
    agrees,
    compiled_with,
    expected_counts,
    regions_of,
)


@pytest.mark.parametrize("preset", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_presets_of_inductor_are_refused_by_name(preset: str) -> None:
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(Attended(), backend="cgpass", mode=preset)(torch.randn(4, 6))
    inner = raised.value.inner_exception
    assert isinstance(inner, OptionError)
    assert inner.found == f"mode={preset!r}"
    assert "options" in inner.expected


@pytest.mark.parametrize("option", ["triton.cudagraphs", "max_autotune"])
def test_options_of_inductor_are_no_options_of_the_backend(option: str) -> None:
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(Attended(), backend="cgpass", options={option: True})(torch.randn(4, 6))
    assert isinstance(raised.value.inner_exception, OptionError)
    assert option in raised.value.inner_exception.found


class Plain(nn.Module):
    """Autograd does not go through the tests' custom ops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


class LookedAtError(Exception):
    """Ends Inductor's work once its settings were seen: the kernels are not what is tested."""


@pytest.mark.parametrize("training", [False, True], ids=["a region", "under autograd"])
def test_inductors_own_graphs_stay_off_whatever_the_user_set(training: bool) -> None:
    import torch._inductor.config as config

    seen: list[tuple[bool, bool]] = []

    def look(_graph: torch.fx.Graph) -> None:
        seen.append((config.triton.cudagraphs, config.triton.cudagraph_trees))
        raise LookedAtError

    compiled = torch.compile(Plain(), backend="cgpass", mode="default")  # no preset of Inductor's
    users = {"triton.cudagraphs": True, "triton.cudagraph_trees": True, "post_grad_custom_post_pass": look}
    with config.patch(users), torch.set_grad_enabled(training):
        with pytest.raises(BackendCompilerFailed) as raised:
            compiled(torch.randn(4, 6))
        assert config.triton.cudagraphs, "what the user set is the user's again"
    assert "LookedAtError" in str(raised.value)
    assert seen == [(False, False)]


# -- autocast


@COMPILERS
def test_autocast_around_the_call(rt: GraphRuntime, at_key: Run, tally: Run, compiler: str) -> None:
    model = Attended().eval()
    compiled = compiled_with(rt, model, compiler=compiler)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with rt.capturing():
        for mode in BOTH:
            with autocast:
                at_key(compiled, mode, 4, torch.randn(4, 6))
            at_key(compiled, mode, 4, torch.randn(4, 6))
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        with autocast:
            got, want = at_key(compiled, mode, 4, x), model(x).detach()
        assert got.dtype is want.dtype is torch.bfloat16
        agrees(got, want)
        agrees(at_key(compiled, mode, 4, x), model(x).detach())
    for mode in BOTH:
        assert tally(rt, mode) == {**expected_counts(mode, 4, (1, 3)), **expected_counts(mode, 4, (1, 3), graph="g1")}


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


@COMPILERS
def test_autocast_freezes_no_cast_weights(rt: GraphRuntime, at_key: Run, compiler: str) -> None:
    model = Attended().eval()
    compiled = compiled_with(rt, model, compiler=compiler)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(x)  # leaves the cast weights in autocast's cache
        with rt.capturing():
            for mode in BOTH:
                at_key(compiled, mode, 4, x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-2)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x).detach()
        for mode in BOTH:
            agrees(at_key(compiled, mode, 4, x), want)
    assert rt.stats().captured == 3


class CastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6)
        self.high = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ops.cgpasstest.attend(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.low(x)
            with torch.autocast("cpu", enabled=False):
                high = self.high(x)
        return low, self.high(torch.ops.cgpasstest.attend(high + low.float()))


@COMPILERS
def test_autocast_inside_the_model(rt: GraphRuntime, at_key: Run, compiler: str) -> None:
    model = CastInside().eval()
    compiled = compiled_with(rt, model, fullgraph=True, compiler=compiler)
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, torch.randn(4, 6))
    for mode in BOTH * 2:
        x = torch.randn(4, 6)
        got = at_key(compiled, mode, 4, x)
        assert [y.dtype for y in got] == [torch.bfloat16, torch.float32]
        with torch.no_grad():
            agrees(got, model(x))
    kinds = [kind for _, kind, _ in reported_regions(rt)]
    assert kinds == ["eager", "captured", "eager", "captured"], "the pairs stay in one captured region"
    assert {(c.captured, c.replayed) for c in rt.counts().values()} == {(1, 3)}


# -- grad mode


@COMPILERS
def test_under_grad_it_compiles_never_captures_and_gradients_are_right(
    rt: GraphRuntime, tally: Run, at_key: Run, compiler: str
) -> None:
    model = Plain()
    eager = copy.deepcopy(model)
    compiled = compiled_with(rt, model, compiler=compiler, lazy_capture=True)
    x, eagers = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        eagers.copy_(x)
    for run, given in ((compiled, x), (eager, eagers)) * 2:
        with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
            run(given).square().sum().backward()
    agrees([x.grad, *(p.grad for p in model.parameters())], [eagers.grad, *(p.grad for p in eager.parameters())])
    assert rt.counts() == {}
    agrees(at_key(compiled, "FULL", 4, x.detach()), model(x).detach())
    assert tally(rt, "FULL") == {("g1.full", 4): (1, 1)}


def test_grad_mode_without_anything_that_requires_it_is_captured(rt: GraphRuntime, tally: Run) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2

    compiled = compiled_with(rt, model)
    assert torch.is_grad_enabled()
    with gp.set_forward_context(runtime_mode=FULL, batch_descriptor=BatchDescriptor(4)):
        with rt.capturing():
            compiled(torch.randn(4, 6))
        x = torch.randn(4, 6)
        agrees(compiled(x), model(x))
    assert tally(rt, "FULL") == {("g0.full", 4): (1, 2)}


class GradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x).relu()
        with torch.set_grad_enabled(x.shape[1] > 3):
            x = x * 2
        return self.head(x)


@COMPILERS
def test_set_grad_enabled_inside_the_model(rt: GraphRuntime, at_key: Run, tally: Run, compiler: str) -> None:
    model = GradInside()
    eager = copy.deepcopy(model)
    compiled = compiled_with(rt, model, compiler=compiler)
    x = torch.randn(4, 6)
    for run in (compiled, eager):
        run(x).square().sum().backward()
    assert model.frozen.weight.grad is None
    agrees(model.head.weight.grad, eager.head.weight.grad)
    assert rt.counts() == {}
    with rt.capturing():
        for mode in BOTH:
            at_key(compiled, mode, 4, x)
    for mode, region in (("FULL", "full"), ("PIECEWISE", "r0")):
        got = at_key(compiled, mode, 4, x + 1)
        agrees(got, eager(x + 1).detach())
        assert not got.requires_grad
        assert torch.is_grad_enabled()
        assert tally(rt, mode) == {(f"g1.{region}", 4): (1, 2)}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_results_are_of_the_kind_that_eagers_are(rt: GraphRuntime, at_key: Run, around: Callable[[], Any]) -> None:
    model = Attended()
    compiled = compiled_with(rt, model)
    with around():
        with rt.capturing():
            for mode in BOTH:
                at_key(compiled, mode, 4, torch.randn(4, 6))
        for mode in BOTH:
            x = torch.randn(4, 6)
            got, want = at_key(compiled, mode, 4, x), model(x)
            agrees(got, want)
            assert (got.is_inference(), got.requires_grad) == (want.is_inference(), want.requires_grad)
    assert {(c.captured, c.replayed) for c in rt.counts().values()} == {(1, 2)}


def test_inference_mode_after_no_grad_keeps_both_right(rt: GraphRuntime, at_key: Run) -> None:
    model = Attended()
    compiled = compiled_with(rt, model)
    with rt.capturing():
        for around in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
            for mode in BOTH:
                with around():
                    x = torch.randn(4, 6)
                    got = at_key(compiled, mode, 4, x)
                agrees(got.clone(), model(x.clone()).detach())
    assert rt.stats().callables <= 2
    assert rt.stats().captured <= 2 * sum(map(regions_of, BOTH))


# Transforms of ``torch.func`` and forward-mode AD around what is compiled: right, or refused by name; never frozen.


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
