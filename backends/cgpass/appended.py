"""Inputs that the backend appends to the arguments that Dynamo passes.

Dynamo does not pass every tensor that its graph reads: the parameters and the state of an optimizer are attributes of
the graph module. Each of these becomes a placeholder after Dynamo's own. So all tensors that a graph reads are inputs,
with the same names, address guards and undo of a capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpass.compat import dynamo, memory

__all__ = ["AppendedInputs", "append_placeholder", "attributes_read", "lift_attributes"]


class AppendedInputs:
    """The values of the appended inputs in each call.

    Args:
        attributes: attributes of Dynamo's graph module, in the order of their placeholders. Dynamo guards the identity
            of these objects, and drops the callable when the optimizer that owns them dies.
    """

    def __init__(self, attributes: Sequence[torch.Tensor]) -> None:
        self._attributes = tuple(attributes)
        self._traced = [_layout(tensor) for tensor in attributes]
        self._have_traced_layouts = memory.layouts_of(attributes)

    def after(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Dynamo's arguments, and the appended ones."""
        return (*args, *self._attributes)

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
    values = {path: _attribute(graph_module, path) for path in paths}
    return {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}


def lift_attributes(graph_module: fx.GraphModule, sources: Mapping[str, str]) -> AppendedInputs | None:
    """Turn the tensor attributes that a graph reads into inputs with static addresses.

    Args:
        graph_module: the module, whose graph is changed.
        sources: {path: where Dynamo found the tensor}, for names.

    Returns:
        The appended inputs; None if the graph reads no attribute.
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
    return AppendedInputs([attributes[path] for path in lifted]) if lifted else None


def append_placeholder(graph: fx.Graph, name: str, meta: Mapping[str, Any]) -> fx.Node:
    """A new placeholder after all others."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        placeholder = graph.placeholder(name)
    placeholder.meta = dict(meta)
    return placeholder


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _shown(layout: tuple[Any, ...]) -> str:
    shape, strides, dtype, device = layout
    return f"{shape} {dtype} on {device} with strides {strides}"
