"""Symbolic sizes: which symbol a dimension carries, and which sizes a graph's guards admit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, symbolic
from graphpass.errors import PartitionError
from graphpass.regions.analysis import free_symbols
from graphpass.regions.execute import tensors_in, value_of

REAL_SIZES = "graphpass_real_sizes"
"""Key in the metadata of the placeholder that holds the real sizes of all dimensions; every captured region gets it."""

_LOCAL = re.compile(r"L\['(\w+)'\]")
_OF_A_TENSOR = re.compile(r"\.(size|stride|storage_offset)\(\)")
_POSITIONAL = re.compile(r"L\['args'\]\[\d+\]")
_AT_A_BREAK = "___stack", "value_at_break_"
"""Dynamo's name of what the call at a graph break left to the rest of its function, and the one that reports show."""
_OF_A_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_NTH_KEY = re.compile(r"list\(dict\.keys\((?:(?!list\().)*?\)\)\[(\d+)\]")


@dataclass(frozen=True, slots=True, eq=False)
class GraphInput:
    """One input of a graph."""

    name: str  #: its name in the graph
    #: The model's argument (``x`` for Dynamo's ``L['x']`` and ``L['kwargs']['x']``), None for others.
    source_name: str | None
    is_static: bool  #: a parameter, a buffer, or marked with ``mark_static_address``: a graph may record its address
    value: Any  #: its metadata: a fake tensor, a symbolic size, or a constant
    marked_dims: frozenset[int] = frozenset()  #: dimensions that the user marked as dynamic
    label: str = ""  #: where Dynamo found it, for reports: ``args[0]``, ``self.layer.weight``; empty if unknown
    has_real_sizes: bool = False  #: the backend appended it: the real sizes of all dimensions
    #: The graph gives the tensor another storage (``x.data = new``), perhaps that of ``value``.
    is_exchanged: bool = False

    @property
    def is_of_tensor(self) -> bool:
        """Whether it is a size, a stride or the offset of a tensor that the caller passes, and no number."""
        return _OF_A_TENSOR.search(self.label) is not None

    @property
    def shown(self) -> str:
        """Its name for users: the model's argument, else where Dynamo found it, else its name in the graph."""
        return self.source_name or self.label or self.name


def graph_inputs(graph: fx.Graph, exchanged: Collection[fx.Node] = ()) -> tuple[GraphInput, ...]:
    """The inputs of a graph, in order. An ``exchanged`` one gets another storage, so its address is not static."""
    return tuple(
        GraphInput(
            node.name,
            _source_name(node),
            dynamo.is_static_address(node) and node not in exchanged,
            value_of(node),
            dynamo.marked_dims(node),
            _label(_source_text(node) or ""),
            REAL_SIZES in node.meta,
            node in exchanged,
        )
        for node in graph.nodes
        if node.op == "placeholder"
    )


def _source_text(node: fx.Node) -> str | None:
    text = dynamo.source_text(node)
    return None if text is None else text.replace(*_AT_A_BREAK)


def _label(source: str) -> str:
    """``self.a.weight`` for Dynamo's ``L['self']._modules['a']._parameters['weight']``; the n-th key is ``#n``."""
    shorter = _NTH_KEY.sub(r"#\1", source)
    while shorter != source:  # the text of a key may contain that of another
        source, shorter = shorter, _NTH_KEY.sub(r"#\1", shorter)
    return _OF_A_MODULE.sub(r".\1", _LOCAL.sub(r"\1", source))


def _source_name(node: fx.Node) -> str | None:
    """The name x of ``L['x']`` and ``L['kwargs']['x']``, ``args[0]`` of any arguments; None for attributes."""
    text = _source_text(node)
    if text is None:
        return None if node.meta.keys() & {"grapharg", REAL_SIZES} else str(node.target).lstrip("*")
    if _POSITIONAL.fullmatch(text):
        return _label(text)
    parts = text.removeprefix("L['").removesuffix("']").split("']['") if text.startswith("L['") else []
    return parts[-1] if parts and all(part.isidentifier() for part in parts) else None


def key_symbols(
    inputs: Sequence[GraphInput], dynamic_dims: Mapping[str, Mapping[int, str]]
) -> dict[str, sympy.Expr | int]:
    """Key field -> its size in this graph: a symbol, an expression over symbols, or a fixed int.

    Without declared dimensions ``num_tokens`` is the only symbol among those of ``mark_dynamic``, else the only one of
    all inputs; of several there is none.
    """
    named = {given.source_name: given.value for given in inputs[::-1] if isinstance(given.value, torch.Tensor)}
    declared = {
        field: _size_of_dim(source, named[source], dim)
        for source, dims in dynamic_dims.items()
        if source in named
        for dim, field in dims.items()
    }
    if dynamic_dims:
        return declared
    sizes = [
        (dim in graph_input.marked_dims, size)
        for graph_input in inputs
        for dim, size in enumerate(_shape(graph_input.value))
    ]
    marked = {size for is_marked, size in sizes if is_marked and not isinstance(size, int)}
    symbols = marked or {symbol for _, size in sizes for symbol in getattr(size, "free_symbols", ())}
    return {"num_tokens": symbols.pop()} if len(symbols) == 1 else {}


def layout_inputs(graph: fx.Graph) -> tuple[int, ...]:
    """Positions of the graph inputs that are only strides and offsets of input tensors.

    No node computes with them, and no size depends on them: a copy in another layout gives the same results.
    """
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    unused = {
        position: expression
        for position, node in placeholders
        if not node.users and (expression := symbolic.expression_of(value_of(node))) is not None
    }
    if not unused:
        return ()
    in_sizes = free_symbols([tensor.shape for node in graph.nodes for tensor in tensors_in(value_of(node))])
    return tuple(position for position, expression in unused.items() if expression not in in_sizes)


def _shape(value: Any) -> list[Any]:
    return [symbolic.expression_of(size) for size in value.shape] if isinstance(value, torch.Tensor) else []


def _size_of_dim(name: str, tensor: torch.Tensor, dim: int) -> sympy.Expr | int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise PartitionError(
            f"input {name!r} has no dimension {dim}",
            expected=f"a dimension below {tensor.dim()}",
            found=str(dim),
            remedy="name a dimension that the tensor has in dynamic_dims",
        )
    expression = symbolic.expression_of(tensor.shape[dim])
    assert expression is not None, "sizes are ints or symbolic ints"
    return expression


@dataclass(frozen=True, slots=True)
class GuardedSymbols:
    """The sizes that the guards of one graph admit; independent of the shape environment, which it may outlive."""

    #: Symbol -> (least, greatest) admitted value, None where it is unbounded.
    ranges: Mapping[sympy.Symbol, tuple[int | None, int | None]]
    guards: tuple[sympy.Basic, ...]  #: boolean expressions that hold; of symbols that are equal they have one

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> GuardedSymbols:
        """The guards in the shape environment of fake tensors and symbolic sizes."""
        shape_env = symbolic.shape_env_of(values)
        if shape_env is None:
            return cls(MappingProxyType({}), ())
        symbols = sorted(shape_env.var_to_range, key=str)
        ranges = {symbol: symbolic.bounds_of(shape_env, symbol) for symbol in symbols}
        guards = symbolic.guards_of(shape_env)
        names = {symbol: shape_env.replace(symbol) for guard in guards for symbol in guard.free_symbols}
        named = dict.fromkeys(guard.xreplace(names) for guard in guards)  # guard: guards_of_equal_sizes
        return cls(MappingProxyType(ranges), tuple(guard for guard in named if guard != sympy.true))

    def excludes(self, expression: sympy.Expr | int, size: int) -> str | None:
        """Why a dimension of size ``expression`` cannot be ``size``; None if the guards of its symbol admit it."""
        if isinstance(expression, (int, sympy.Integer)):
            return None if expression == size else f"fixed at {expression}"
        return self.excluded_by({expression: size}) if isinstance(expression, sympy.Symbol) else None

    def excluded_by(self, sizes: Mapping[sympy.Symbol, int]) -> str | None:
        """The first constraint that ``sizes`` violates, as text (``s0 >= 2``), or None if the guards admit them.

        A guard with other symbols counts if it fails for all their values.
        """
        for symbol, size in sizes.items():
            low, high = self.ranges.get(symbol, (None, None))
            if low is not None and size < low:
                return f"{symbol} >= {low}"
            if high is not None and size > high:
                return f"{symbol} <= {high}"
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        for guard in self.guards:
            holds = guard.xreplace(numbers)
            if holds != sympy.true and guard.free_symbols and not holds.free_symbols:
                return str(guard)
        return None
