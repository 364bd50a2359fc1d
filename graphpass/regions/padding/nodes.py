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
    """The symbolic sizes and the type of a tensor."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """An earlier value of the graph: an input by its position, then the nodes in order."""

    index: int


ResultShape: TypeAlias = "TensorShape | Size | tuple[ResultShape, ...] | None"
"""What a node returns: a tensor, a number, several of them, or nothing."""


@dataclass(frozen=True, slots=True)
class AtenNode:
    """One operator of the graph.

    Attributes:
        op: its qualified name, ``aten::add.Tensor``; ``getitem``, ``number`` and ``constant`` are no operators.
        arguments: (schema name, argument) pairs, defaults included. Sizes, numbers and :class:`Ref` are what they hold.
        result: what it returns.
        where: the user's line.
        writes: schema names of the arguments that it writes to.
        has_token: it runs in order with other effects: the first result is a token.
        bases: for a custom op made functional, the written tensors in the order in which they follow the results.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]
    result: ResultShape
    where: str = ""
    writes: tuple[str, ...] = ()
    has_token: bool = False
    bases: tuple[str | None, ...] = ()


def references(argument: Any) -> Iterator[int]:
    """The positions of the earlier values that ``argument`` holds, nested in tuples or not."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)


@functools.lru_cache(maxsize=4096)
def operator_named(name: str) -> operators.OpOverload | None:
    """The operator of a qualified name, ``aten::add.Tensor``; None if there is none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = operators.operator_packet(namespace, base)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, operators.OpOverload) else None
