"""What reports and errors call things: the names that the user has, and no more words than it takes."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.cgpass.attended import Make


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
