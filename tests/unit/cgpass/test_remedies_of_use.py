"""What a report says of how a model is used, by the names that the user has; each remedy is followed."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphpass as gp
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


def test_the_eager_compiler_is_left_out_before_anything_else(compiled: Make) -> None:
    centred, calls = lambda x: x - x.mean(0), [(torch.randn(n, 6),) for n in (5, 6, 7)]
    fast = compiled(centred, dynamic=True)
    fast.serve(calls)
    assert fast.problem("is not padded").remedy.startswith("leave out compiler='eager', which makes no padding")
    fast = compiled(centred, dynamic=True, compiler="aot_eager")
    assert fast.serve(calls, passes=2) == 3
    assert fast.problems == ()


def spread(cloud: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(cloud @ cloud.mT).sum((1, 2)) + cloud.amax((1, 2))


def test_an_operator_that_no_rule_knows_is_named_before_those_that_are_repaired(compiled: Make) -> None:
    fast = compiled(spread, dynamic=True, compiler="aot_eager")
    fast.serve([(torch.randn(2, n, 3),) for n in (5, 6, 7)])
    problem = fast.problem("cloud[1] is not padded")
    assert "aten.linalg_matrix_exp (it has no padding rule)" in problem.what
    assert "graphpass.rows_apart" in problem.remedy


def attended(scores: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~real[:, None], -torch.inf).softmax(-1)


def test_a_boolean_argument_is_named_as_the_mask_that_it_may_be(compiled: Make) -> None:
    calls = [(torch.randn(2, n, n + 1), torch.arange(n + 1) < torch.tensor([[n], [2]])) for n in (5, 6, 7)]
    fast = compiled(attended, dynamic=True)
    fast.serve(calls)
    (problem,) = [found for found in fast.problems if "scores[2] is not padded" in found.what]
    assert "under real, declared with padding={'real': False} (True where that hides)" in problem.remedy
    fast = compiled(attended, dynamic=True, padding={"real": False})
    assert fast.serve(calls, passes=2) == 3
    assert fast.padded_sizes["scores[2]"]


def test_a_span_of_a_mode_names_its_first_operators(compiled: Make) -> None:
    names = ["sin", "cos", "tan", "exp", "log", "sqrt", "tanh", "sigmoid", "relu", "abs", "neg", "round", "floor"]

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for name in names:
                x = getattr(torch, name)(x)
            return x + 1

    listed_ops = [f"aten::{name}" for name in names]
    fast = compiled(model, fullgraph=True, splitting_ops=listed_ops)
    fast(torch.rand(4, 6))
    reasons = [str(reason) for record in fast.rt.callables() for region in record.regions for reason in region.reasons]
    (pair,) = [reason for reason in reasons if "inside" in reason]
    assert "torch.sin, torch.cos, torch.tan, torch.exp and 9 more inside" in pair


class AfterABreak(nn.Module):
    """The call at the break returns several tensors, and the rest of the line takes them off Dynamo's stack."""

    def apart(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch._dynamo.graph_break()
        return x, x + 1, x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.apart(x.sin())
        return parts[2].mean(0) + parts[0].sum(0)


def test_a_value_at_a_graph_break_has_a_name(compiled: Make) -> None:
    fast = compiled(AfterABreak(), dynamic=True)
    fast.serve([(torch.randn(n, 6),) for n in (3, 4, 5)])
    assert fast.problem("is not padded").what.startswith("value_at_break_0[2][0] is not padded")
    assert "___stack" not in str(fast.rt.report())


CALLS = 50


def embedded(forward: Callable[..., Any]) -> nn.Module:
    return module(forward, words=nn.Embedding(50, 6), layer=nn.Linear(6, 6)).eval()


def traffic(most: int, calls: int = CALLS) -> list[tuple[torch.Tensor]]:
    sizes, drawn = random.Random(0), torch.Generator().manual_seed(0)
    shapes = [(sizes.randint(2, 6), sizes.randint(2, most)) for _ in range(calls)]
    return [(torch.randint(50, shape, generator=drawn),) for shape in shapes]


def ladder_in(remedy: str) -> dict[str, list[int]]:
    found = re.search(r"capture_sizes=(\{.*?\})", remedy)
    assert found is not None, remedy
    ladder: dict[str, list[int]] = ast.literal_eval(found[1])
    return ladder


def test_a_suggested_ladder_raises_replays(compiled: Make) -> None:
    """Each call pads the batch, and mixes the second dimension in a way that no proof covers."""
    model, calls = embedded(lambda self, ids: self.layer(self.words(ids).mean(1))), traffic(13)
    fast = compiled(model, dynamic=True)
    before = fast.serve(calls)
    ladder = ladder_in(fast.problem("were the first of their sizes").remedy)
    assert f"capture_sizes={ladder}" in str(fast.rt.report()), "the same is suggested for this traffic"
    fast = compiled(model, dynamic=True, capture_sizes=ladder)
    assert fast.serve(calls) > before + 10, "also without a capture ahead"
    fast = compiled(model, dynamic=True, capture_sizes=ladder)
    with torch.no_grad():
        gp.precapture(fast.fast, *calls[0])
    assert fast.serve(calls) == len(calls)
    assert not any("first of their sizes" in problem.what for problem in fast.problems)
