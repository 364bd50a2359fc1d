"""A function as an aten graph with symbolic sizes, and its inputs at any real and padded size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map_only

Sizes = Mapping[str, int]

HINTS = {"b": 3, "s": 5, "t": 6}
NUM_IDS, NUM_SLOTS = 11, 32


@dataclass(frozen=True, slots=True)
class InputKind:
    """How one input of a program looks."""

    shape: tuple[str | int, ...]  #: a size, or the key field that names it, per dimension
    make: Callable[[tuple[int, ...], Sizes, torch.Generator], Tensor]  #: draws the real contents for these sizes
    declared: float | int | bool | None = None  #: the constant in the padding; None where it may be anything finite

    def sizes(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def real(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return self.make(self.sizes(sizes), sizes, generator)

    def padded(self, real: Tensor, sizes: Sizes, scale: float, generator: torch.Generator) -> Tensor:
        """The real contents in the prefix; behind them the declared constant, or a draw of this magnitude."""
        shape = self.sizes(sizes)
        if shape == tuple(real.shape):
            return real.clone()
        if self.declared is not None:
            padded = torch.full(shape, self.declared, dtype=real.dtype)
        elif real.is_floating_point() or real.is_complex():
            padded = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(real.dtype)
        elif real.dtype == torch.bool:
            padded = torch.rand(shape, generator=generator) < 0.5
        else:
            padded = real.flatten()[torch.randint(real.numel(), shape, generator=generator)]
        padded[tuple(slice(size) for size in real.shape)] = real
        return padded


def normal(dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    return lambda shape, _, generator: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def below(limit: int | str, least: int = 0, dtype: torch.dtype = torch.int64) -> Callable[..., Tensor]:
    """Integers from ``least`` up to, and without, a number or the real size of a key field."""

    def make(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Tensor:
        end = sizes[limit] if isinstance(limit, str) else limit
        return torch.randint(least, least + end, shape, generator=generator).to(dtype)

    return make


def visible(dtype: torch.dtype, shown: float, hidden: float) -> Callable[..., Tensor]:
    """A mask whose first entry along the last dimension always shows."""

    def make(shape: tuple[int, ...], _: Sizes, generator: torch.Generator) -> Tensor:
        shows = torch.rand(shape, generator=generator) < 0.6
        shows[..., 0] = True
        return torch.where(shows, shown, hidden).to(dtype)

    return make


def _slots(shape: tuple[int, ...], _: Sizes, generator: torch.Generator) -> Tensor:
    return torch.randperm(NUM_SLOTS, generator=generator)[: shape[0]]


def _positive(shape: tuple[int, ...], _: Sizes, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


def _positions(shape: tuple[int, ...], _: Sizes, __: torch.Generator) -> Tensor:
    return torch.arange(shape[-1]).expand(shape).clone()


INPUTS = {
    # Activations.
    "x": InputKind(("b", "s", 8), normal()),
    "y": InputKind(("b", "s", 8), normal()),
    "v": InputKind(("b", 8), normal()),
    "u": InputKind(("s", 8), normal()),
    "g": InputKind(("b", "s"), normal()),
    "r": InputKind(("s",), normal()),
    "q": InputKind(("b", 2, "s", 4), normal()),
    "k": InputKind(("b", 2, "s", 4), normal()),
    "c": InputKind(("b", 2, "s", 4), normal()),
    "mem": InputKind(("b", "t", 8), normal()),
    "im": InputKind(("b", 4, 6, 6), normal()),
    "half": InputKind(("b", "s", 8), normal(torch.float16)),
    "f": InputKind(("b", "s", 8), normal(torch.float32)),
    "z": InputKind(("b", "s", 4), normal(torch.complex128)),
    "i": InputKind(("b", "s"), below(11, -5)),
    "byte": InputKind(("b", "s"), below(9, 0, torch.uint8)),
    "zeros": InputKind(("b", "s", 8), normal(), 0.0),
    "ones": InputKind(("b", "s"), normal(), 1.0),
    # Indices.
    "ids": InputKind(("b", "s"), below(NUM_IDS)),
    "ids0": InputKind(("b", "s"), below(NUM_IDS), 0),
    "pos": InputKind(("s",), _positions),
    "at": InputKind(("b",), below("s")),
    "lens": InputKind(("b",), below("s", 1)),
    "row": InputKind(("s",), below("b")),
    "slot": InputKind(("s",), _slots),
    # Masks, with the padding that a user declares.
    "m": InputKind(("b", "s"), visible(torch.bool, True, False), False),
    "am": InputKind(("b", "s"), visible(torch.int64, 1, 0), 0),
    "fm": InputKind(("b", "s"), visible(torch.float64, 1.0, 0.0), 0.0),
    "hide": InputKind(("b", "s"), visible(torch.bool, False, True), True),
    "seen": InputKind(("b", "s"), visible(torch.bool, True, False), True),
    "free": InputKind(("b", "s"), visible(torch.bool, True, False)),
    "bias": InputKind(("b", 1, 1, "s"), visible(torch.float64, 0.0, float("-inf")), float("-inf")),
    "weak": InputKind(("b", 1, 1, "s"), visible(torch.float64, 0.0, -10.0), -10.0),
    "sm": InputKind(("s",), visible(torch.bool, True, False), False),
    "tm": InputKind(("b", "t"), visible(torch.bool, True, False), False),
    # Parameters and state: sizes that are never padded.
    "w": InputKind((8, 8), normal()),
    "w4": InputKind((4, 4, 3), normal()),
    "w44": InputKind((4, 4, 3, 3), normal()),
    "p": InputKind((8,), normal()),
    "table": InputKind((NUM_IDS, 8), normal()),
    "mean": InputKind((8,), normal()),
    "var": InputKind((8,), _positive),
    "buf": InputKind((8,), normal()),
    "step": InputKind((), below(9)),
    "count": InputKind((NUM_IDS,), below(9)),
    "cache": InputKind((NUM_SLOTS, 8), normal()),
    "kv": InputKind(("b", NUM_SLOTS, 8), normal()),
    "fixed": InputKind((3,), below(2)),
}


@dataclass(frozen=True, slots=True)
class Traced:
    """One program's aten graph."""

    graph: fx.GraphModule  #: runs at any sizes that the guards admit
    names: tuple[str, ...]  #: the inputs, in the graph's order
    symbols: dict[sympy.Symbol, str]  #: each symbolic size and its key field
    guards: tuple[sympy.Basic, ...]  #: what the sizes must satisfy

    @property
    def declared(self) -> dict[int, float | int | bool]:
        kinds = [INPUTS[name] for name in self.names]
        return {at: kind.declared for at, kind in enumerate(kinds) if kind.declared is not None}

    def sizes_of(self, sizes: Sizes) -> dict[sympy.Symbol, sympy.Integer]:
        return {symbol: sympy.Integer(sizes[field]) for symbol, field in self.symbols.items()}

    def admits(self, sizes: Sizes) -> bool:
        values = self.sizes_of(sizes)
        return all(guard.xreplace(values) is not sympy.false for guard in self.guards)

    def run(self, inputs: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """The outputs, and the inputs as the graph leaves them."""
        given = [value.clone() for value in inputs]
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            outputs = self.graph(*given)
        return list(outputs), given


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """As AOTAutograd hands it to its compiler: ops without effects, and at the end a copy into each written input."""

    def value_of(tensor: FunctionalTensor) -> Tensor:
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)

    def run(*inputs: Tensor) -> Any:
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(value) for value in inputs]
            outputs = function(*wrapped)
        outputs = tuple(tree_leaves(tree_map_only(FunctionalTensor, value_of, outputs)))
        for value, left in zip(inputs, wrapped, strict=True):
            written = value_of(left)
            if written is not value:
                value.copy_(written)
        return outputs

    return run


def as_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: tuple(tree_leaves(function(*inputs)))


def writes(graph: fx.GraphModule) -> bool:
    """Whether an operator writes to an argument: then the graph has to be made functional, which takes its time."""
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return any(op._schema.is_mutable for op in operators if isinstance(op, torch._ops.OpOverload))


def trace(function: Callable[..., Any], hints: Sizes = HINTS) -> Traced:
    """Trace a function whose parameter names say what its inputs are."""
    names = tuple(inspect.signature(function).parameters)
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # What it keeps is of no use to the next program.
    generator = torch.Generator().manual_seed(0)
    fakes, symbols = [], {}
    for name in names:
        kind = INPUTS[name]
        dynamic = [DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in kind.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        real = kind.real(hints, generator)
        fake = mode.from_tensor(real, symbolic_context=context, source=ConstantSource(name))
        fakes.append(fake)
        symbols |= {fake.shape[d].node.expr: size for d, size in enumerate(kind.shape) if isinstance(size, str)}
    with torch.no_grad():
        graph = make_fx(as_tuple(function), tracing_mode="symbolic")(*fakes)
        if writes(graph):
            graph = make_fx(functional(function), tracing_mode="symbolic")(*fakes)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    # A guard may have fixed a size: then it is no symbol of the graph any more.
    left = {symbol: field for symbol, field in symbols.items() if isinstance(env.replace(symbol), sympy.Symbol)}
    return Traced(graph, names, left, tuple(guard.expr for guard in env.guards))
