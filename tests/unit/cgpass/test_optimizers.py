"""``torch.compile(optimizer.step, backend="cgpass")``: Dynamo's graph holds parameters and state as attributes.

Every test compares with the optimizer itself, and those of options with the plain backend of the same compiler by bits:
on the CPU the decompositions of a compiled optimizer may round differently from the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim

import graphpass as gp
from graphpass.errors import OptionError, ShapeError

Event = Callable[[int, optim.Optimizer], None]
STEPS = 8
FLOATING = [
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, id="SGD-nesterov"),
    pytest.param(optim.Adam, {"lr": 0.01}, id="Adam"),
    pytest.param(optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}, id="Adam-amsgrad"),
    pytest.param(optim.AdamW, {"lr": 0.01}, id="AdamW"),
    pytest.param(optim.Adagrad, {}, id="Adagrad"),
    pytest.param(optim.RMSprop, {"momentum": 0.5, "centered": True}, id="RMSprop"),
    pytest.param(optim.ASGD, {}, id="ASGD"),
]


def nothing(number: int, optimizer: optim.Optimizer) -> None:
    """No event between the steps."""


def parameters(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Copies of the parameters and of the optimizer's tensors."""
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone().cpu() for t in (*parameters(optimizer), *state)]


def weights(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(4, 3, generator=generator).to(device)) for _ in range(3)]


def trained(
    step: Callable[[], Any], optimizer: optim.Optimizer, event: Event = nothing, steps: int = STEPS
) -> list[list[torch.Tensor]]:
    """The state after each of several steps, each with new gradient tensors."""
    generator = torch.Generator().manual_seed(2)
    after = []
    for number in range(steps):
        event(number, optimizer)
        optimizer.zero_grad(set_to_none=True)
        for p in parameters(optimizer):
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        step()
        after.append(state_of(optimizer))
    return after


def compiled(optimizer: optim.Optimizer, backend: str, **options: Any) -> Callable[[], Any]:
    torch.compiler.reset()
    return torch.compile(optimizer.step, backend=backend, **({"options": options} if options else {}))


def assert_equal(found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=number: f"{n}: {m}")


class Seen(NamedTuple):
    """What a runtime reports while the optimizer lives; its graphs die with it."""

    captured: int
    replayed: int
    report: str


def seen(runtime: gp.GraphRuntime) -> Seen:
    counts = runtime.counts().values()
    return Seen(sum(c.captured for c in counts), sum(c.replayed for c in counts), repr(runtime.report().problems))


def agrees(
    make: Callable[[], optim.Optimizer],
    compiler: str = "eager",
    event: Event = nothing,
    *,
    by_bits: bool = False,
    **options: Any,
) -> Seen:
    """Compare steps under cgpass with eager ones, and by bits with plain ones."""
    eager, plain, ours = make(), make(), make()
    by_plain = trained(compiled(plain, compiler), plain, event) if by_bits else None
    fast = compiled(ours, "cgpass", compiler=compiler, **options)  # last, as the next compilation resets Dynamo
    found = trained(fast, ours, event)
    torch.testing.assert_close(found, trained(eager.step, eager, event), rtol=1e-4, atol=1e-4)
    if by_plain is not None:
        assert_equal(found, by_plain)
    return seen(gp.runtime_of(fast))


# -- all optimizers


@pytest.mark.parametrize(("kind", "settings"), FLOATING)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_each_optimizer_replays_and_agrees(kind: Any, settings: dict[str, Any], foreach: bool | None) -> None:
    ran = agrees(lambda: kind(weights(), **settings, foreach=foreach))
    first = 1 if settings.get("momentum") and kind is optim.SGD else 0  # creates its state with other code
    assert ran[:2] == (1, STEPS - 1 - first)


@pytest.mark.parametrize(("kind", "settings"), [(optim.Adam, {"fused": True}), (optim.Adafactor, {})])
def test_an_optimizer_that_dynamo_does_not_trace_runs_as_it_is(kind: Any, settings: dict[str, Any]) -> None:
    eager, ours = kind(weights(), **settings), kind(weights(), **settings)
    step = compiled(ours, "cgpass", compiler="eager")
    assert_equal(trained(step, ours), trained(eager.step, eager))
    with pytest.raises(OptionError, match="Dynamo compiled no graph of it"):
        gp.runtime_of(step)


# -- what changes between two steps


def lr_halves(number: int, optimizer: optim.Optimizer) -> None:
    if number in (3, 5):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5


def lr_is_refilled(number: int, optimizer: optim.Optimizer) -> None:
    if number in (3, 5):
        optimizer.param_groups[0]["lr"].mul_(0.5)


SAVED: dict[optim.Optimizer, dict[str, Any]] = {}


def state_is_loaded(number: int, optimizer: optim.Optimizer) -> None:
    if number == 2:
        SAVED[optimizer] = copy.deepcopy(optimizer.state_dict())
    if number == 5:
        optimizer.load_state_dict(SAVED.pop(optimizer))


def data_is_replaced(number: int, optimizer: optim.Optimizer) -> None:
    if number in (3, 5):
        for p in parameters(optimizer):
            p.data = p.data * 0.5


def parameter_is_bound_again(number: int, optimizer: optim.Optimizer) -> None:
    if number == 4:
        group = optimizer.param_groups[0]
        group["params"][0] = nn.Parameter(group["params"][0].detach() * 0.5)


def first_is_turned(number: int, optimizer: optim.Optimizer) -> None:
    if number == 4:
        p = parameters(optimizer)[0]
        p.data = p.data.t().contiguous().t()


@pytest.mark.parametrize(("kind", "settings"), [FLOATING[0], FLOATING[1], FLOATING[3], FLOATING[5]])
@pytest.mark.parametrize(
    ("event", "lr", "captured"),
    [
        pytest.param(lr_halves, float, None, id="lr"),
        pytest.param(lr_is_refilled, torch.tensor, 1, id="tensor-lr"),
        pytest.param(state_is_loaded, float, 2, id="state-loaded"),
        pytest.param(data_is_replaced, float, 3, id="data-replaced"),
        pytest.param(parameter_is_bound_again, float, 2, id="parameter-bound-again"),
    ],
)
def test_changes_between_steps(
    kind: Any, settings: dict[str, Any], event: Event, lr: Any, captured: int | None
) -> None:
    value = settings.get("lr", 0.01)
    ran = agrees(lambda: kind(weights(), **{**settings, "lr": lr(value)}), event=event)
    assert captured in (None, ran.captured)
    assert ran.captured
    assert ran.replayed
    assert event is not data_is_replaced or "self.param_groups[0]['params'][0]" in ran.report, "it is named"


def test_data_of_another_layout_runs_without_compiled_code() -> None:
    """Dynamo guards the identity of these tensors, which survives; compiled code would read the old strides."""
    ran = agrees(lambda: optim.SGD(weights(), lr=0.1), event=first_is_turned)
    assert ran[:2] == (1, 3)
    assert "without compiled code" in ran.report


def test_data_of_another_layout_is_refused_where_a_graph_is_asked_for() -> None:
    optimizer = optim.SGD(weights(), lr=0.1)
    step = compiled(optimizer, "cgpass", compiler="eager")
    trained(step, optimizer, steps=3)
    parameters(optimizer)[0].data = parameters(optimizer)[0].data.double()
    with (
        gp.set_forward_context(runtime_mode=gp.CUDAGraphMode.FULL, batch_descriptor=gp.BatchDescriptor(1)),
        pytest.raises(ShapeError, match=r"expected .*float32.* found .*float64"),
    ):
        step()


# -- modes and options


@pytest.mark.parametrize(
    "options",
    [{"compare": True}, {"mode": "PIECEWISE"}, {"lazy_capture": True, "compiler": "aot_eager"}],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert agrees(lambda: optim.AdamW(weights(), lr=0.01), by_bits=True, **options).captured == 1


def test_precapture_takes_the_one_step_of_its_example() -> None:
    optimizer = optim.SGD(weights(), lr=1.0)
    for p in parameters(optimizer):
        p.grad = torch.ones_like(p)
    step = compiled(optimizer, "cgpass", compiler="eager")
    before = state_of(optimizer)
    gp.precapture(step)
    torch.testing.assert_close(state_of(optimizer), [p - 1 for p in before])  # precapture runs its example once
    step()
    torch.testing.assert_close(state_of(optimizer), [p - 2 for p in before])
    assert seen(gp.runtime_of(step)).replayed


# -- whose tensors they are


def test_equal_optimizers_have_graphs_of_their_own() -> None:
    """One compiled function, whose graph is the same for both; their tensors are not."""

    def update(optimizer: optim.Optimizer) -> None:
        optimizer.step()

    runtime = gp.GraphRuntime()
    torch.compiler.reset()
    step = torch.compile(
        update, backend="cgpass", options={"compiler": "eager", "runtime": runtime, "dispatch": "auto"}
    )
    pairs = [(optim.Adam(weights(), lr=0.01), optim.Adam(weights(), lr=0.01)) for _ in range(2)]
    for number in range(4):
        for ours, eager in pairs:
            for p, q in zip(parameters(ours), parameters(eager), strict=True):
                p.grad = torch.full_like(p, float(number + 1))
                q.grad = p.grad.clone()
            step(ours)
            eager.step()
    for ours, eager in pairs:
        torch.testing.assert_close(state_of(ours), state_of(eager), rtol=1e-4, atol=1e-5)
    assert seen(runtime).captured == 2


MARKED: list[torch.Tensor] = []


def test_marked_tensors_of_a_function_are_undone_and_followed() -> None:
    """A tensor in a list, marked with a guard, is an attribute of the graph, too."""
    kept = torch.zeros(3)
    torch._dynamo.mark_static_address(kept, guard=True)
    MARKED[:] = [kept]

    def add(x: torch.Tensor) -> torch.Tensor:
        MARKED[0].add_(x)
        return MARKED[0] * 2

    torch.compiler.reset()
    step = torch.compile(add, backend="cgpass", options={"compiler": "eager"})
    expected = torch.zeros(3)
    for number in range(STEPS):
        if number == 5:
            kept.data = kept.data + 1
            expected += 1
        expected += number
        torch.testing.assert_close(step(torch.full((3,), float(number))), expected * 2, rtol=0, atol=0)
    assert torch.equal(kept, expected)
    assert seen(gp.runtime_of(step))[:2] == (2, STEPS - 1)
