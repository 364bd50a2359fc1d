"""Arguments and results of every form that torch.compile takes, nested tensors among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.cgpass.attended import Make
from tests.unit.compiled import agrees
from tests.unit.models import module


def test_a_written_parameter_that_is_assigned_stays_that_parameter(compiled: Make) -> None:
    def summed(self: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.total += x[rows][0]
        return x

    model: Any = module(summed, total=nn.Parameter(torch.zeros(6)))
    parameter, fast = model.total, compiled(model)
    for rows in ([0], [1, 0], [0, 1, 2], [1, 2, 0], [2, 2], [2, 1]):
        before, x = parameter.detach().clone(), torch.randn(3, 6)
        fast(x, torch.tensor(rows))
        assert model.total is parameter
        agrees(parameter.detach(), before + x[rows[0]])
    assert fast.rt.stats().replayed > 0


# Jagged tensors made inside the compiled function run eagerly, the rest of the graph replays.


OFFSETS = torch.tensor([0, 1, 3])


def jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def written(x: torch.Tensor, offsets: torch.Tensor) -> Any:
    y = x.tanh()
    torch.nested.nested_tensor_from_jagged(y, offsets).mul_(2)
    return y.exp()


JAGGED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "values": lambda x, offsets: (jagged(x.tanh()) * 2).values().sum(0),
    "padded": lambda x, _: F.linear(jagged(x), x.new_ones(5, 4)).to_padded_tensor(0.0).exp(),
    "from_offsets": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets).values() * 3,
    "written": written,
    "result": lambda x, offsets: torch.nested.nested_tensor_from_jagged(x.tanh(), offsets),
    "result_beside_another": lambda x, offsets: (jagged(x.tanh()) * 2, x.exp() + 1),
}


def parts_of(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [tensor.values() if tensor.layout is torch.jagged else tensor for tensor in parts]


@pytest.mark.parametrize(
    "options",
    [{"compiler": "eager"}, {"compiler": "aot_eager"}, {"compiler": "aot_eager", "mode": "PIECEWISE"}],
    ids=["eager", "aot_eager", "PIECEWISE"],
)
@pytest.mark.parametrize("name", JAGGED)
def test_a_jagged_tensor_inside(compiled: Make, name: str, options: dict[str, Any]) -> None:
    fast = compiled(JAGGED[name], **options)
    given = [torch.randn(3, 4) for _ in range(5)]
    found = [parts_of(fast(x, OFFSETS)) for x in given]
    agrees(found, [parts_of(JAGGED[name](x, OFFSETS)) for x in given])  # a result is not overwritten by a later one
    assert "nested tensor" in str(fast.rt.report())
