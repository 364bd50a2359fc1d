"""Nested containers of tensors (pytrees)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

flatten = pytree.tree_flatten
"""``flatten(container)`` returns its (leaves, structure)."""

unflatten = pytree.tree_unflatten
"""``unflatten(leaves, structure)`` returns the container."""

map_only = pytree.tree_map_only
"""``map_only(kind, function, container)`` returns the container with ``function`` of each leaf of this class."""


_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it; for builtin containers not by torch's slow pytree."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return function(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, item) for item in value])
    if kind is dict:
        return {name: map_tensors(function, item) for name, item in value.items()}
    return pytree.tree_map_only(torch.Tensor, function, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in the order of :data:`flatten`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def builder_of(spec: Any) -> Callable[[list[Any]], Any]:
    """A function from a list of leaves to a container of structure ``spec``; flat tuples and lists take a fast path."""
    if spec.is_leaf():
        return operator.itemgetter(0)
    if spec.type in (tuple, list) and spec == pytree.tree_flatten(spec.type([0] * spec.num_leaves))[1]:
        return tuple if spec.type is tuple else list
    return partial(pytree.tree_unflatten, treespec=spec)
