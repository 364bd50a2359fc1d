"""Random aten graphs over row-wise and mixing operators, made without tracing: hundreds a second.

A graph is built node by node with the sizes that its nodes will have, so that ``meta["val"]`` costs nothing, and it
is run by walking its nodes. Whether a program makes sense does not matter: only what padding does to it.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv

aten = torch.ops.aten
FLOAT, INT, BOOL = torch.float64, torch.int64, torch.bool
WIDTH, CODES = 4, 5

Shape = tuple[sympy.Expr, ...]


class Kind(NamedTuple):
    """An input: its sizes by name, its type, and the constant that its padding holds, None for anything finite."""

    shape: tuple[str | int, ...]
    dtype: torch.dtype = FLOAT
    declared: float | int | bool | None = None


KINDS = {
    "x": Kind(("b", "s", WIDTH)),
    "y": Kind(("b", "s", WIDTH)),
    "g": Kind(("b", "s")),
    "v": Kind(("b", WIDTH)),
    "u": Kind(("s", WIDTH)),
    "l": Kind(("s",)),
    "zeros": Kind(("b", "s"), FLOAT, 0.0),
    "blank": Kind(("b", "s", WIDTH), FLOAT, 0.0),
    "low": Kind(("b", "s"), FLOAT, float("-inf")),
    "mask": Kind(("b", "s"), BOOL, False),
    "hide": Kind(("b", "s"), BOOL, True),
    "ids": Kind(("b", "s"), INT),
    "ids0": Kind(("b", "s"), INT, 0),
    "codes": Kind(("s",), INT),
    "weight": Kind((WIDTH, WIDTH)),
    "table": Kind((CODES, WIDTH)),
    "state": Kind((WIDTH,)),
    "count": Kind((CODES,), INT),
}


class World:
    """The symbols of every graph, and a fake tensor for each shape, made once."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        hints = torch.empty(7, 11)
        both = self.mode.from_tensor(hints, symbolic_context=context, source=ConstantSource("hints"))
        self.sizes: dict[sympy.Expr, Any] = {size.node.expr: size for size in both.shape}
        self.b, self.s = self.sizes
        self.fields = {self.b: "b", self.s: "s"}
        self._fakes: dict[tuple[Shape, torch.dtype], Tensor] = {}

    def size(self, expression: sympy.Expr) -> Any:
        """The symbolic integer of an expression, or an int."""
        if expression.is_Integer:
            return int(expression)
        if expression not in self.sizes:
            hint = int(expression.xreplace({self.b: sympy.Integer(7), self.s: sympy.Integer(11)}))
            self.sizes[expression] = self.env.create_symintnode(expression, hint=hint)
        return self.sizes[expression]

    def fake(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        if (shape, dtype) not in self._fakes:
            with self.mode:
                self._fakes[shape, dtype] = torch.empty([self.size(size) for size in shape], dtype=dtype)
        return self._fakes[shape, dtype]


@functools.cache
def world() -> World:
    return World()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph under construction."""

    node: fx.Node
    shape: Shape
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(slots=True)
class Program:
    """A graph under construction, and then the finished one."""

    choose: random.Random  #: the source of every choice
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: list[Value] = field(default_factory=list)  #: tensors that later nodes may take
    inputs: list[str] = field(default_factory=list)  #: names of the inputs, in the order of the placeholders
    _numbers: dict[sympy.Expr, fx.Node] = field(default_factory=dict)

    @property
    def declared(self) -> dict[int, float | int | bool]:
        kinds = [KINDS[name] for name in self.inputs]
        return {at: kind.declared for at, kind in enumerate(kinds) if kind.declared is not None}

    @property
    def fields(self) -> set[str]:
        return {size for name in self.inputs for size in KINDS[name].shape if isinstance(size, str)}

    @property
    def symbols(self) -> dict[sympy.Symbol, str]:
        return {symbol: name for symbol, name in world().fields.items() if name in self.fields}

    def add_input(self, name: str) -> None:
        kind = KINDS[name]
        named = {name: symbol for symbol, name in world().fields.items()}
        shape = tuple(named[size] if isinstance(size, str) else sympy.Integer(size) for size in kind.shape)
        node = self.graph.placeholder(name)
        node.meta["val"] = world().fake(shape, kind.dtype)
        self.inputs.append(name)
        self.values.append(Value(node, shape, kind.dtype))

    def number(self, expression: sympy.Expr | int) -> fx.Node | int:
        """A size as an argument: an int, or a node that computes it from the inputs' sizes."""
        expression = sympy.sympify(expression)
        if expression.is_Integer:
            return int(expression)
        if expression not in self._numbers:
            self._numbers[expression] = self._compute(expression)
        return self._numbers[expression]

    def _compute(self, expression: sympy.Expr) -> fx.Node:
        for value in self.values[: len(self.inputs)]:
            if expression in value.shape:
                node = self.graph.call_function(aten.sym_size.int, (value.node, value.shape.index(expression)))
                break
        else:
            apply: Any = operator.add if expression.is_Add else operator.mul
            if isinstance(expression, FloorDiv):
                apply = operator.floordiv
            terms = [expression.base] * int(expression.exp) if expression.is_Pow else expression.args
            parts = [self.number(part) for part in terms]
            node = functools.reduce(lambda a, b: self.graph.call_function(apply, (a, b)), parts)
            for inner in self.graph.nodes:
                if "val" not in inner.meta and inner.op == "call_function":
                    inner.meta["val"] = world().size(_expression(inner))
        node.meta["val"] = world().size(expression)
        return node

    def sizes(self, shape: Iterable[sympy.Expr]) -> list[Any]:
        return [self.number(size) for size in shape]

    def call(self, op: Any, args: Sequence[Any], shape: Sequence[sympy.Expr], of: torch.dtype, **kwargs: Any) -> Value:
        """Add one node with one result."""
        shape = tuple(sympy.sympify(size) for size in shape)
        node = self.graph.call_function(op, tuple(map(_node_of, args)), {k: _node_of(v) for k, v in kwargs.items()})
        node.meta["val"] = world().fake(shape, of)
        value = Value(node, shape, of)
        self.values.append(value)
        return value

    def call_many(
        self, op: Any, args: Sequence[Any], results: Sequence[tuple[Sequence[sympy.Expr], torch.dtype]], **kwargs: Any
    ) -> Value:
        """Add a node with several results and take each; the first one is returned."""
        node = self.graph.call_function(op, tuple(map(_node_of, args)), {k: _node_of(v) for k, v in kwargs.items()})
        shapes = [tuple(sympy.sympify(size) for size in shape) for shape, _ in results]
        fakes = tuple(world().fake(shape, dtype) for shape, (_, dtype) in zip(shapes, results, strict=True))
        node.meta["val"] = fakes
        made = []
        for at, fake in enumerate(fakes):
            part = self.graph.call_function(operator.getitem, (node, at))
            part.meta["val"] = fake
            made.append(Value(part, shapes[at], results[at][1]))
        self.values.append(made[0])
        return made[0]

    def pick(self, accepts: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """One of the values, the later ones more often; None if none is accepted."""
        found = [value for value in self.values if accepts(value)]
        if not found:
            return None
        weights = [(1 + at) ** 2 for at in range(len(found))]
        return self.choose.choices(found, weights)[0]

    def finish(self) -> fx.GraphModule:
        """Return a few of the last values, and write some into inputs of their shape."""
        made = self.values[len(self.inputs) :]
        for value, name in zip(self.values, self.inputs, strict=False):
            fits = [other for other in made if other.shape == value.shape and other.dtype == value.dtype]
            if fits and self.choose.random() < (0.7 if name in ("state", "count") else 0.1):
                source = self.call(aten.clone.default, (self.choose.choice(fits),), value.shape, value.dtype)
                copy = self.graph.call_function(aten.copy_.default, (value.node, source.node))
                copy.meta["val"] = value.node.meta["val"]
        outputs = made[-1:] + [self.choose.choice(made) for _ in range(self.choose.randint(0, 2)) if made]
        self.graph.output(tuple(value.node for value in outputs or self.values[:1]))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _node_of(argument: Any) -> Any:
    if isinstance(argument, Value):
        return argument.node
    return [_node_of(part) for part in argument] if isinstance(argument, (list, tuple)) else argument


def _expression(node: fx.Node) -> sympy.Expr:
    parts = []
    for argument in node.args:
        value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
        parts.append(value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value))
    return node.target(*parts)  # type: ignore[operator, no-any-return]


def walk(
    graph: fx.Graph, inputs: Sequence[Tensor], see: Callable[[fx.Node, Any, Any], None] | None = None
) -> list[Any]:
    """Run a graph node by node; ``see`` is called with each node, its arguments and its result."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        args = fx.node.map_arg(node.args, env.__getitem__)
        if node.op == "output":
            return list(args[0])
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        env[node] = node.target(*args, **kwargs)
        if see is not None:
            see(node, (*args, *kwargs.values()), env[node])
    raise AssertionError("a graph without outputs")


def real_input(name: str, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    kind = KINDS[name]
    shape = [sizes[size] if isinstance(size, str) else size for size in kind.shape]
    if kind.dtype == INT:
        return torch.randint(CODES, shape, generator=generator)
    draw = torch.randn(shape, generator=generator, dtype=FLOAT)
    if kind.dtype == BOOL or name == "low":
        shows = draw > -0.5
        shows[..., 0] = True
        if name == "low":
            return torch.where(shows, 0.0, float("-inf")).to(FLOAT)
        return shows if name == "mask" else ~shows
    return draw


def padded_input(
    name: str,
    real: Tensor,
    sizes: Mapping[Any, int],
    scale: float,
    generator: torch.Generator,
    least: float | None = None,
) -> Tensor:
    """``real`` with padding of any finite contents, or of one sign and at least ``least`` times ``scale``."""
    kind = KINDS[name]
    shape = [sizes[size] if isinstance(size, str) else size for size in kind.shape]
    if kind.declared is not None:
        padded = torch.full(shape, kind.declared, dtype=kind.dtype)
    elif kind.dtype == INT:
        padded = real.flatten()[torch.randint(real.numel(), shape, generator=generator)]
    else:
        draw = torch.randn(shape, generator=generator, dtype=FLOAT)
        padded = (draw if least is None else draw.abs() + least) * scale
    padded[tuple(slice(size) for size in real.shape)] = real
    return padded
