"""Whether a graph reads an input only at positions that it computes from sizes."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import symbolic
from graphpass.regions.analysis import CALLS, free_symbols
from graphpass.regions.execute import tensors_in, value_of
from graphpass.regions.opnames import names_of
from graphpass.regions.split import Partition

__all__ = ["is_read_by_position"]

# Operators whose row i depends on row i of their input alone.
ROW_BY_ROW = frozenset(
    f"aten::{name}" for name in ("to", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not")
)


def is_read_by_position(partition: Partition, name: str, symbol: sympy.Symbol) -> bool:
    """Whether a graph only indexes an input's dimensions of size ``symbol``, at positions computed from other sizes.

    The other sizes then bound the rows that are read, for any tensor data: ``mask[arange(n)]`` where ``n`` is another
    input's size. False if a node computes with ``symbol``, mixes rows, or indexes by data, which may be negative.

    Args:
        partition: a split graph.
        name: the input's name in the graph.
        symbol: the size of the dimensions to check.
    """
    if any(symbol in getattr(size, "free_symbols", ()) for shape in partition.output_shapes for size in shape or ()):
        return False
    rows = {name}
    from_data = {graph_input.name for graph_input in partition.inputs if isinstance(graph_input.value, torch.Tensor)}
    for region in partition.regions:
        for node in region.graph_module.graph.nodes:
            if not _keeps_to_positions(node, symbol, rows, from_data):
                return False
            if node.op in CALLS and any(argument.name in from_data for argument in node.all_input_nodes):
                from_data.add(node.name)
    return True


def _keeps_to_positions(node: fx.Node, symbol: sympy.Symbol, rows: set[str], from_data: set[str]) -> bool:
    value = value_of(node)
    is_number = value is not None and not any(True for _ in tensors_in(value))
    if is_number and symbol in free_symbols(value):
        return node.op == "placeholder" and not node.users
    if node.op not in CALLS or not any(argument.name in rows for argument in node.all_input_nodes):
        return True
    if names_of(node) & ROW_BY_ROW and len(node.all_input_nodes) == 1:
        rows.add(node.name)
        return True
    return _indexes_by_position(node, from_data) and symbol not in _sizes_of(value)


def _indexes_by_position(node: fx.Node, from_data: set[str]) -> bool:
    if node.target is not operator.getitem:
        return False
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(part, fx.Node) and isinstance(value_of(part), torch.Tensor) and part.name not in from_data
        for part in parts
    )


def _sizes_of(value: Any) -> set[Any]:
    sizes = [symbolic.expression_of(size) for tensor in tensors_in(value) for size in tensor.shape]
    return {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}
