"""Ways in which torch calls the backend beside plain calls: marks of sizes, aot_compile, compiled autograd, by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.decorators import mark_unbacked

import cgpass
from graphpass import GraphRuntime, runtime_of
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import agrees


def transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.t().cos() + y.sum()


def test_sizes_marked_as_unbacked_are_exact(compiled: Make) -> None:
    fast = compiled(transposed)
    for size in (3, 5, 3, 5, 3, 5, 1, 7):
        x, y = torch.randn(size, 6), torch.randn(size + 1, 6)
        for tensor in (x, y):
            mark_unbacked(tensor, 0)
        agrees(fast(x, y), transposed(x, y))
    assert fast.rt.stats().callables == 1
    assert fast.uses("captured") == {(1,)}
    assert fast.rt.stats().replayed >= 4


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
        assert runtime_of(ahead).stats().replayed == 3
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
    assert runtime_of(made[0]) is not runtime_of(made[1])
    assert [runtime_of(one).stats().replayed for one in made] == [3, 3]
    trained = cgpass.backend(given[0], [x.requires_grad_()], options={"compiler": "eager"})
    agrees(trained(x)[0].detach(), (x * 2 + 1).detach())
    (use,) = runtime_of(trained).report().to_dict()["replays"]["without_graph"]
    assert (use["reason"], use["calls"]) == ("compiled under autograd: never captured", 1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_autograd_compiles_with_it(rt: GraphRuntime, compiler: str) -> None:
    """It passes a list of tensors, and an empty tensor for each size, which no graph serves."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    backwards: Any = torch.compile(
        backend="cgpass", options=cgpass.options(compiler=compiler, runtime=rt, dispatch="auto")
    )
    sizes = (4, 4) if compiler == "inductor" else (4, 4, 5, 4, 5)
    for size in sizes:
        x = torch.randn(size, 6)
        model(x).square().sum().backward()
        expected = gradients(model)
        model.zero_grad()
        with compiled_autograd._enable(backwards):
            model(x).square().sum().backward()
        for got, wanted in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(got, wanted)
        model.zero_grad()
    counts: Counter[str] = Counter()
    for row in rt.report().to_dict()["replays"]["without_graph"]:
        counts[row["reason"]] += row["calls"]
    assert counts == {"an input has no elements": len(sizes)}
    assert (rt.stats().captured, rt.stats().replayed) == (0, 0)
