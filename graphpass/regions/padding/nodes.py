"""The nodes of an aten graph as plain records."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from graphpass.compat import operators
from graphpass.regions.padding.values import Size

__all__ = [
    "CONSTANT",
    "GETITEM",
    "NUMBER",
    "AtenNode",
    "Ref",
    "ResultShape",
    "TensorShape",
    "operator_named",
    "references",
]

GETITEM = "getitem"
NUMBER = "number"
CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The symbolic sizes and the dtype of a tensor."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """An earlier value of the graph by its index: the inputs come first, then the nodes in order."""

    index: int


ResultShape: TypeAlias = "TensorShape | Size | tuple[ResultShape, ...] | None"
"""The shape of a node's result: a tensor, a number, a tuple of these, or None."""


@dataclass(frozen=True, slots=True)
class AtenNode:
    """One operator of the graph.

    Attributes:
        op: the qualified name, ``aten::add.Tensor``; or ``getitem``, ``number`` or ``constant``.
        arguments: (schema name, argument) pairs, defaults included; tensors are :class:`Ref`, symbolic sizes are
            expressions.
        result: the shape of the result.
        where: the line of the user's code.
        writes: schema names of the arguments that the operator writes to.
        has_token: the operator is ordered with other effects, and its first result is a token.
        bases: for an op inside ``auto_functionalized``, the schema names of the written tensors, in the order in which
            their new values follow the results.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]
    result: ResultShape
    where: str = ""
    writes: tuple[str, ...] = ()
    has_token: bool = False
    bases: tuple[str | None, ...] = ()


def references(argument: Any) -> Iterator[int]:
    """The indices of the earlier values in ``argument``, also those nested in tuples."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)


@functools.lru_cache(maxsize=4096)
def operator_named(name: str) -> operators.OpOverload | None:
    """The operator with a qualified name (``aten::add.Tensor``); None if it does not exist."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = operators.operator_packet(namespace, base)
    op = getattr(packet, overload or "default", None)
    return op if isinstance(op, operators.OpOverload) else None
