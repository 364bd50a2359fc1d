"""What padded rows do in graphpass's own ops, alone in an eager region and inside of a larger graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphpass import zero_padding
from graphpass.errors import ContextError
from graphpass.regions import Verdict
from graphpass.text.experts import EXPERT_LINEAR
from graphpass.text.paged.op import PAGED_ATTENTION
from tests.unit.padding.test_compose import Prover, verdicts

PROVED, UNPROVED = Verdict.PROVED, Verdict.UNPROVED
X = torch.randn(6, 4)


@pytest.mark.parametrize("splitting_ops", [(), ("graphpass::zero_padding",)])
def test_the_rows_that_a_context_marks_are_not_those_of_padding(splitting_ops: tuple[str, ...]) -> None:
    def zeroed(x: Tensor) -> Tensor:
        return zero_padding(x * 2) + 1

    def summed(x: Tensor) -> Tensor:
        return zero_padding(x * 2).sum(0)

    assert verdicts(Prover(splitting_ops).prove(zeroed, X, dims=(0,))) == {"x.0": PROVED}
    assert verdicts(Prover(splitting_ops).prove(summed, X, dims=(0,))) == {"x.0": UNPROVED}


@pytest.mark.parametrize("splitting_ops", [(), (PAGED_ATTENTION,)])
def test_paged_attention_mixes_rows_by_its_metadata_alone(splitting_ops: tuple[str, ...]) -> None:
    def attend(x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 2)
        out = torch.zeros_like(heads)
        torch.ops.graphpass.paged_attention(heads, heads * 2, heads * 3, out, 0, 1.0, -1)
        return out.flatten(1) + x

    def of_two_dims(x: Tensor) -> Tensor:
        return attend(x.flatten(0, 1)).view(x.shape)

    def sums(x: Tensor) -> Tensor:
        return attend(x).sum(0)

    def proved(model: Any, *inputs: Tensor, dims: tuple[int, ...] = (0,)) -> Any:
        prover = Prover(splitting_ops)
        with pytest.raises(ContextError):  # without metadata it cannot run
            prover.prove(model, *inputs, dims=dims)
        return prover.proofs[-1]

    proof = proved(attend, X)
    assert verdicts(proof) == {"x.0": PROVED}
    assert any("scratch slots" in assumption for assumption in proof.assumptions)
    # What was zero before the op wrote to it is not zero afterwards.
    assert verdicts(proved(sums, X)) == {"x.0": UNPROVED}
    two = proved(of_two_dims, torch.randn(3, 5, 4), dims=(0, 1))
    assert verdicts(two) == {"x.0": PROVED, "x.1": UNPROVED}


@pytest.mark.parametrize("splitting_ops", [(), (EXPERT_LINEAR,)])
def test_a_token_gets_its_own_experts(splitting_ops: tuple[str, ...]) -> None:
    linear, weight, bias = torch.ops.graphpass.expert_linear, torch.randn(3, 4, 4), torch.randn(3, 4)

    def routed(x: Tensor) -> Tensor:
        scores, chosen = (x @ weight[0, :, :3]).topk(2)
        inner = linear(x, chosen, weight, bias, False).flatten(0, 1).relu().view(-1, 2, 4)
        return (linear(inner, chosen, weight, None, True) * scores.unsqueeze(-1)).sum(1)

    def sums(x: Tensor) -> Tensor:
        return routed(x).sum(0)

    def sorted_experts(x: Tensor) -> Tensor:
        return linear(x, x[:, :2].long().sort(0).values, weight, None, False)

    def tokens_as_experts(x: Tensor) -> Tensor:
        return linear(
            torch.ones(2, 4), torch.ones(2, 2, dtype=torch.int64), x.unsqueeze(-1).expand(-1, -1, 4), None, True
        )

    prover = Prover(splitting_ops)
    assert verdicts(prover.prove(routed, X, dims=(0,))) == {"x.0": PROVED}
    for mixed in (sums, sorted_experts, tokens_as_experts):
        assert verdicts(prover.prove(mixed, X, dims=(0,))) == {"x.0": UNPROVED}, mixed.__name__
