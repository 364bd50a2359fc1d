"""Each part of the structural key: regions that differ in it alone do not share, and would be wrong if they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass.compile import once
from graphpass.compile.compilers import Compiler

cut = torch.ops.compiletest.cut
gain = torch.ops.compiletest.gain
I64 = torch.int64


def cut_as_it_lies(x: torch.Tensor) -> torch.Tensor:
    cut(x)
    return x


def other_strides(x: torch.Tensor) -> Any:
    lying = torch.empty_strided((3, 3), (1, 3)).copy_(cut(x))
    return cut(cut(x).contiguous().view(-1) * 2), cut(cut_as_it_lies(lying).contiguous().view(-1) * 2)


DIFFERENT: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "layer names": (lambda x: (cut(gain(x, "layers.0")), cut(gain(x, "layers.1"))), ["ops"]),
    "numbers": (lambda x: (cut(x * 2.0), cut(x * 3.0)), ["ops"]),
    "signed zeros": (lambda x: (cut(1 / (x * 0.0)), cut(1 / (x * -0.0))), ["ops"]),
    "integer and float": (
        lambda x: (cut(torch.full_like(x, 1, dtype=I64) * 1), cut(torch.full_like(x, 1, dtype=I64) * 1.0)),
        ["ops", "outputs"],
    ),
    "strides": (
        lambda x: (cut(x.contiguous().view(-1) * 2), cut(x.t().contiguous().view(-1) * 2)),
        ["ops", "inputs"],
    ),
    "other strides": (other_strides, ["inputs"]),
    "dtypes": (
        lambda x: (cut(cut(x).to(torch.float32) * 2), cut(cut(x.double()).to(torch.float32) * 2)),
        ["inputs"],
    ),
    "shapes": (lambda x: (cut(cut(x).flatten() * 2), cut(cut(x[:2]).flatten() * 2)), ["inputs", "outputs"]),
}


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_part_that_differs_is_never_ignored(
    name: str, compiled_at_cuts: Any, drop_from_key: Any, rt: gp.GraphRuntime
) -> None:
    model, parts = DIFFERENT[name]
    x = torch.randn(3, 3)
    with torch.no_grad():
        agree(compiled_at_cuts(model)(x), model(x))
        apart = rt.compiled()
        torch.compiler.reset()
        drop_from_key(*parts)
        with pytest.raises((AssertionError, RuntimeError)):
            agree(compiled_at_cuts(model)(x), model(x))
    assert rt.compiled() - apart < apart


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_artifact_is_called_with_inputs_that_overlap(compiler: str, dynamic: bool, compiled_at_cuts: Any) -> None:
    """Compiled for inputs apart, or at other offsets: stock AOTAutograd returns wrong numbers here."""

    def model(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        c = b * 2
        b.mul_(3)
        return a + c, b + 1

    compiled = compiled_at_cuts(model, compiler, dynamic=dynamic)
    for first, second in ((0, 16), (4, 8), (6, 10), (4, 6), (4, 8), (0, 16)):
        memories = [torch.arange(40.0), torch.arange(40.0)]
        with torch.no_grad():
            results = [
                run(m[first : first + 8], m[second : second + 8])
                for run, m in zip((compiled, model), memories, strict=True)
            ]
        agree([*results[0], memories[0]], [*results[1], memories[1]])


def two_sizes(a: torch.Tensor, b: torch.Tensor) -> Any:
    return cut(torch.relu(a) * 2), cut(torch.relu(b) * 2)


def rows(size: int) -> torch.Tensor:
    x = torch.randn(size, 2)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.fixture
def compiler_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that compiles for sizes above five otherwise than for sizes below, and lets the graph guard on it."""

    def compile_graph(graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        for size in examples:
            if isinstance(size, torch.SymInt):
                bool(size > 5)
        return graph_module.forward

    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(compile_graph, False, False))


@pytest.mark.usefixtures("compiler_that_asks")
@pytest.mark.parametrize(("sizes", "artifacts"), [((8, 9), 1), ((8, 4), 2), ((3, 4), 1)])
def test_symbols_are_alike_up_to_their_names(
    sizes: tuple[int, int], artifacts: int, compiled_at_cuts: Any, rt: gp.GraphRuntime
) -> None:
    """An artifact over one symbol serves another one if what was assumed of the first holds for the second."""
    compiled = compiled_at_cuts(two_sizes)
    with torch.no_grad():
        x, y = map(rows, sizes)
        agree(compiled(x, y), two_sizes(x, y))
        assert (rt.compiled(), len(rt.callables())) == (artifacts, 1)
        # What was assumed became a guard of the graph, for both symbols.
        for other in ((7, 12), (4, 12), (12, 4)):
            x, y = map(rows, other)
            agree(compiled(x, y), two_sizes(x, y))
    alike = {tuple(size > 5 for size in pair) for pair in (sizes, (7, 12), (4, 12), (12, 4))}
    assert len(rt.callables()) == len(alike)


@pytest.mark.usefixtures("compiler_that_asks")
def test_what_is_known_of_a_symbol_is_part_of_the_key(compiled_at_cuts: Any, rt: gp.GraphRuntime) -> None:
    def known_apart(a: torch.Tensor, b: torch.Tensor) -> Any:
        return two_sizes(a, b) if a.shape[0] % 4 == 0 else two_sizes(a, b * 1)

    with torch.no_grad():
        compiled_at_cuts(known_apart)(rows(8), rows(9))
    assert rt.compiled() == 2


@pytest.mark.parametrize(
    "compiler", ["inductor", *(pytest.param(name, marks=pytest.mark.soak) for name in ("eager", "aot_eager"))]
)
def test_results_of_operations_that_change_nothing_are_apart(compiler: str, compiled_at_cuts: Any) -> None:
    def model(x: torch.Tensor) -> Any:
        y = x.sin()
        first = cut(x)
        results = [x * torch.ones(6), x * 1, y, y * 1]
        for number, result in enumerate(results):
            cut(first)
            result.add_(number + 1)
        return [first, *results, x]

    x = torch.arange(6.0)
    with torch.no_grad():
        agree(compiled_at_cuts(model, compiler)(x.clone()), model(x.clone()))
