"""Optimizers' steps on real graphs: capturable and not, foreach, fused, new gradients."""

from __future__ import annotations

from typing import Any

import pytest
from torch import optim

from tests.unit.cgpass.test_optimizers import STEPS, agrees, assert_equal, compiled, trained, weights

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]

KINDS = [
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9}, id="SGD"),
    *(pytest.param(kind, {"capturable": True}, id=kind.__name__) for kind in (optim.Adam, optim.AdamW, optim.Adadelta,
        optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD)),
    pytest.param(optim.Adagrad, {}, id="Adagrad"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_each_optimizer_replays_and_agrees(kind: Any, settings: dict[str, Any], foreach: bool, compiler: str) -> None:
    ran = agrees(lambda: kind(weights("cuda"), **settings, foreach=foreach), compiler, by_bits=True)
    assert ran.captured == 1
    assert ran.replayed >= STEPS - 2


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.SGD])
def test_a_fused_optimizer_runs_as_it_is(kind: Any) -> None:
    eager, ours = (kind(weights("cuda"), lr=0.1, fused=True) for _ in range(2))
    step = compiled(ours, "cgpass", compiler="eager")
    assert_equal(trained(step, ours), trained(eager.step, eager))
