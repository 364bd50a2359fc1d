"""Each structure goes through the compiler once; certain sizes go through it once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.compile import once
from graphpass.compile.compilers import Compiler

cut = torch.ops.compiletest.cut


class Layers(torch.nn.Module):
    """A decoder as compilers see it: before the first cut, between two, and after the last."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + cut(torch.relu(layer(x)))
        return x * 0.5


class Compilations(list[list[Any]]):
    """The sizes that each compilation was given, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[int] = Counter()
        """How often each artifact ran, by the number of its compilation."""

    def compile(self, graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        number = len(self)
        self.append([e for e in examples if isinstance(e, (int, torch.SymInt))])

        def run(*args: Any) -> Any:
            self.ran[number] += 1
            return graph_module(*args)

        return run


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """A compiler that runs graphs as they are and keeps count."""
    kept = Compilations()
    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(kept.compile, False, False))
    return kept


@pytest.mark.parametrize("num_layers", [24, pytest.param(240, marks=pytest.mark.soak)])
def test_a_decoder_is_three_artifacts_however_deep(num_layers: int, compiled_at_cuts: Any, rt: gp.GraphRuntime) -> None:
    model = Layers(num_layers).eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled_at_cuts(model, dynamic=True)(x), model(x))
    kinds = Counter(region.kind for region in rt.callables()[0].regions)
    assert kinds == {"captured": num_layers + 1, "eager": num_layers}
    assert rt.compiled() == 3
    assert all(seconds > 0 for seconds in (rt.callables()[0].seconds.key, rt.callables()[0].seconds.compile))


def test_graphs_of_one_runtime_share(compiled_at_cuts: Any, rt: gp.GraphRuntime) -> None:
    """Size 1 is a graph of its own, with artifacts of its own; a second model of the class needs none."""
    first, second = Layers(2).eval(), Layers(2).eval()
    with torch.no_grad():
        compiled = compiled_at_cuts(first, dynamic=True)
        compiled(torch.randn(3, 4))
        assert rt.compiled() == 3
        compiled(torch.randn(1, 4))
        assert rt.compiled() == 6
        other = compiled_at_cuts(second, dynamic=True, outputs="view")
        x = torch.randn(3, 4)
        torch.testing.assert_close(other(x), second(x))
    assert (rt.compiled(), len(rt.callables())) == (6, 3)
    assert [record.artifacts for record in rt.callables()] == [3, 3, 0]


def static_between(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The second region has no symbol."""
    y = cut(x * 2)
    w = cut(weight.exp() * 2)
    return torch.relu(y @ w)


def test_sizes_and_ranges_are_compiled_apart_and_a_static_region_once(
    compilations: Compilations, compiled_at_cuts: Any, rt: gp.GraphRuntime
) -> None:
    compiled = compiled_at_cuts(
        static_between, dynamic_dims={"x": 0}, compile_sizes=[8, 16], compile_ranges=[(9, 12), (17, 64)]
    )
    weight = torch.randn(4, 4)
    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight), static_between(x, weight))
        # Two regions with the symbol: for every size, two single sizes, two ranges; one region without it.
        assert rt.compiled() == 2 * 5 + 1 == len(compilations)
        assert [sizes for sizes in compilations if sizes and type(sizes[0]) is int] == [[8], [16]] * 2
        assert compilations.count([]) == 1
        compilations.ran.clear()
        for size in (5, 8, 9, 12, 13, 16, 17, 64, 65):
            x = torch.randn(size, 4)
            torch.testing.assert_close(compiled(x, weight), static_between(x, weight))
    by_region = [compilations.ran[number] for number in range(5)]
    # General: 5, 13, 65. Single sizes: 8 and 16. Ranges: 9 and 12; 17 and 64.
    assert by_region == [3, 1, 1, 2, 2]
    assert (rt.compiled(), len(rt.callables())) == (11, 1)


def test_a_graph_of_one_size_says_that_nothing_is_compiled_by_size(compiled_at_cuts: Any, rt: gp.GraphRuntime) -> None:
    with torch.no_grad():
        compiled_at_cuts(torch.relu, dynamic=False, compile_sizes=[8])(torch.randn(5, 4))
    assert "nothing is compiled by size: num_tokens is no symbol" in " ".join(rt.notes)
