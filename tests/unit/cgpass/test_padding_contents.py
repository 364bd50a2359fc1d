"""The integers that the run-time check of padding writes: an index that the model computes from them stays valid."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphpass as gp


class Widths(nn.Module):
    """Looks up the width of boxes, of which all integers are smaller than the table only as long as corners match."""

    def __init__(self, *, in_two_inputs: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.in_two_inputs = in_two_inputs

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        width = right - left if self.in_two_inputs else left[:, 1] - left[:, 0]
        return self.table(width) + 1


@pytest.mark.parametrize("in_two_inputs", [True, False])
@pytest.mark.parametrize("smallest", [1, 3])
def test_an_index_of_two_integers_stays_valid(smallest: int, in_two_inputs: bool) -> None:
    torch.manual_seed(0)
    model = Widths(in_two_inputs=in_two_inputs).eval()
    fast = torch.compile(model, backend="cgpass", options={"compiler": "eager"})
    sizes = [8, 7, 8, 7, smallest, smallest + 1, smallest, 6, 5, 6, 5]
    with torch.no_grad():
        for size in sizes:
            left = torch.randint(100, 1000, (size,))
            right = left + torch.randint(0, 4, (size,))
            if not in_two_inputs:
                left = torch.stack([left, right], dim=1)
            torch.testing.assert_close(fast(left, right), model(left, right))
    runtime = gp.runtime_of(fast)
    figures = runtime.report().figures
    assert any(size.verdict == "proved" for record in figures.callables for size in record.sizes)
    assert any(key.padding for key in figures.keys)
