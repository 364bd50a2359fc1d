"""Tensors that a graph makes on the CPU from sizes and copies to its device: they become inputs, made before each call.

``torch.arange(n)`` on the CPU, what is computed from it and the copy would each cut the graph. On the device floats may
round otherwise, so the operators stay on the CPU. Random draws that nobody reads come along, so that the CPU's
generator advances as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from graphpass.compat import operators, symbolic
from graphpass.regions.analysis import free_symbols, main_device
from graphpass.regions.execute import tensors_in, value_of
from graphpass.regions.names import traits_of

Beforehand: TypeAlias = tuple[
    Sequence[sympy.Expr | int], Callable[..., tuple[torch.Tensor, ...]], Sequence[fx.Node], Sequence[fx.Node]
]
"""A part of a graph that can run before it: the sizes that it takes, a function of these that returns copies on the
device, the graph's nodes of the copies, and those on the CPU that only the copies read."""


def found_beforehand(graph: fx.Graph) -> Beforehand | None:
    """The part of a graph that can run before it; None if nothing can."""
    home = main_device(graph)
    changes_mode = any(operators.is_mode_op(node.target) and "cpu" in node.args for node in graph.nodes)
    if home is None or home.type in ("cpu", "meta") or changes_mode:
        return None
    inside = dict[fx.Node, None]()
    for node in graph.nodes:
        tensors = list(tensors_in(value_of(node)))
        if tensors and all(map(_is_cpu, tensors)) and traits_of(node, out=False) and _reads_sizes(node, inside):
            inside[node] = None
    leaving: list[fx.Node] | None = None
    while leaving is None or leaving:
        for node in leaving or ():
            inside.pop(node, None)
        copies = [node for node in graph.nodes if _is_copy(node, inside)]
        around = {*inside, *copies}
        leaving = [node for node in inside if not (_reads_sizes(node, inside) and around.issuperset(node.users))]
        if any(_may_draw(node) for node in graph.nodes if node not in inside):  # guard: draws_in_their_order
            leaving += filter(_draws, inside)
    if not copies and not any(map(_draws, inside)):
        return None
    read = (argument for node in (*inside, *copies) for argument in node.all_input_nodes if argument not in inside)
    sizes, part = dict.fromkeys(map(_size, read)), fx.Graph()
    made: dict[Any, fx.Node] = {size: part.placeholder(f"size_{at}") for at, size in enumerate(sizes)}
    for node in (*inside, *copies):
        made[node] = part.node_copy(node, lambda argument: made[argument if argument in inside else _size(argument)])
    part.output(tuple(made[node] for node in copies))
    return tuple(sizes), fx.GraphModule(torch.nn.Module(), part), copies, tuple(inside)


def _size(node: fx.Node) -> sympy.Expr | int | None:
    """The size that a node is, if the inputs' sizes determine it."""
    value = value_of(node)
    is_size = isinstance(value, (int, torch.SymInt)) and not any(map(symbolic.is_unbacked, free_symbols(value)))
    return symbolic.expression_of(value) if is_size else None


def _is_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _reads_sizes(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a call reads nothing but sizes and nodes ``inside``, and has no sizes of data."""
    is_of_data = any(map(symbolic.is_unbacked, free_symbols(value_of(node))))
    reads = all(argument in inside or _size(argument) is not None for argument in node.all_input_nodes)
    return node.op in ("call_function", "call_method") and reads and not is_of_data


def _is_copy(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    value, reads_them = value_of(node), any(argument in inside for argument in node.all_input_nodes)
    is_on_device = isinstance(value, torch.Tensor) and not _is_cpu(value)
    return reads_them and is_on_device and not _draws(node) and _reads_sizes(node, inside)


def _draws(node: fx.Node) -> bool:
    return any(torch.Tag.nondeterministic_seeded in traits.tags for traits in traits_of(node, out=True))


def _may_draw(node: fx.Node) -> bool:
    """Whether a node may use the CPU's generator: a draw there, or a call of code that is not torch's."""
    if node.op in ("placeholder", "get_attr", "output", "call_method") or _draws(node):
        return _draws(node) and any(map(_is_cpu, tensors_in(value_of(node))))
    module = str(getattr(node.target, "__module__", "")).replace("torch._ops.aten", "torch")
    is_known = module.startswith(("torch", "_operator", "builtins")) and not module.startswith("torch._ops")
    return operators.is_higher_order(node.target) or not is_known
