"""Padding that is made for attention that a model writes out."""

from __future__ import annotations

import pytest
import torch

import graphpass as gp


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal alone", "and a mask"])
def test_attention_that_a_model_normalises_again(is_masked: bool) -> None:
    """Weights of a softmax under a causal mask, divided by their sum over keys; results are pooled by the mask."""

    def model(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        scores = (x @ x.mT).masked_fill(~ones.tril(), -torch.inf)
        if is_masked:
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights = scores.softmax(-1)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ x
        return (mixed * visible[..., None]).sum(1) / visible.sum(1, keepdim=True) if is_masked else mixed

    torch.compiler.reset()
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager", "progress": False})
    generator = torch.Generator().manual_seed(0)
    sizes = [(rows, length) for length in (4, 7, 5, 9, 6, 11, 13) for rows in (2, 3, 5)]
    with torch.no_grad():
        for rows, length in sizes:
            x = torch.randn(rows, length, 8, generator=generator)
            visible = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
            torch.testing.assert_close(fast(x, visible), model(x, visible))
    assert gp.runtime_of(fast).stats().replayed == 6, "each size is new, so a replay is a padded one"
