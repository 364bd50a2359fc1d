"""A model with an op in its middle that splits it, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import CUDAGraphMode
from tests.unit.compiled import Compiled

ATTEND = "cgpasstest::attend"
FULL = CUDAGraphMode.FULL
Make = Callable[..., Compiled]
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


def attended(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.cgpasstest.attend(x + 1) * 2
    return result


def expected_counts(mode: str, size: int, counts: tuple[int, int], graph: str = "g0") -> dict[Any, tuple[int, int]]:
    """The tally of one graph with a splitting op in its middle: the whole, or the regions before and after it."""
    regions = ["full"] if mode == "FULL" else ["r0", "r2"]
    return {(f"{graph}.{region}", size): counts for region in regions}


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.cgpasstest.attend(self.first(x))).relu()
