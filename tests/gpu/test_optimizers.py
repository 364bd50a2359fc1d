"""Optimizers' steps on real graphs: capturable and not, foreach, fused, new gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import graphpass as gp
from tests.optimizer_events import parameters, state_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]

STEPS = 8
KINDS = [
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9}, id="SGD"),
    *(pytest.param(kind, {"capturable": True}, id=kind.__name__) for kind in (optim.Adam, optim.AdamW, optim.Adadelta,
        optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD)),
    pytest.param(optim.Adagrad, {}, id="Adagrad"),
]  # fmt: skip


def weights() -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [nn.Parameter(torch.randn(4, 3, generator=generator, device="cuda")) for _ in range(3)]


def trained(step: Callable[[], Any], optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and state after several steps with new gradient tensors."""
    generator = torch.Generator("cuda").manual_seed(2)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for p in parameters(optimizer):
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
        step()
    return [tensor.cpu() for tensor in state_of(optimizer)]


def agrees(make: Callable[[], optim.Optimizer], compiler: str) -> tuple[int, int]:
    """Compare with the optimizer and the plain backend; (graphs captured, calls replayed)."""
    eager, plain, ours = make(), make(), make()
    by_eager = trained(eager.step, eager)
    torch.compiler.reset()
    expected = trained(torch.compile(plain.step, backend=compiler), plain)
    torch.compiler.reset()
    step = torch.compile(ours.step, backend="cgpass", options={"compiler": compiler})
    found = trained(step, ours)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, by_eager, rtol=1e-4, atol=1e-4)
    counts = gp.runtime_of(step).counts().values()
    return sum(c.captured for c in counts), sum(c.replayed for c in counts)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_each_optimizer_replays_and_agrees(kind: Any, settings: dict[str, Any], foreach: bool, compiler: str) -> None:
    captured, replayed = agrees(lambda: kind(weights(), **settings, foreach=foreach), compiler)
    assert captured == 1
    assert replayed >= STEPS - 2


@pytest.mark.parametrize(("kind", "settings"), [KINDS[0], KINDS[2]])
def test_inductor(kind: Any, settings: dict[str, Any]) -> None:
    assert agrees(lambda: kind(weights(), **settings), "inductor")[0] == 1


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.SGD])
def test_a_fused_optimizer_runs_as_it_is(kind: Any) -> None:
    eager, ours = kind(weights(), lr=0.1, fused=True), kind(weights(), lr=0.1, fused=True)
    torch.compiler.reset()
    step = torch.compile(ours.step, backend="cgpass", options={"compiler": "eager"})
    torch.testing.assert_close(trained(step, ours), trained(eager.step, eager), rtol=0, atol=0)


def test_state_on_the_cpu_runs_and_agrees() -> None:
    """Not capturable, and its first steps are not compiled: the count of steps is on the CPU."""
    optimizers = optim.Adam(weights()), optim.Adam(weights())
    for optimizer in optimizers:
        trained(optimizer.step, optimizer)
    torch.compiler.reset()
    step = torch.compile(optimizers[0].step, backend="cgpass", options={"compiler": "eager"})
    found, expected = trained(step, optimizers[0]), trained(optimizers[1].step, optimizers[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
