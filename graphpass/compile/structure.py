"""The structural key of a region: regions with equal keys can share one artifact.

The key has everything that a compiler may depend on, and no names: ops with their constants, the layout of every input
and output, which inputs share memory, and the facts about each symbol. Symbols are renamed in order of first use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import configuration, memory, symbolic
from graphpass.compat.subclasses import Rebuild


@dataclass(frozen=True, slots=True)
class Structure:
    """A region's key, and the region's names of the key's symbols."""

    key: tuple[Any, ...]  #: equal for regions that can share an artifact; the compiler and its settings come first
    symbols: tuple[sympy.Symbol, ...]  #: the region's symbols in the order in which the key numbers them
    shape_env: Any  #: the shape environment of its symbols, None without symbols

    def canonical(self, expressions: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
        """``expressions`` over the key's symbols instead of this region's."""
        names = {symbol: _canonical(symbol, number) for number, symbol in enumerate(self.symbols)}
        return tuple(expression.xreplace(names) for expression in expressions)

    def own(self, expressions: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
        """``expressions`` from :meth:`canonical`, over this region's symbols."""
        names = {_canonical(symbol, number): symbol for number, symbol in enumerate(self.symbols)}
        return tuple(expression.xreplace(names) for expression in expressions)


def structure_of(
    graph_module: fx.GraphModule, compiler: str, ignores_numbers: Callable[[Any], bool] = lambda target: False
) -> Structure:
    """The structure of a region, whose nodes carry fake tensors and symbolic sizes, for one compiler.

    Numbers among the arguments of ops that ``ignores_numbers`` accepts are not part of the key.
    """
    return _StructureReader(graph_module, ignores_numbers).read(compiler)


@dataclass(frozen=True, slots=True, eq=False)
class _Itself:
    """Compares an object by identity. The reference prevents that its address is reused while the key lives."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _StructureReader:
    def __init__(self, graph_module: fx.GraphModule, ignores_numbers: Callable[[Any], bool]) -> None:
        self._owner, self._ignores_numbers = graph_module, ignores_numbers
        self._numbers: dict[fx.Node, int] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def read(self, compiler: str) -> Structure:
        graph = self._owner.graph
        placeholders = graph.find_nodes(op="placeholder")
        values = [symbolic.example_value(node) for node in placeholders]
        inputs = tuple(map(self._layout, values))
        ops = self._ops(graph)
        outputs = tuple(self._layout(symbolic.example_value(node)) for node in graph.output_node().all_input_nodes)
        shape_env = symbolic.shape_env_of(values)
        own = tuple(self._symbols)
        settings = (compiler, *configuration.settings_now())
        key = (settings, ops, inputs, outputs, sharing_of(values), self._known_of_symbols(shape_env))
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
                target = node.target if isinstance(node.target, (str, Rebuild)) else _Itself(node.target)
                arguments = self._arguments(node)
                ops.append((node.op, target, _kinds(arguments) if self._ignores_numbers(node.target) else arguments))
        return tuple(ops)

    def _arguments(self, node: fx.Node) -> Any:
        return (self._constant(node.args), self._constant(node.kwargs), repr(node.meta.get("custom")))

    def _attribute(self, path: str) -> Any:
        """The structure of a higher-order op's subgraph; any other attribute (a constant tensor) by identity."""
        value: Any = operator.attrgetter(path)(self._owner)
        if not isinstance(value, fx.GraphModule):
            return _Itself(value)
        inner = _StructureReader(value, self._ignores_numbers)
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

        In its second trace of a function, Dynamo guards that the sizes of inputs are equal: without this, its regions
        would have other keys.
        """
        if not isinstance(fact, sympy.Eq):
            return None
        ours = [side for side in fact.args if side in self._symbols]
        others = [side for side in fact.args if isinstance(side, sympy.Symbol) and side not in self._symbols]
        return (others[0], ours[0]) if len(ours) == len(others) == 1 else None


def _kinds(constant: Any) -> Any:
    """A constant of a key with the kinds of its numbers alone."""
    if not isinstance(constant, tuple):
        return constant
    return constant[:1] if constant[:1] in ((int,), (float,)) else tuple(map(_kinds, constant))


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


def inputs_within(
    examples: Sequence[Any],
    bounds: Mapping[sympy.Symbol, tuple[int | None, int | None]],
    sizes: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[list[Any], Any, Mapping[sympy.Symbol, Any]] | None:
    """Inputs like ``examples`` with symbols within ``bounds``; None if a layout cannot be reproduced.

    ``bounds`` has the least and the greatest size of a symbol, None for any; equal ones fix it. ``sizes`` to trace with
    are by default those of the examples.

    Returns a fake tensor or size for each input, over a new shape environment, see Note [Guards of a compilation];
    their fake mode; and {symbol of the region: its new symbol or value}.
    """
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    if any(t.layout is not torch.strided or memory.is_lazy(t) for t in tensors):
        return None
    fake_mode = symbolic.new_fake_mode()
    env, traced_env = fake_mode.shape_env, symbolic.shape_env_of(examples)
    symbols: dict[sympy.Symbol, Any] = {}
    for symbol in symbols_of(examples):
        low, high = bounds.get(symbol) or symbolic.bounds_of(traced_env, symbol)
        like = int((sizes or symbolic.hints_of(traced_env))[symbol])
        symbols[symbol] = symbolic.new_symbol(env, str(symbol), low, high, like)
    storages: dict[int, torch.Tensor] = {}
    values = []
    with fake_mode, torch.no_grad():
        for value in examples:
            if isinstance(value, torch.Tensor):
                values.append(_like(value, env, symbols, storages))
            else:
                values.append(symbolic.size_of(env, symbolic.expression_of(value), symbols))
    return values, fake_mode, symbols


def symbols_of(examples: Iterable[Any]) -> tuple[sympy.Symbol, ...]:
    """The symbols in sizes, strides, offsets and storage sizes, in the order of the examples."""
    return tuple(dict.fromkeys(symbol for value in examples for symbol in _symbols_in(value)))


def _symbols_in(value: Any) -> list[sympy.Symbol]:
    numbers = [value]
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes()]
    expressions = [symbolic.expression_of(number) for number in numbers]
    symbols = {s for e in expressions if isinstance(e, sympy.Basic) for s in e.free_symbols}
    return sorted(symbols, key=str)


def _like(
    tensor: torch.Tensor, env: Any, symbols: Mapping[sympy.Symbol, Any], storages: dict[int, torch.Tensor]
) -> torch.Tensor:
    """A copy of ``tensor`` over the new symbols; copies of tensors with a common storage have a common storage."""

    def sizes(values: Sequence[Any]) -> list[Any]:
        return [symbolic.size_of(env, symbolic.expression_of(value), symbols) for value in values]

    shape, strides, (offset,) = sizes(tensor.shape), sizes(tensor.stride()), sizes([tensor.storage_offset()])
    key = memory.storage_id(tensor)
    assert key is not None, "strided tensors have a storage"
    if key not in storages:
        (num_bytes,) = sizes([tensor.untyped_storage().nbytes()])
        storages[key] = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storages[key].untyped_storage(), offset, shape, strides)
