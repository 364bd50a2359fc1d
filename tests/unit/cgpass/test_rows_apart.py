"""Functions whose rows the user says are apart: padded, checked, and refused where they cannot be what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from graphpass.errors import OptionError, ShapeError
from tests.unit.cgpass.attended import Make

COMPILERS = pytest.mark.parametrize(
    "compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
RAGGED = (5, 7, 6, 5, 7, 6, 5)


def experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Sorts the rows by their expert, and puts them back."""
    order = chosen.argsort(stable=True)
    mixed = torch.bmm(x[order][:, None], weights[chosen[order]])[:, 0]
    return torch.empty_like(mixed).index_copy(0, order, mixed)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x.flip(1), dim=1).abs()


def both(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.cdist(x[:, None], x[:, None]).flatten(1) * factor


EXPERTS, SPECTRUM, BOTH = gp.rows_apart(experts), gp.rows_apart(spectrum), gp.rows_apart(both)
WEIGHTS = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0))

RIGHT: dict[str, Callable[..., Any]] = {
    "experts": lambda x: EXPERTS(x, WEIGHTS.to(x), x.argmax(1) % 3) + 1,
    "spectrum": lambda x: SPECTRUM(x) * 2,
    "an argument and a distance": lambda x: BOTH(x * 2, 2.0),
    "two padded arguments": lambda x: EXPERTS(SPECTRUM(x.repeat(1, 2))[:, :6], WEIGHTS, x.argmin(1) % 3),
}


@COMPILERS
@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_are_apart_are_padded(compiled: Make, name: str, compiler: str) -> None:
    fast = compiled(RIGHT[name], compiler=compiler, dynamic=True, dynamic_dims={"x": 0})
    fast.serve(RAGGED)
    assert not any("no longer padded" in problem.what for problem in fast.problems)
    assert fast.padded_sizes["num_tokens" if "num_tokens" in fast.padded_sizes else "x[0]"]
    assert fast.is_padded


@pytest.mark.parametrize("function", [SPECTRUM, gp.rows_apart(lambda x: x.sum(1))], ids=["kept", "summed"])
def test_a_size_along_another_dimension_is_exact(compiled: Make, function: Callable[..., Any]) -> None:
    fast = compiled(lambda x: function(x) * 2, make=lambda size: (torch.randn(3, size),), dynamic_dims={"x": 1})
    fast.serve(RAGGED)
    assert "may mix the padded dimension 1" in fast.problem("is not padded").what
    assert not fast.is_padded


@pytest.mark.parametrize("dims", [(), (-1,), (0.5,), (True,)])
def test_dims_that_are_no_dimensions(dims: Any) -> None:
    with pytest.raises(OptionError, match="no dimensions"):
        gp.rows_apart(spectrum, dims)


def test_dims_that_no_argument_has() -> None:
    with pytest.raises(ShapeError, match="no argument with one of its dims"):
        gp.rows_apart(lambda x: x * 2, (2,))(torch.randn(3, 4))


def test_what_cannot_be_one_operator() -> None:
    with pytest.raises(OptionError, match="weights"):
        gp.rows_apart(nn.Linear(3, 3))
    with pytest.raises(OptionError, match="cannot make an operator"):
        gp.rows_apart(lambda *args: args[0])
