"""Process groups of ``torch.distributed``: the group of a collective in a graph, its timeout, and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed, fx

from graphpass.compat import trees

COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the collectives in graphs, which return tensors."""


def group_of(nodes: Iterable[fx.Node]) -> str:
    """The name of the only group whose collectives the nodes name; empty for all ranks."""
    called = [node for node in nodes if str(getattr(node.target, "__module__", "")).endswith(COLLECTIVES)]
    names = {argument for node in called for argument in node.args[-1:] if isinstance(argument, str)}
    return next((name for name in names if group_named(name) is not distributed.group.WORLD and len(names) == 1), "")


def group_named(name: str) -> Any:
    """The process group of this name; the default group, which is None, for an empty one."""
    c10d: Any = distributed.distributed_c10d
    return c10d._resolve_process_group(name) if name else None


def finished(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The results of a collective once they are there."""
    return trees.map_tensors(torch.ops._c10d_functional.wait_tensor, collective(*args, **kwargs))


def timeout_s(group: Any) -> float:
    """The seconds that collectives of a group wait for the other ranks."""
    group = group or distributed.group.WORLD
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    found = [each._timeout.total_seconds() for each in options if each is not None]
    return float(min(found, default=distributed.constants.default_pg_timeout.total_seconds()))


class _Finalized:
    """What ``destroy_process_group`` of the default group calls before it ends any communicator."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.finalize = action


def before_destruction(action: Callable[[], object]) -> bool:
    """Call ``action`` once before the default group is destroyed; returns whether this torch can do that."""
    known = getattr(distributed.distributed_c10d._world, "comms", None)
    if known is None:
        return False
    known.append(_Finalized(action))
    return True
