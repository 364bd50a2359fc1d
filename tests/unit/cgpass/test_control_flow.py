"""Branches and loops that the data decide, and lists read off a tensor: right, or refused by name; never frozen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import graphpass as gp
from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime
from graphpass.errors import CaptureError
from tests.observed import reported_regions

MODES = pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL"])
SIGNS = (1, -1, -1, 1, 1, -1)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: self.first(t).tanh(), lambda t: self.second(t) * 3, (x.relu() + x,))
        return self.last(y).tanh()


class BranchOnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda t: t * 2, lambda t: t - 1, (x + 1,)).relu()


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def goes_on(t: torch.Tensor) -> torch.Tensor:
            return t.abs().sum() < 90

        def body(t: torch.Tensor) -> tuple[torch.Tensor]:
            return (t * 2,)

        (y,) = torch._higher_order_ops.while_loop(goes_on, body, (x.relu() + 0.5,))
        return y.tanh() + 1


def a_list_of_numbers(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + sum(y[:, 0].tolist())


def a_list_of_integers(x: torch.Tensor) -> torch.Tensor:
    first = x[:, 0].sign().long().tolist()
    return x.relu() * first[0] + 1


def compiled_for(rt: GraphRuntime, model: Callable[..., Any], *, fullgraph: bool, compiler: str = "aot_eager") -> Any:
    options = {"compiler": compiler, "runtime": rt, "dispatch": "auto"}
    return torch.compile(model, backend="cgpass", dynamic=True, fullgraph=fullgraph, options=options)


def directed(mode: str | None) -> contextlib.AbstractContextManager[Any]:
    if mode is None:
        return contextlib.nullcontext()
    return gp.set_forward_context(runtime_mode=CUDAGraphMode[mode], batch_descriptor=BatchDescriptor(4))


def rows(sign: int) -> torch.Tensor:
    return sign * (torch.rand(4, 6) + 0.5)


def eager_reasons(rt: GraphRuntime) -> str:
    return " ".join(why for _, _, why in reported_regions(rt))


@pytest.mark.parametrize("model", [Branch(), BranchOnSize(), Loop()], ids=lambda model: type(model).__name__)
@MODES
@pytest.mark.parametrize(
    "compiler", ["aot_eager", *(pytest.param(name, marks=pytest.mark.soak) for name in ("eager", "inductor"))]
)
def test_a_branch_runs_between_graphs(model: nn.Module, mode: str | None, compiler: str, rt: GraphRuntime) -> None:
    model = model.eval().requires_grad_(False)
    compiled = compiled_for(rt, model, fullgraph=True, compiler=compiler)
    with torch.no_grad():
        if mode == "FULL":
            with rt.capturing(), directed(mode), pytest.raises(CaptureError, match="as a whole") as refused:
                compiled(rows(1))
            assert "control flow" in refused.value.found
            return
        for number, sign in enumerate(SIGNS):
            scope = rt.capturing() if mode == "PIECEWISE" and not number else contextlib.nullcontext()
            x = rows(sign)
            with directed(mode), scope:
                torch.testing.assert_close(compiled(x), model(x))
    assert "control flow" in eager_reasons(rt)
    if mode != "NONE":
        assert rt.stats().captured == 2, "what lies before the branch, and what lies behind it"
        assert rt.stats().replayed >= 2 * (len(SIGNS) - 1)


@MODES
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("model", [a_list_of_numbers, a_list_of_integers])
def test_a_list_read_off_a_tensor(
    model: Callable[..., Any], fullgraph: bool, mode: str | None, rt: GraphRuntime
) -> None:
    compiled = compiled_for(rt, model, fullgraph=fullgraph)
    if fullgraph and model is a_list_of_numbers:
        with torch.no_grad(), directed(mode), pytest.raises(Unsupported, match="tolist"):
            compiled(rows(1))
        return
    num_refused = 0
    with torch.no_grad():
        for number, sign in enumerate(SIGNS):
            x = rows(sign)
            scope = rt.capturing() if mode in ("PIECEWISE", "FULL") and not number else contextlib.nullcontext()
            with directed(mode), scope:
                try:
                    got = compiled(x)
                except CaptureError:
                    num_refused += 1
                else:
                    torch.testing.assert_close(got, model(x))
    if mode in (None, "NONE"):
        assert num_refused == 0
    elif fullgraph:
        # The list is read between graphs, which no FULL graph can do.
        assert num_refused == (len(SIGNS) if mode == "FULL" else 0)
    else:
        assert num_refused <= sum(sign != SIGNS[0] for sign in SIGNS) or model is a_list_of_numbers
