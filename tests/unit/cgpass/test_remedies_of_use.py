"""What a report says of how a model is used: numbers, views, adapters and copies; each remedy is followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.cgpass.attended import Make
from tests.unit.cgpass.test_remedies import graphed_beside
from tests.unit.compiled import Compiled
from tests.unit.models import module


def test_numbers_that_never_change_delay_no_graph(compiled: Make) -> None:
    """A list of ints is numbers under dynamic=True."""
    fast = compiled(lambda x, shape: x.view(x.shape[0], *shape) * 2, dynamic=True)
    calls = [(torch.randn(n, 12), [3, 4]) for n in (5, 6, 7)]
    assert fast.serve(calls, passes=3) == len(calls)
    assert not [problem for problem in fast.problems if problem.kind == "no graph"]
    fast.serve([(torch.randn(5, 12), [4, 3])])
    assert fast.problem("a Python number is part of the key").times == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_whose_offset_is_a_size_is_padded(compiled: Make, dynamic: bool | None) -> None:
    fast = compiled(lambda x: x * 2, dynamic=dynamic)
    fast.serve([(torch.randn(n, 9)[1:],) for n in (6, 7, 8)], passes=3)
    assert fast.is_padded
    assert fast.problems == ()
    graphed = graphed_beside(nn.Linear(9, 9).eval(), dynamic_dims={"input": 0}, capture_sizes=[2, 4, 8])
    graphed.fast.capture(torch.randn(6, 9)[1:])
    assert graphed.serve([(torch.randn(6, 9)[1:],), (torch.randn(7, 9)[2:],)]) == 2
    assert graphed.problems == ()


def adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Adapters beside a layer, of which a list names the active ones, as in PEFT."""
    return self.base(x) + sum(self.adapters[name](x) for name in self.active)  # type: ignore[no-any-return]


def test_after_another_adapter_was_set_its_graphs_are_captured_ahead() -> None:
    adapters = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in "ab"})
    model: Any = module(adapted, base=nn.Linear(6, 6), active=["a"], adapters=adapters).eval()
    x = torch.randn(3, 6)

    def switched(*, follows: bool) -> Compiled:
        model.active = ["a"]
        beside = graphed_beside(model, dynamic_dims={"x": 0}, capture_sizes=[4, 8])
        beside.fast.capture(x)
        model.active = ["b"]
        if follows:
            beside.fast.capture(x)
        assert beside.serve([3, 5, 4]) == 3
        return beside

    found = switched(follows=False).problem("traced its function once more")
    assert "active[0] == 'a'" in found.what
    assert "capture again with each value before it serves (capture()" in found.remedy
    assert "inference_mode" not in found.remedy
    assert switched(follows=True).problems == ()
