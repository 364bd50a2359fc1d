"""Inputs that the backend appends to the arguments that Dynamo passes.

The parameters and the state of an optimizer are attributes of the graph module. Each becomes a placeholder after
Dynamo's own, with a name, an address guard and the undo of a capture. Tensors that are made on the CPU ahead of each
call follow, and the real sizes of padded dimensions, for what is made of padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from cgpass.namedsizes import symbols_in, value_at
from graphpass.capture.staging import Layouts
from graphpass.compat import dynamo, memory, symbolic
from graphpass.compat.subclasses import is_wrapper, plain_tensors
from graphpass.options import Settings
from graphpass.regions.execute import value_of
from graphpass.regions.fromsizes import found_beforehand
from graphpass.regions.holders import as_parts
from graphpass.regions.symbols import REAL_SIZES

_MAX_REMEMBERED = 4096
MadeInputs: TypeAlias = Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
"""The values of inputs that are made on the CPU before a call with these arguments, see ``regions.fromsizes``. They are
made in every call: the call may write to them or return them, and random draws come along."""


class RealSizes:
    """The real sizes of a call, those of all symbols, as one vector of int32.

    Calls of equal sizes have one vector, which nothing changes: a size never changes under a graph that is running.
    """

    def __init__(self, places: Mapping[sympy.Symbol, tuple[int, int | None]], device: torch.device) -> None:
        self._places, self._device = tuple(places.values()), device
        self.is_read = True  #: by a region; else all calls have one vector, which graphs read in place
        #: symbol -> its entry in the vector
        self.entries = {symbol: entry for entry, symbol in enumerate(places)}
        self._vectors: dict[tuple[int, ...], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_vectors": {}}

    def of(self, args: Sequence[Any]) -> torch.Tensor:
        """The vector for a call with these arguments."""
        sizes = symbolic.sizes_at(self._places, args) if self.is_read else (0,) * len(self._places)
        vector = self._vectors.get(sizes)  # guard: real_size_of_the_call
        if vector is None:
            if len(self._vectors) >= _MAX_REMEMBERED:
                self._vectors.clear()
            with torch.inference_mode(False), torch.no_grad():
                parts = [torch.full((1,), size, dtype=torch.int32, device=self._device) for size in sizes]
                vector = torch.cat(parts)
            if not self.is_read:
                memory.mark_static_address(vector)
            if not memory.is_capturing_stream(self._device):  # guard: real_sizes_of_a_users_capture
                vector = self._vectors.setdefault(sizes, vector)  # guard: real_sizes_of_threads
        return vector


class AppendedInputs:
    """The values of the appended inputs in each call."""

    def __init__(
        self, attributes: Sequence[torch.Tensor], sizes: RealSizes | None, made: MadeInputs | None = None
    ) -> None:
        self._attributes, self._made = tuple(attributes), made
        self.sizes = sizes  #: the real sizes; None if there are none
        #: which attribute differs from its trace: ``tensor.data = other`` keeps Dynamo's guards
        self.changed = partial(Layouts(attributes).changed, self._attributes)

    def __reduce__(self) -> Any:  # tensors belong to a process
        return (AppendedInputs, ((), self.sizes)) if self.sizes is not None else (type(None), ())

    def after(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Dynamo's arguments, and the appended ones."""
        made = () if self._made is None else self._made(args)
        return (*args, *self._attributes, *made, *(() if self.sizes is None else (self.sizes.of(args),)))

    def at_sizes_of(self, args: Sequence[Any]) -> list[Any]:
        """All arguments, the real sizes being those of the others."""
        return list(args) if self.sizes is None else [*args[:-1], self.sizes.of(args)]


def attributes_read(graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """{path: tensor} of the tensor attributes that a graph reads; without subgraphs of higher-order operators."""
    paths = dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="get_attr"))
    values = {path: operator.attrgetter(path)(graph_module) for path in paths}
    return {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}


def lift_attributes(graph_module: fx.GraphModule, sources: Mapping[str, str]) -> list[torch.Tensor]:
    """Turn the tensor attributes that a graph reads into inputs with static addresses; of wrappers, what is in them."""
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
    for path, placeholder in lifted.items():
        if is_wrapper(attributes[path]):
            as_parts(placeholder)
    return [tensor for path in lifted for _, tensor in plain_tensors(attributes[path])]


def append_made(graph: fx.Graph) -> MadeInputs | None:
    """Turn what a graph makes on the CPU from sizes, and copies to its device, into inputs; None if there is none."""
    part = found_beforehand(graph)
    if part is None:
        return None
    of_sizes, run, copies, others = part
    places, symbols = symbolic.places_of(map(value_of, graph.find_nodes(op="placeholder"))), symbols_in(of_sizes)
    if not symbols <= places.keys():
        return None
    read = {symbol: places[symbol] for symbol in symbols}
    for node in copies:
        node.replace_all_uses_with(append_placeholder(graph, node.name, {"example_value": value_of(node)}))
    for node in (*reversed(copies), *reversed(others)):
        graph.erase_node(node)

    def made(args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        sizes = dict(zip(read, symbolic.sizes_at(read.values(), args), strict=True))
        with torch.inference_mode(False), torch.no_grad():
            return run(*[value_at(size, sizes) for size in of_sizes])

    return made


def append_placeholder(graph: fx.Graph, name: str, meta: Mapping[str, Any]) -> fx.Node:
    """A new placeholder after all others."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        placeholder = graph.placeholder(name)
    placeholder.meta = dict(meta)
    return placeholder


def append_real_sizes(graph_module: fx.GraphModule, settings: Settings) -> RealSizes | None:
    """Append the vector of real sizes to a graph whose padding may be made; None for others."""
    graph = graph_module.graph
    values = list(map(value_of, graph.find_nodes(op="placeholder")))
    fake_mode = symbolic.fake_mode_of(values)
    places = {symbol: place for symbol, place in symbolic.places_of(values).items() if not symbolic.is_unbacked(symbol)}
    if not settings.makes_padding() or not places or fake_mode is None:
        return None
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    device = next((one for one in devices if one.type != "cpu"), devices[0])
    with symbolic.quiet_shapes(fake_mode), fake_mode, torch.no_grad():
        vector = torch.empty((len(places),), dtype=torch.int32, device=device)
    append_placeholder(graph, "graphpass_real_sizes", {"example_value": vector, REAL_SIZES: True})
    return RealSizes(places, device)
