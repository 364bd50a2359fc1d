"""Inputs that the backend appends to the arguments that Dynamo passes.

Dynamo does not pass every tensor that its graph reads: the parameters and the state of an optimizer are attributes of
the graph module. Each of these becomes a placeholder after Dynamo's own. So all tensors that a graph reads are inputs,
with the same names, address guards and undo of a capture. The real sizes of padded dimensions follow them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgpass.graphsizes import Expression, symbols_in, value_at
from graphpass.compat import dynamo, memory

__all__ = ["AppendedInputs", "RealSizes", "append_placeholder", "attributes_read", "lift_attributes"]

_MAX_REMEMBERED = 4096


class RealSizes:
    """Real sizes of a call as 0-d int64 tensors.

    Each call has its own tensors, which the wrappers stage like any argument. So a size never changes under a graph
    that is running, or under a call of another thread.

    Args:
        wanted: (size, device) of each tensor.
        places: (position of an argument, dimension) where each symbol is read; dimension None for an int argument.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Expression, torch.device]],
        places: Mapping[sympy.Symbol, tuple[int, int | None]],
    ) -> None:
        self._wanted = tuple(wanted)
        self._places = {symbol: places[symbol] for symbol in symbols_in(size for size, _ in wanted)}
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors for a call with these arguments."""
        read = tuple([args[p] if dim is None else args[p].shape[dim] for p, dim in self._places.values()])
        sizes = self._known.get(read)  # guard: real_size_of_the_call
        if sizes is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            named = dict(zip(self._places, read, strict=True))
            sizes = self._known[read] = tuple(value_at(size, named) for size, _ in self._wanted)
        devices = [device for _, device in self._wanted]
        return [torch.full((), n, dtype=torch.int64, device=device) for n, device in zip(sizes, devices, strict=True)]


class AppendedInputs:
    """The values of the appended inputs in each call.

    Args:
        attributes: attributes of Dynamo's graph module, in the order of their placeholders. Dynamo guards the identity
            of these objects, and drops the callable when the optimizer that owns them dies.
        sizes: the real sizes, whose placeholders follow; None if there are none.
    """

    def __init__(self, attributes: Sequence[torch.Tensor], sizes: RealSizes | None) -> None:
        self._attributes, self._sizes = tuple(attributes), sizes
        self._traced = [_layout(tensor) for tensor in attributes]
        self._have_traced_layouts = memory.layouts_of(attributes)

    def after(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Dynamo's arguments, and the appended ones."""
        return (*args, *self._attributes, *(self._sizes.of(args) if self._sizes is not None else ()))

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
    """Turn the tensor attributes that a graph reads into inputs with static addresses.

    Args:
        graph_module: the module, whose graph is changed.
        sources: {path: where Dynamo found the tensor}, for names.

    Returns:
        The attributes, in the order of their placeholders.
    """
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
    graph_module.recompile()
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
