"""What a model's first graph says about its arguments: which dimensions carry which key field.

A dimension belongs to a key field because the graph's symbolic shape says so. Where the graph works for any size of it
(a mask that is gathered from), a dimension of the field's size belongs to the field if the graph reads it at positions
alone that it computes from other sizes: then padding it changes nothing. Nothing goes by equal sizes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass import compat
from graphpass.errors import OptionError
from graphpass.partition.reads import is_read_by_position

__all__ = ["DynamicDims", "SharedDims", "candidate_dims", "shared_dims", "stand_in", "trace_sizes"]

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


def candidate_dims(
    declared: DynamicDims, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """Dimensions of undeclared arguments that may carry a key field: they have its size in this call.

    Where several fields have that size, and for size 1, which much else has, a dimension counts only if some declared
    argument carries the field in the same place.
    """
    places = {
        field: {dim % tensors[name].dim() for name, dims in declared.items() for dim, f in dims.items() if f == field}
        for field in sizes
    }

    def field_of(dim: int, size: int) -> str | None:
        fields = [field for field in sizes if sizes[field] == size]
        if size == 1 or len(fields) > 1:
            fields = [field for field in fields if dim in places[field]]
        return fields[0] if len(fields) == 1 else None

    return {
        name: {dim: field for dim, size in enumerate(tensor.shape) if (field := field_of(dim, size)) is not None}
        for name, tensor in tensors.items()
        if name not in declared
    }


def trace_sizes(sizes: Mapping[str, int], ladders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes to trace with: torch makes a constant of size 1, so each field of size 1 gets one of its own."""
    chosen: dict[str, int] = {}
    for field, size in sizes.items():
        others = (*sizes.values(), *chosen.values())
        is_constant = size == 1 < max(ladders[field])
        chosen[field] = next(n for n in itertools.count(2) if n not in others) if is_constant else size
    return chosen


def stand_in(tensor: torch.Tensor, dims: Mapping[int, str], sizes: Mapping[str, int]) -> torch.Tensor:
    """A copy to trace with: the dimensions in ``dims`` at these sizes, by repeating rows, and allowed to be dynamic."""
    copy = tensor.detach().clone()
    for dim, field in dims.items():
        if copy.shape[dim] != sizes[field]:
            rows = torch.arange(sizes[field], device=copy.device) % copy.shape[dim]
            copy = copy.index_select(dim, rows)
    for dim in dims:
        compat.mark_maybe_dynamic(copy, dim % tensor.dim())
    return copy


@dataclass(frozen=True, slots=True)
class SharedDims:
    """Which dimensions of which arguments are padded: {argument: {dimension: key field}}.

    Attributes:
        by_argument: of every tensor argument, the declared ones included.
        by_position: those among them that are padded because they are read by position; a later call may show that
            they are something else.
    """

    by_argument: Mapping[str, Mapping[int, str]]
    by_position: Mapping[str, Mapping[int, str]]

    def refuted_by(self, given: Mapping[str, Any], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
        """(argument, dimension) of those that do not have their field's size in this call."""
        return [
            (name, dim)
            for name, dims in self.by_position.items()
            for dim, field in dims.items()
            if isinstance(given.get(name), torch.Tensor) and given[name].shape[dim : dim + 1] != (sizes[field],)
        ]


def shared_dims(
    graph: Any,
    declared: DynamicDims,
    candidates: DynamicDims,
    tensors: Mapping[str, torch.Tensor],
) -> SharedDims:
    """The dimensions of every tensor argument that carry a key field, the declared ones included.

    Args:
        graph: the partition of the first graph that a call with stand-ins reached.
        declared: what the user declared.
        candidates: see :func:`candidate_dims`.
        tensors: the call's tensor arguments by name.

    Raises:
        OptionError: an argument that the first graph does not read has a dimension of a key field's size, so that
            nothing tells whether it has to be padded.
    """
    graph_inputs = graph.inputs
    symbols = _field_symbols(graph_inputs, declared)
    seen = {g.source_name: g for g in graph_inputs if isinstance(g.value, torch.Tensor)}
    shared: dict[str, dict[int, str]] = {}
    found: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        if name in declared:
            shared[name] = dict(declared[name])
        elif name in seen:
            expressions = [compat.expression_of(size) for size in seen[name].value.shape]
            shared[name] = {dim: symbols[e] for dim, e in enumerate(expressions) if e in symbols}
            for dim, field in candidates[name].items():
                symbol = expressions[dim]
                if (
                    dim not in shared[name]
                    and isinstance(symbol, sympy.Symbol)
                    and is_read_by_position(graph, seen[name].name, symbol)
                ):
                    shared[name][dim] = field
                    found.setdefault(name, {})[dim] = field
        elif candidates[name]:
            raise OptionError(
                f"nothing tells whether input {name!r} has to be padded",
                expected=f"dynamic_dims[{name!r}], or a first graph that reads it",
                found=f"shape {tuple(tensor.shape)} beside the key fields' sizes, and a graph that does not read it",
                remedy=f"declare it: dynamic_dims={{..., {name!r}: {{dim: field}}}}, or {{}} if it is never padded",
            )
        else:
            shared[name] = {}
    return SharedDims(shared, found)
