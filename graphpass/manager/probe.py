"""Trying out whether a graph reads an input beyond the rows that a key field has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass import compat

__all__ = ["Probe"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Runs a graph as it was traced, on copies of its inputs, with one row of a key field cut off.

    Attributes:
        reached: the callable whose graph is tried.
        args: its arguments; the field has a size of at least 2 in them.
        declared: {argument: {dimension: key field}}.
        field: the key field.
    """

    reached: Any
    args: Sequence[Any]
    declared: Mapping[str, Mapping[int, str]]
    field: str

    def ignores_rows_beyond(self, name: str, dim: int) -> bool:
        """Whether dimension ``dim`` of input ``name`` may be longer than the field, whatever stands there.

        False also where the graph cannot be run outside of its model (an op that reads the forward context).
        """
        try:
            cut = self._run(name, dim, beyond=None)
            return all(_alike(cut, self._run(name, dim, beyond=change)) for change in (torch.clone, _other_values))
        except Exception:
            return False

    def _run(self, name: str, dim: int, *, beyond: Any) -> list[Any]:
        """The outputs, with the input cut as well (``beyond`` is None) or with its last row changed by ``beyond``."""
        tensors: dict[int, torch.Tensor] = {}
        for position, (given, value) in enumerate(zip(self.reached.partition.inputs, self.args, strict=True)):
            if not isinstance(value, torch.Tensor):
                continue
            tensor = value.detach().clone() if position in self.reached.partition.mutated_inputs else value
            for declared_dim, field in self.declared.get(given.source_name or "", {}).items():
                if field == self.field:
                    tensor = tensor.narrow(declared_dim, 0, tensor.shape[declared_dim] - 1)
            if given.source_name == name:
                rows = tensor.shape[dim] - 1
                kept = tensor.narrow(dim, 0, rows)
                tensor = kept if beyond is None else torch.cat([kept, beyond(tensor.narrow(dim, rows, 1))], dim)
            tensors[position] = tensor.contiguous() if tensor is not value else value
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
            torch.manual_seed(0)
            outputs = self.reached.partition.stitched(*self._with_sizes(tensors))
        return list(compat.tree_flatten(outputs)[0])

    def _with_sizes(self, tensors: Mapping[int, torch.Tensor]) -> list[Any]:
        inputs = self.reached.partition.inputs
        symbols: dict[sympy.Basic, int] = {}
        for position, tensor in tensors.items():
            for size, found in zip(inputs[position].value.shape, tensor.shape, strict=True):
                expression = compat.expression_of(size)
                if isinstance(expression, sympy.Symbol):
                    symbols[expression] = found
        return [tensors.get(p, self._size(inputs[p].value, value, symbols)) for p, value in enumerate(self.args)]

    def _size(self, traced: Any, value: Any, symbols: Mapping[sympy.Basic, int]) -> Any:
        expression = compat.expression_of(traced)
        if not isinstance(expression, sympy.Basic) or not expression.free_symbols <= symbols.keys():
            return value
        return int(expression.xreplace(dict(symbols)))


def _other_values(rows: torch.Tensor) -> torch.Tensor:
    """Valid values that show in whatever reads them."""
    if rows.is_floating_point() or rows.is_complex():
        return torch.full_like(rows, float("nan"))
    return ~rows if rows.dtype is torch.bool else torch.where(rows == 0, 1, 0).to(rows.dtype)


def _alike(outputs: Sequence[Any], others: Sequence[Any]) -> bool:
    if len(outputs) != len(others):
        return False
    return all(_same(one, other) for one, other in zip(outputs, others, strict=True))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )
