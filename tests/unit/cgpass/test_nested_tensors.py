"""Jagged tensors made inside the compiled function run eagerly, the rest of the graph replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp

OFFSETS = torch.tensor([0, 1, 3])


def jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def values(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    return (jagged(x.tanh()) * 2).values().sum(0)


def padded(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    return torch.nn.functional.linear(jagged(x), x.new_ones(5, 4)).to_padded_tensor(0.0).exp()


def from_offsets(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(x.tanh(), offsets).values() * 3


def written(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    y = x.tanh()
    torch.nested.nested_tensor_from_jagged(y, offsets).mul_(2)
    return y.exp()


def result(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(x.tanh(), offsets)


def result_beside_another(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    return jagged(x.tanh()) * 2, x.exp() + 1


def plain(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [tensor.values() if tensor.layout is torch.jagged else tensor for tensor in parts]


@pytest.mark.parametrize(
    "options",
    [{"compiler": "eager"}, {"compiler": "aot_eager"}, {"compiler": "aot_eager", "mode": "PIECEWISE"}],
    ids=["eager", "aot_eager", "PIECEWISE"],
)
@pytest.mark.parametrize(
    "function", [values, padded, from_offsets, written, result, result_beside_another], ids=lambda f: f.__name__
)
def test_a_jagged_tensor_inside(function: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend="cgpass", options=cgpass.options(**options))
    expected, found = [], []
    with torch.no_grad():
        for step in range(5):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            expected.append(plain(function(x, OFFSETS)))
            found.append(plain(compiled(x, OFFSETS)))
    torch.testing.assert_close(found, expected)  # after all calls: a result is not overwritten by a later one
    assert "nested tensor" in str(gp.runtime_of(compiled).report())
