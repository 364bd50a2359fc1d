"""A model with an op in its middle that splits it, and short ways to compile it and to say what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import CUDAGraphMode, GraphRuntime
from tests.observed import reported_regions

ATTEND = "cgpasstest::attend"
FULL = CUDAGraphMode.FULL
Run = Callable[..., Any]
BOTH = ("PIECEWISE", "FULL")
MODES = pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


def compiled_with(
    rt: GraphRuntime, model: Callable[..., Any], *, dynamic: bool | None = True, fullgraph: bool = False, **options: Any
) -> Any:
    """``torch.compile`` of ``model`` for ``rt``; dynamic unless said otherwise."""
    given = {"compiler": "eager", "splitting_ops": [ATTEND], "runtime": rt, **options}
    return torch.compile(model, backend="cgpass", dynamic=dynamic, fullgraph=fullgraph, options=given)


def endings(rt: GraphRuntime) -> dict[str, str]:
    """{callable: why Dynamo ended its graph} for those that a graph break ended."""
    return {row[0].removesuffix(".end"): row[-1] for row in reported_regions(rt) if row[0].endswith(".end")}


def regions_of(mode: str) -> int:
    """Graphs a key of a model with one splitting op in its middle."""
    return 1 if mode == "FULL" else 2


def agrees(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want)


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
