"""Process groups of ``torch.distributed``: the group of a collective in a graph, its timeout, and its end."""

from __future__ import annotations

import atexit
import importlib
import socket
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed, fx

from graphpass.compat import trees
from graphpass.errors import unreachable

COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")


def group_of(nodes: Iterable[fx.Node]) -> str:
    """The only group whose collectives the nodes name; empty for all ranks."""
    called = [node for node in nodes if str(getattr(node.target, "__module__", "")).endswith(COLLECTIVES)]
    names = {argument for node in called for argument in node.args[-1:] if isinstance(argument, str)}
    return next((name for name in names if group_named(name) is not distributed.group.WORLD and len(names) == 1), "")


def group_named(name: str) -> Any:
    """The process group of this name; the default group, which is None, for an empty one."""
    c10d: Any = distributed.distributed_c10d
    return c10d._resolve_process_group(name) if name else None


def text_of(value: Any) -> str | None:
    """A mesh, or how a DTensor lies on one; None for what is neither."""
    if not distributed.is_available():
        return None
    if isinstance(value, distributed.device_mesh.DeviceMesh):
        groups = [group.group_name for group in value.get_all_groups()]
        return f"{value.device_type} {value.mesh.tolist()} {value.mesh_dim_names} {groups}"
    return repr(value) if isinstance(value, torch._C._distributed.Placement) else None


def finished(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The results of a collective once they are there."""
    try:
        return trees.map_tensors(torch.ops._c10d_functional.wait_tensor, collective(*args, **kwargs))
    except RuntimeError as error:
        raise unreachable(str(error).strip().split("\n")[0]) from error


def timeout_s(group: Any) -> float:
    """The seconds that collectives of a group wait for the other ranks."""
    group = group or distributed.group.WORLD
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    found = [each._timeout.total_seconds() for each in options if each is not None]
    return float(min(found, default=distributed.constants.default_pg_timeout.total_seconds()))


class ClosedBeforeGroups:
    """Closes its owner before the default group or the process ends.

    A communicator that NCCL has captured in a graph waits at its end for the end of the graph.
    """

    def __init__(self) -> None:
        self._owner: weakref.ref[Any] | None = None

    def register(self, owner: Any) -> None:
        """Close ``owner``, which is referred to weakly."""
        comms = distributed.distributed_c10d._world.comms
        if self not in comms:  # those of an earlier default group are gone
            comms.append(self)  # guard: closed_before_groups
        if self._owner is None:
            atexit.register(self.finalize)
        self._owner = weakref.ref(owner)

    def finalize(self) -> None:
        """Called by ``destroy_process_group`` before it ends any communicator."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.close()


def facts_of(group: Any) -> dict[str, Any]:
    """Of this rank and a group, see ``graphpass.ranks.lockstep``."""
    group = group or distributed.group.WORLD
    kind = torch.device("cuda" if "cuda" in {device.type for device in group._device_types} else "cpu")
    backend = group._get_backend(kind)
    is_nccl = backend.name() == "nccl"
    return {
        "node": socket.gethostname(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_nccl else "",
        "is_warm": not is_nccl or backend._get_sequence_number_for_group() > 0,
        "is_symmetric": importlib.import_module("torch.distributed._symmetric_memory").is_symm_mem_enabled_for_group(
            group.group_name
        ),
    }
