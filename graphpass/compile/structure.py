"""The structural key of a region: regions with equal keys can share one artifact.

Regions of identical decoder layers differ in names only. The key has everything that a compiler may depend on and
nothing else: ops with their constants, the layout of every input and output, which inputs share memory, and the facts
about each symbol. Symbols are renamed in order of first use, so regions over ``s0`` and over ``s7`` have equal keys if
the same facts hold for both symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, memory, symbolic

__all__ = ["StructuralKey", "Structure", "structure_of"]


@dataclass(frozen=True, slots=True)
class StructuralKey:
    """The parts of a region's structure; equal keys share one artifact.

    Attributes:
        compiler: the compiler's name, and every ambient setting that it reads.
        ops: kind, target and arguments of each node, constants included.
        inputs: dtype, shape, strides, offset, device and flags of each input.
        outputs: the same of each output.
        sharing: for each tensor input the first input whose storage it shares.
        symbols: for each symbol its range and the guards over it.
    """

    compiler: tuple[Any, ...]
    ops: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    sharing: tuple[int | None, ...]
    symbols: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """A region's key, and the region's names of the key's symbols.

    Attributes:
        key: equal for regions that can share an artifact.
        symbols: the region's symbols in the order in which the key numbers them.
        shape_env: the shape environment of its symbols, None without symbols.
    """

    key: StructuralKey
    symbols: tuple[sympy.Symbol, ...]
    shape_env: Any

    def canonical(self, expressions: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
        """``expressions`` over the key's symbols instead of this region's."""
        names = {symbol: _canonical(symbol, number) for number, symbol in enumerate(self.symbols)}
        return tuple(expression.xreplace(names) for expression in expressions)

    def own(self, expressions: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
        """``expressions`` from :meth:`canonical`, over this region's symbols."""
        names = {_canonical(symbol, number): symbol for number, symbol in enumerate(self.symbols)}
        return tuple(expression.xreplace(names) for expression in expressions)


def structure_of(graph_module: fx.GraphModule, compiler: str) -> Structure:
    """The structure of a region whose nodes carry fake tensors and symbolic sizes.

    Args:
        graph_module: the region.
        compiler: the name of the compiler.
    """
    return _Reader(graph_module).read(compiler)


@dataclass(frozen=True, slots=True, eq=False)
class _Itself:
    """Compares an object by identity. The reference prevents that its address is reused while the key lives."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads one region; owns the numbering of its nodes and symbols."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._owner = graph_module
        self._numbers: dict[fx.Node, int] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def read(self, compiler: str) -> Structure:
        graph = self._owner.graph
        placeholders = graph.find_nodes(op="placeholder")
        values = [dynamo.example_value(node) for node in placeholders]
        inputs = tuple(map(self._layout, values))
        ops = self._ops(graph)
        outputs = tuple(self._layout(dynamo.example_value(node)) for node in graph.output_node().all_input_nodes)
        shape_env = symbolic.shape_env_of(values)
        own = tuple(self._symbols)
        key = StructuralKey(
            compiler=(compiler, *dynamo.compiler_settings()),
            ops=ops,
            inputs=inputs,
            outputs=outputs,
            sharing=sharing_of(values),
            symbols=self._known_of_symbols(shape_env),
        )
        return Structure(key, own, shape_env)

    def _ops(self, graph: fx.Graph) -> tuple[Any, ...]:
        ops: list[tuple[Any, ...]] = []
        for number, node in enumerate(graph.nodes):
            self._numbers[node] = number
            if node.op == "get_attr":
                ops.append((node.op, self._attribute(str(node.target))))
            elif node.op == "call_module":
                ops.append((node.op, _Itself(self._owner.get_submodule(str(node.target))), self._arguments(node)))
            elif node.op != "placeholder":
                target = node.target if isinstance(node.target, str) else _Itself(node.target)
                ops.append((node.op, target, self._arguments(node)))
        return tuple(ops)

    def _arguments(self, node: fx.Node) -> Any:
        return (self._constant(node.args), self._constant(node.kwargs), repr(node.meta.get("custom")))

    def _attribute(self, path: str) -> Any:
        """The structure of a higher-order op's subgraph; any other attribute (a constant tensor) by identity."""
        value: Any = self._owner
        for name in path.split("."):
            value = getattr(value, name)
        if not isinstance(value, fx.GraphModule):
            return _Itself(value)
        inner = _Reader(value)
        inner._symbols = self._symbols
        return inner._ops(value.graph)

    def _constant(self, value: Any) -> Any:
        """A hashable equivalent that differs for values that may compile differently: 1, 1.0 and True, 0.0 and -0.0."""
        if isinstance(value, fx.Node):
            return ("node", self._numbers[value])
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self._constant, value))
        if isinstance(value, Mapping):
            return (type(value), *((key, self._constant(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return (slice, *map(self._constant, (value.start, value.stop, value.step)))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        if isinstance(value, (float, complex)):
            return (type(value), repr(value))
        if isinstance(value, (int, str, bytes, type(None), torch.dtype, torch.device, torch.layout)):
            return (type(value), value)
        return _Itself(value)

    def _layout(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._constant(value)
        flags = (value.is_conj(), value.is_neg(), value.requires_grad, isinstance(value, torch.nn.Parameter))
        place = (value.dtype, value.layout, value.device, type(value), flags)  # guard: structural_dtype
        shape = tuple(map(self._size, value.shape))
        if value.layout is not torch.strided:
            return (*place, shape)
        # guard: structural_strides
        return (*place, shape, tuple(map(self._size, value.stride())), self._size(value.storage_offset()))

    def _size(self, size: Any) -> Any:
        expression = symbolic.expression_of(size)
        if not isinstance(expression, sympy.Basic):
            return expression
        for symbol in sorted(expression.free_symbols, key=str):
            self._symbols.setdefault(symbol, _canonical(symbol, len(self._symbols)))
        return expression.xreplace(self._symbols)

    def _known_of_symbols(self, shape_env: Any) -> tuple[Any, ...]:
        if shape_env is None:
            return ()
        ranges = tuple(symbolic.bounds_of(shape_env, symbol) for symbol in self._symbols)
        known = symbolic.facts_of(shape_env)
        other_names = dict(filter(None, map(self._other_name, known)))
        # Leave out that a size differs from a size of another region.
        facts = frozenset(
            renamed.xreplace(self._symbols)
            for fact in known
            if (renamed := fact.xreplace(other_names)) != sympy.true
            and not renamed.free_symbols.isdisjoint(self._symbols)
            and not (isinstance(renamed, sympy.Ne) and not renamed.free_symbols <= self._symbols.keys())
        )
        unbacked = tuple(_Itself(symbol) for symbol in self._symbols if symbolic.is_unbacked(symbol))
        return (ranges, facts, unbacked)  # guard: structural_symbols

    def _other_name(self, fact: sympy.Basic) -> tuple[sympy.Symbol, sympy.Symbol] | None:
        """(symbol from outside the region, equal symbol of the region) if the fact is their equality, else None.

        In its second trace of a function, Dynamo creates a symbol for each input's size and guards that they are equal.
        Without this renaming, the regions of that trace would have other keys than those of the first trace.
        """
        if not isinstance(fact, sympy.Eq):
            return None
        ours = [side for side in fact.args if side in self._symbols]
        others = [side for side in fact.args if isinstance(side, sympy.Symbol) and side not in self._symbols]
        return (others[0], ours[0]) if len(ours) == len(others) == 1 else None


def sharing_of(values: Sequence[Any]) -> tuple[int | None, ...]:
    """For each value the position of the first tensor in the same storage; None if the value is no tensor."""
    first: dict[int, int] = {}
    positions: list[int | None] = []
    for position, value in enumerate(values):
        storage = memory.storage_id(value) if isinstance(value, torch.Tensor) else None
        positions.append(None if storage is None else first.setdefault(storage, position))
    return tuple(positions)


def _canonical(symbol: sympy.Symbol, number: int) -> sympy.Symbol:
    return sympy.Symbol(f"z{number}", **symbol.assumptions0)
