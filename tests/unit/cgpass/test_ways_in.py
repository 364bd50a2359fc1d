"""Ways in which torch calls the backend beside plain calls: marks of sizes, aot_compile, compiled autograd, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import cgpass
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import agrees


def rowwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu() + y.sum(0)


def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.T).sum(1) + x[:, 0]


def transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.t().cos() + y.sum()


@pytest.mark.parametrize("model", [rowwise, products, transposed])
def test_sizes_marked_as_unbacked_are_exact(compiled: Make, model: Callable[..., Any]) -> None:
    fast = compiled(model)
    for size in (3, 5, 3, 5, 3, 5, 1, 7):
        x, y = torch.randn(size, 6), torch.randn(size + 1, 6)
        for tensor in (x, y):
            mark_unbacked(tensor, 0)
        agrees(fast(x, y), model(x, y))
    assert fast.rt.stats().callables == 1
    assert fast.uses("captured") == {(1,)}
    assert fast.rt.stats().replayed >= 4


def test_a_size_that_is_specialized_on_has_a_graph_of_its_own() -> None:
    fast: Any = torch.compile(lambda x: x * 2 + 1, backend="cgpass", options={"compiler": "eager"})
    for size in (8, 5, 8, 5, 8, 3, 8):
        x = torch.randn(size, 6)
        torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda size: size == 8])
        agrees(fast(x), x * 2 + 1)


def test_a_function_compiled_ahead_replays_in_its_process(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    with torch.no_grad():
        fast: Any = torch.compile(lambda x: x * 2 + 1, backend="cgpass", fullgraph=True, options={"compiler": "eager"})
        if not hasattr(fast, "aot_compile"):
            pytest.skip("this torch compiles no functions ahead")
        ahead = fast.aot_compile(((x,), {}))
        for _ in range(4):
            x = torch.randn(4, 6)
            agrees(ahead(x), x * 2 + 1)
        with pytest.raises(CaptureError, match="warm_start"):
            ahead.save_compiled_function(str(tmp_path / "function"))


def test_the_backend_called_by_hand() -> None:
    graphs: list[tuple[torch.fx.GraphModule, list[torch.Tensor]]] = []

    def keep(graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append((graph_module, inputs))
        return graph_module.forward

    x = torch.randn(4, 6)
    with torch.no_grad():
        torch.compile(lambda x: x * 2 + 1, backend=keep)(x)
        (given,) = graphs
        made = [cgpass.backend(*given, options={"compiler": "eager"}) for _ in range(2)]
        for _ in range(4):
            x = torch.randn(4, 6)
            for one in made:
                (got,) = one(x)
                agrees(got, x * 2 + 1)
    assert made[0].runtime is not made[1].runtime
    assert [one.runtime.stats().replayed for one in made] == [3, 3]
