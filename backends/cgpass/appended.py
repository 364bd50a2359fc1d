"""Inputs that the backend appends to the arguments that Dynamo passes.

Dynamo does not pass every tensor that its graph reads: the parameters and the state of an optimizer are attributes of
the graph module. Each of these becomes a placeholder after Dynamo's own. So all tensors that a graph reads are inputs,
with the same names, address guards and undo of a capture. The real sizes of padded dimensions follow them.

They are read where a negative index from data counts from the end of a dimension, which has padding in padded calls:
``x[i]`` with ``i = -2`` reads from the end of the tensor that the graph gets. In a graph with declared sizes the index
becomes ``where(i < 0, i + n, i)``, where ``n`` is the real size of the dimension.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from cgpass.sizes import Expression, symbols_in, value_at
from graphpass.compat import dynamo, memory, symbolic
from graphpass.options import Settings
from graphpass.regions.execute import value_of
from graphpass.regions.names import names_of
from graphpass.regions.symbols import REAL_SIZE, REAL_SIZES

_Count: TypeAlias = Callable[[fx.Node, Expression], fx.Node]

_LISTED = frozenset(f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"))
"""``x[i, j]`` as an operator: the second argument has one index for each of the first dimensions, or None."""

_FLAT = frozenset({"aten::take", "aten::put"})
"""The second argument is an index into the flattened tensor."""

_ALONG = frozenset({"aten::index_fill"})
"""The second argument is a dimension, the third an index."""

_DECOMPOSED = frozenset(f"aten::{name}" for name in ("index_select", "index_add", "index_copy", "index_reduce"))
"""Like ``_ALONG``, but eager refuses negative indices. Inductor makes ``x[i]`` and ``x[i] = ...`` of them."""

_MAX_REMEMBERED = 4096


class RealSizes:
    """Real sizes of a call: some as 0-d int64 tensors, and those of all symbols as one vector of int32.

    Each call has its own tensors, or those of earlier calls of equal sizes, which nothing changes. So a size never
    changes under a graph that is running, or under a call of another thread.

    Args:
        wanted: (size, device) of each 0-d tensor.
        places: symbol -> where a call has it.
        vector: the symbols of the vector in order, none if there is no vector.
        device: of the vector.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Expression, torch.device]],
        places: Mapping[sympy.Symbol, tuple[int, int | None]],
        vector: Sequence[sympy.Symbol] = (),
        device: torch.device | None = None,
    ) -> None:
        self._wanted, self._all = tuple(wanted), dict(places)
        self._vector, self._device = tuple(vector), device
        symbols = [*vector, *symbols_in(size for size, _ in wanted).difference(vector)]
        self._places = {symbol: places[symbol] for symbol in symbols}
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._vectors: dict[tuple[int, ...], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_vectors": {}}

    @property
    def entries(self) -> dict[sympy.Symbol, int]:
        """Symbol -> its entry in the vector."""
        return {symbol: entry for entry, symbol in enumerate(self._vector)}

    def with_vector(self, symbols: Sequence[sympy.Symbol], device: torch.device) -> RealSizes:
        """The same with a vector of these symbols after the other tensors."""
        return RealSizes(self._wanted, self._all, symbols, device)

    def of(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors for a call with these arguments."""
        read = tuple([args[p] if dim is None else args[p].shape[dim] for p, dim in self._places.values()])
        vector = [self._vector_of(read[: len(self._vector)])] if self._vector else []
        if not self._wanted:
            return vector
        sizes = self._known.get(read)  # guard: real_size_of_the_call
        if sizes is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            named = dict(zip(self._places, read, strict=True))
            sizes = self._known[read] = tuple(value_at(size, named) for size, _ in self._wanted)
        devices = [device for _, device in self._wanted]
        tensors = zip(sizes, devices, strict=True)
        return [*(torch.full((), n, dtype=torch.int64, device=device) for n, device in tensors), *vector]

    def _vector_of(self, sizes: tuple[int, ...]) -> torch.Tensor:
        vector = self._vectors.get(sizes)
        if vector is None:
            if len(self._vectors) >= _MAX_REMEMBERED:
                self._vectors.clear()
            with torch.inference_mode(False), torch.no_grad():
                parts = [torch.full((1,), size, dtype=torch.int32, device=self._device) for size in sizes]
                vector = torch.cat(parts)
            if not memory.is_capturing_stream(self._device):  # guard: real_sizes_of_a_users_capture
                self._vectors[sizes] = vector
        return vector


class AppendedInputs:
    """The values of the appended inputs in each call."""

    def __init__(self, attributes: Sequence[torch.Tensor], sizes: RealSizes | None) -> None:
        self._attributes = tuple(attributes)
        self.sizes = sizes  #: the real sizes; None if there are none
        self._traced = [_layout(tensor) for tensor in attributes]
        self._have_traced_layouts = memory.layouts_of(attributes)

    def after(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Dynamo's arguments, and the appended ones."""
        return (*args, *self._attributes, *(self.sizes.of(args) if self.sizes is not None else ()))

    def at_sizes_of(self, args: Sequence[Any]) -> list[Any]:
        """All arguments, the real sizes being those of the others."""
        sizes = [] if self.sizes is None else self.sizes.of(args)
        return [*args[: len(args) - len(sizes)], *sizes]

    def changed(self) -> str | None:
        """How an attribute differs from its trace, as text, or None: ``tensor.data = other`` keeps Dynamo's guards."""
        if self._have_traced_layouts(*self._attributes):
            return None
        for tensor, traced in zip(self._attributes, self._traced, strict=True):
            if _layout(tensor) != traced:
                return f"{_shown(_layout(tensor))}, traced as {_shown(traced)}"
        self._have_traced_layouts = memory.layouts_of(self._attributes)  # another mode of the thread, equal layouts
        return None


def attributes_read(graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """{path: tensor} of the tensor attributes that a graph reads; without subgraphs of higher-order operators."""
    paths = dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="get_attr"))
    values = {path: operator.attrgetter(path)(graph_module) for path in paths}
    return {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}


def lift_attributes(graph_module: fx.GraphModule, sources: Mapping[str, str]) -> list[torch.Tensor]:
    """Turn the tensor attributes that a graph reads into inputs with static addresses."""
    attributes = attributes_read(graph_module)
    lifted: dict[str, fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        path = str(node.target)
        if path in attributes:
            if path not in lifted:
                meta = dynamo.meta_of_static_input(node, attributes[path], sources.get(path, path))
                lifted[path] = append_placeholder(graph_module.graph, node.name, meta)
            node.replace_all_uses_with(lifted[path])
            graph_module.graph.erase_node(node)
    return [attributes[path] for path in lifted]


def append_placeholder(graph: fx.Graph, name: str, meta: Mapping[str, Any]) -> fx.Node:
    """A new placeholder after all others."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        placeholder = graph.placeholder(name)
    placeholder.meta = dict(meta)
    return placeholder


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _shown(layout: tuple[Any, ...]) -> str:
    shape, strides, dtype, device = layout
    return f"{shape} {dtype} on {device} with strides {strides}"


# -- negative indices --------------------------------------------------------------------------------------------------


def count_from_start(graph_module: fx.GraphModule, settings: Settings) -> RealSizes | None:
    """Rewrite all indices from data into dimensions with symbolic sizes; return the inputs that this appends."""
    if not settings.dispatches_itself() or not (settings.dynamic_dims or settings.padding):
        return None
    return _CountingFromStart(graph_module.graph, decomposes=settings.compiler == "inductor").run()


def append_real_sizes(graph_module: fx.GraphModule, settings: Settings, sizes: RealSizes | None) -> RealSizes | None:
    """Append the vector of real sizes, after those of ``sizes``, to a graph whose padding may be made."""
    graph = graph_module.graph
    values = list(map(value_of, graph.find_nodes(op="placeholder")))
    fake_mode = symbolic.fake_mode_of(values)
    places = symbolic.places_of(values)
    symbols = [one for one in places if isinstance(one, sympy.Symbol) and not symbolic.is_unbacked(one)]
    if not settings.makes_padding() or not symbols or fake_mode is None:
        return sizes
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    device = next((one for one in devices if one.type != "cpu"), devices[0])
    with symbolic.quiet_shapes(fake_mode), fake_mode, torch.no_grad():
        vector = torch.empty((len(symbols),), dtype=torch.int32, device=device)
    append_placeholder(graph, "graphpass_real_sizes", {"example_value": vector, REAL_SIZES: True})
    return (sizes or RealSizes([], places)).with_vector(symbols, device)


class _CountingFromStart:
    """The state of one run: the graph, where its symbols are read, and the inputs appended so far."""

    def __init__(self, graph: fx.Graph, *, decomposes: bool) -> None:
        self._graph = graph
        self._along = _ALONG | _DECOMPOSED if decomposes else _ALONG
        self._places = symbolic.places_of(map(value_of, graph.find_nodes(op="placeholder")))
        self._appended: dict[tuple[Expression, torch.device], fx.Node] = {}

    def run(self) -> RealSizes | None:
        for node in list(self._graph.nodes):
            if node.op in ("call_function", "call_method"):
                self._rewrite(node)
        if not self._appended:
            return None
        return RealSizes(list(self._appended), self._places)

    def _rewrite(self, node: fx.Node) -> None:
        indexed = _argument(node, 0, "self", "input")
        value = value_of(indexed) if isinstance(indexed, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return
        shape = [symbolic.expression_of(size) for size in value.shape]

        def count(index: fx.Node, size: Any) -> fx.Node:
            return self._counted(node, index, size)

        if node.target in (operator.getitem, operator.setitem):
            of = node.args[1]
            parts = list(of) if isinstance(of, tuple) else [of]
            counted = _by_dimension(parts, shape, count)
            node.update_arg(1, tuple(counted) if isinstance(of, tuple) else counted[0])
            return
        names = names_of(node)
        if names & _LISTED:
            listed = _argument(node, 1, "indices")
            if isinstance(listed, (list, tuple)):
                parts = [slice(None) if part is None else part for part in listed]
                counted = _by_dimension(parts, shape, count)
                pairs = zip(listed, counted, strict=True)
                _replace(node, 1, "indices", [None if old is None else new for old, new in pairs])
        elif names & _FLAT:
            index = _argument(node, 1, "index")
            _replace(node, 1, "index", _of_dim(index, sympy.prod(shape), count))
        elif names & self._along and isinstance(dim := _argument(node, 1, "dim"), int) and shape:
            index = _argument(node, 2, "index")
            _replace(node, 2, "index", _of_dim(index, shape[dim], count))

    def _counted(self, user: fx.Node, index: fx.Node, size: Expression) -> fx.Node:
        """``index`` counted from the start of a dimension of this size; ``index`` itself if the size has no symbol."""
        value = value_of(index)
        fake_mode = symbolic.fake_mode_of([value])
        if fake_mode is None or not symbols_in([size]) or not symbols_in([size]) <= self._places.keys():
            return index
        length = self._appended.get((size, value.device))
        with symbolic.quiet_shapes(fake_mode), fake_mode, torch.no_grad():
            if length is None:
                name = f"graphpass_real_size_{len(self._appended)}"
                meta = {"example_value": torch.empty((), dtype=torch.int64, device=value.device), REAL_SIZE: True}
                length = self._appended[size, value.device] = append_placeholder(self._graph, name, meta)
            with self._graph.inserting_before(user):
                whole = index if value.dtype is torch.int64 else _call(user, index, "long")
                counted = _call(user, whole, "add", length)
                return _call(user, counted, "where", _call(user, whole, "lt", 0), whole)


def _call(user: fx.Node, on: fx.Node, method: str, *args: Any) -> fx.Node:
    """A new call of a tensor's method, for the code of ``user``; the fake mode is active."""
    node = user.graph.call_method(method, (on, *args))
    value = getattr(value_of(on), method)(*(value_of(part) if isinstance(part, fx.Node) else part for part in args))
    node.meta = {**user.meta, "example_value": value}
    return node


def _argument(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _replace(node: fx.Node, position: int, name: str, value: Any) -> None:
    if len(node.args) > position:
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _of_dim(index: Any, size: Any, count: _Count) -> Any:
    return count(index, size) if _is_index(index) else index


def _is_index(part: Any) -> bool:
    value = value_of(part) if isinstance(part, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _by_dimension(parts: Sequence[Any], shape: Sequence[Any], count: _Count) -> list[Any]:
    """The parts of ``x[part, part]`` with tensors of integers counted from the start of their dimensions."""
    behind = sum(map(_num_dims, parts))
    dim, counted = 0, []
    for part in parts:
        if part is Ellipsis:
            dim += len(shape) - behind
        counted.append(_of_dim(part, shape[dim] if dim < len(shape) else 1, count))
        dim += _num_dims(part)
    return counted


def _num_dims(part: Any) -> int:
    """How many dimensions a part of ``x[part, part]`` takes up."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    value = value_of(part) if isinstance(part, fx.Node) else None
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
        return value.dim()
    return 1
