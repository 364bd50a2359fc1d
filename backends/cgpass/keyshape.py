"""Checks before a capture that the arguments of a call have the sizes that its key names.

A graph captured from arguments of other sizes would later refuse arguments of the right sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpass.compat import symbolic
from graphpass.dispatch.sizes import SizeGrid
from graphpass.errors import ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.options import Settings
from graphpass.regions.symbols import GraphInput, key_symbols

__all__ = ["KeyShape"]


@dataclass(frozen=True, slots=True)
class KeyShape:
    """The dimensions of one graph's inputs that its keys name.

    Attributes:
        declared: (position, dimension, key field) of the dimensions that ``dynamic_dims`` declares.
        symbolic: (position, dimensions) of the inputs whose sizes depend on the graph's only symbol, or on its only
            marked symbol. Empty if dimensions are declared, or if several symbols make it ambiguous which one the key
            counts.
        names: {position: name of the input} for errors.
        grid: the fields of the keys; None if no option names them.
    """

    declared: tuple[tuple[int, int, str], ...]
    symbolic: tuple[tuple[int, tuple[int, ...]], ...]
    names: Mapping[int, str]
    grid: SizeGrid | None
    _fields: dict[BatchDescriptor, Mapping[str, int]] = field(default_factory=dict)
    _fitting: dict[BatchDescriptor, int] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Sequence[GraphInput], settings: Settings, *, is_first: bool) -> KeyShape:
        """The key dimensions of a graph with these inputs; ``is_first``: no graph of the model was compiled before.

        A later graph may lie behind a graph break, where no input has a declared name. In the first graph that is a
        mistake in the names, and then its symbols tell.
        """
        declared = tuple(
            (position, dim, name)
            for position, graph_input in enumerate(inputs)
            for dim, name in settings.dynamic_dims.get(graph_input.source_name or "", {}).items()
            if isinstance(graph_input.value, torch.Tensor) and not graph_input.is_exchanged
        )
        return cls(
            declared=declared,
            symbolic=() if declared or (settings.dynamic_dims and not is_first) else _symbolic(inputs),
            names={position: graph_input.shown for position, graph_input in enumerate(inputs)},
            grid=SizeGrid.of(settings.capture_sizes) if settings.capture_sizes else None,
        )

    def fields(self) -> tuple[tuple[str, int, int], ...]:
        """(key field, position, dimension) of an input that has its size, for each field."""
        if self.declared:
            return tuple({name: (name, position, dim) for position, dim, name in reversed(self.declared)}.values())
        return tuple(("num_tokens", position, dims[0]) for position, dims in self.symbolic[:1])

    def check(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Compare the arguments' sizes with the key's.

        Raises:
            ShapeError: a dimension has another size than its key field, or no size in the key equals a dimension or a
                product of dimensions.
        """
        if self.declared:
            self._check_declared(descriptor, args)
        elif self.symbolic:
            position, dims = self.symbolic[0]
            size = args[position].shape[dims[0]]
            if self._fitting.get(descriptor) != size:  # guard: key_fits_the_symbol
                self._check_symbolic(descriptor, args)
                self._fitting.setdefault(descriptor, size)

    def _check_declared(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        padded = self._fields.get(descriptor)
        if padded is None:
            padded = _named(descriptor) if self.grid is None else self.grid.fields(descriptor)
            self._fields[descriptor] = padded
        for position, dim, name in self.declared:
            expected = padded.get(name)
            found = args[position].shape[dim]
            if expected is not None and expected != found:  # guard: key_names_the_shape
                raise ShapeError(
                    f"input {self.names[position]!r} does not have the size its key names",
                    expected=f"{name}={expected} in dimension {dim} (key {descriptor})",
                    found=str(found),
                    remedy="pad the input to the descriptor's size",
                )

    def _check_symbolic(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Without declared dimensions, the key may count a dimension, or a product of dimensions of one input."""
        counts = {*_named(descriptor).values()}
        for position, dims in self.symbolic:
            if not counts.isdisjoint(_products(args[position].shape, dims)):
                return
        position, dims = self.symbolic[0]
        found = tuple(args[position].shape)
        raise ShapeError(
            f"input {self.names[position]!r} does not have a size that its key names",
            expected=f"{' or '.join(map(str, sorted(counts)))} in dimension {dims[0]}, or as a product of dimensions "
            f"(key {descriptor})",
            found=f"{found[dims[0]]}, in shape {found}",
            remedy="pad the input to the descriptor's size; if the key counts something else, declare the dimension "
            f"with a field of another name: dynamic_dims={{{self.names[position]!r}: {{{dims[0]}: 'rows'}}}}",
        )


def _named(descriptor: BatchDescriptor) -> dict[str, int]:
    """{key field: size} of a descriptor, without a grid that names the fields."""
    named = {name: value for name, value in descriptor.extra if type(value) is int}
    named["num_tokens"] = descriptor.num_tokens
    if descriptor.num_reqs is not None:
        named["num_reqs"] = descriptor.num_reqs
    return named


def _products(shape: Sequence[int], dims: Sequence[int]) -> Iterator[int]:
    """All products of dimensions with at least one factor that is in ``dims`` or before ``dims[0]``.

    The key may count a fixed dimension before ``dims``: in a graph for a fixed batch size, the symbol may be the width.
    """
    for count in range(1, len(shape) + 1):
        for chosen in itertools.combinations(range(len(shape)), count):
            if chosen[0] < dims[0] or not set(chosen).isdisjoint(dims):
                yield math.prod(shape[dim] for dim in chosen)


def _symbolic(inputs: Sequence[GraphInput]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    counted: frozenset[Any] = getattr(key_symbols(inputs, {}).get("num_tokens"), "free_symbols", frozenset())
    found = []
    for position, graph_input in enumerate(inputs):
        if isinstance(graph_input.value, torch.Tensor) and not (graph_input.is_static or graph_input.is_exchanged):
            sizes = [symbolic.expression_of(size) for size in graph_input.value.shape]
            dims = [dim for dim, size in enumerate(sizes) if counted & getattr(size, "free_symbols", frozenset())]
            if dims:
                found.append((position, tuple(dims)))
    return tuple(found)
