"""What a model's first graph says about its arguments: which dimensions carry which key field.

Nothing here goes by equal sizes: a dimension belongs to a key field because the graph's symbolic shape says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from graphpass import compat
from graphpass.errors import OptionError

__all__ = ["DynamicDims", "shared_dims"]

DynamicDims = Mapping[str, Mapping[int, str]]


def _field_symbols(graph_inputs: Sequence[Any], declared: DynamicDims) -> dict[sympy.Symbol, str]:
    """Symbol -> key field, from the inputs whose dimensions were declared."""
    symbols: dict[sympy.Symbol, str] = {}
    for given in graph_inputs:
        for dim, field in declared.get(given.source_name or "", {}).items():
            expression = compat.expression_of(given.value.shape[dim])
            if isinstance(expression, sympy.Symbol):
                symbols[expression] = field
    return symbols


def shared_dims(
    graph_inputs: Sequence[Any], declared: DynamicDims, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """The dimensions of every tensor argument that carry a key field, the declared ones included.

    Args:
        graph_inputs: inputs of the first graph.
        declared: what the user declared.
        given: the call's tensor arguments by name.
        sizes: real size of each key field in this call.

    Raises:
        OptionError: an argument that the first graph does not read has a dimension of a key field's size, so that
            nothing tells whether it has to be padded.
    """
    symbols = _field_symbols(graph_inputs, declared)
    seen = {g.source_name: g.value for g in graph_inputs if isinstance(g.value, torch.Tensor)}
    shared = {}
    for name, tensor in given.items():
        if name in declared:
            shared[name] = dict(declared[name])
        elif name in seen:
            expressions = [compat.expression_of(size) for size in seen[name].shape]
            shared[name] = {dim: symbols[e] for dim, e in enumerate(expressions) if e in symbols}
        elif any(size in sizes.values() for size in tensor.shape):
            raise OptionError(
                f"nothing tells whether input {name!r} has to be padded",
                expected=f"dynamic_dims[{name!r}], or a first graph that reads it",
                found=f"shape {tuple(tensor.shape)} beside sizes {dict(sizes)}, and a graph that does not read it",
                remedy=f"declare it: dynamic_dims={{..., {name!r}: {{dim: field}}}}, or {{}} if it is never padded",
            )
        else:
            shared[name] = {}
    return shared
