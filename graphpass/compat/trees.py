"""Nested containers of tensors (pytrees)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

flatten = pytree.tree_flatten
"""(leaves, structure) of a nested container."""

unflatten = pytree.tree_unflatten
"""The container of a list of leaves and a structure."""


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def builder_of(spec: Any) -> Callable[[list[Any]], Any]:
    """What makes a list of leaves into the structure ``spec``; for the flat ones, without walking it."""
    if spec.is_leaf():
        return _only
    if spec.type in (tuple, list) and spec == pytree.tree_flatten(spec.type([0] * spec.num_leaves))[1]:
        return tuple if spec.type is tuple else list
    return partial(_build_tree, spec)


def _only(leaves: list[Any]) -> Any:
    return leaves[0]


def _build_tree(spec: Any, leaves: list[Any]) -> Any:
    return pytree.tree_unflatten(leaves, spec)
