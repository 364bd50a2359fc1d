"""One operator call under the padding pass, and at real and padded sizes."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.functions import FloorDiv

from tests.fuzz.padding import Program, Value, world
from tests.unit.padding.bruteforce import SCALES, same
from tests.unit.padding.samples import Drawn, Sample

REAL = 5
PADDED = (8, 6)


def tensors_of(arguments: Any) -> list[Drawn]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Drawn)]


def filled(arguments: Any, tensors: list[Tensor]) -> Any:
    """The arguments with a tensor in each place."""
    left = iter(tensors)
    return tree_map(lambda leaf: next(left) if isinstance(leaf, Drawn) else leaf, arguments)


def results_of(sample: Sample, arguments: Any, tensors: list[Tensor]) -> list[Any]:
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        return tree_leaves(sample.operator(*filled(arguments, [x.clone() for x in tensors]), **sample.keywords))


def real_tensors(sample: Sample, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [drawn.real(drawn.shape, generator) for drawn in tensors_of(sample.arguments(size))]


def padded_tensors(
    sample: Sample, real: list[Tensor], size: int, scale: float, declared: dict[int, Any]
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(int(scale))
    made = []
    for at, (drawn, value) in enumerate(zip(tensors_of(sample.arguments(size)), real, strict=True)):
        padded = drawn.real(drawn.shape, generator, scale)
        if at in declared:
            padded = torch.full_like(padded, declared[at])
        padded[tuple(slice(length) for length in value.shape)] = value
        made.append(padded)
    return made


def difference(sample: Sample, declared: dict[int, Any], sizes: tuple[int, ...] = PADDED) -> str | None:
    """What padding changes in the call's results, None if nothing."""
    real = real_tensors(sample, REAL)
    expected = results_of(sample, sample.arguments(REAL), real)
    state = torch.get_rng_state()
    for size, scale in zip(sizes, SCALES, strict=True):
        found = results_of(sample, sample.arguments(size), padded_tensors(sample, real, size, scale, declared))
        wrong = [at for at, (a, b) in enumerate(zip(expected, found, strict=True)) if not same(a, b)]
        if wrong or not torch.equal(state, torch.get_rng_state()):
            return f"results {wrong} padded to {size}, contents x{scale:g}"
    return None


def graph_of(sample: Sample) -> fx.GraphModule:
    """The call as a graph. The first input has the size that may be padded; the tensor arguments follow."""
    program, size = Program(random.Random(0)), world().s
    values: list[Value] = []
    arguments = sample.arguments(size)
    for at, drawn in enumerate([Drawn((size,)), *tensors_of(arguments)]):
        shape = tuple(map(sympy.sympify, drawn.shape))
        node = program.graph.placeholder(f"x{at}")
        dtype = drawn.real((1,) * len(shape), torch.Generator()).dtype
        node.meta["val"] = world().fake(shape, dtype)
        values.append(Value(node, shape, dtype))
    program.values, program.inputs = values, [value.node.name for value in values]
    left = iter(values[1:])

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Drawn):
            return next(left).node
        return program.number(leaf) if isinstance(leaf, sympy.Basic) else leaf

    call = program.graph.call_function(sample.operator, tuple(tree_map(argument, arguments)), dict(sample.keywords))
    shapes = list(_result_shapes(sample))
    call.meta["val"] = fakes = [world().fake(shape, dtype) for shape, dtype in shapes]
    outputs = [call]
    if len(sample.operator._schema.returns) == 1 and str(sample.operator._schema.returns[0].type) == "Tensor":
        call.meta["val"] = fakes[0]
    else:
        outputs = [program.graph.call_function(operator.getitem, (call, at)) for at in range(len(fakes))]
        for output, fake in zip(outputs, fakes, strict=True):
            output.meta["val"] = fake
    program.graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), program.graph)


def _result_shapes(sample: Sample) -> Iterator[tuple[tuple[sympy.Expr, ...], torch.dtype]]:
    runs = [results_of(sample, sample.arguments(n), real_tensors(sample, n)) for n in (REAL, 8, 11)]
    for results in zip(*runs, strict=True):
        yield tuple(_fitted(*sizes) for sizes in zip(*(x.shape for x in results), strict=True)), results[0].dtype


def _fitted(first: int, second: int, third: int) -> sympy.Expr:
    """The expression that has these values at sizes 5, 8 and 11."""
    n = world().s
    slope = (second - first) // 3
    for found in (slope * n + first - slope * REAL, (first // REAL**2) * n * n, FloorDiv(n + 1, 2), FloorDiv(n, 2)):
        if [found.xreplace({n: sympy.Integer(at)}) for at in (REAL, 8, 11)] == [first, second, third]:
            return sympy.sympify(found)
    raise AssertionError(f"no expression for sizes {first}, {second}, {third}")
