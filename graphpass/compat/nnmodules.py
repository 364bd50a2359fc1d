"""Module internals and tensor subclasses."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensor_dicts(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The (parameters, buffers) dicts of a module, without submodules; not copies, so that writes change the module."""
    return module._parameters, module._buffers


def child_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The dict of a module's direct submodules; not a copy, so that writes change the module."""
    return module._modules


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module instance behaves differently from its class: it has hooks, or a ``forward`` of the instance.

    Weight norm, which replaces tensors before each call, counts because it works by a hook.
    """
    attributes = vars(module)
    return "forward" in attributes or any(bool(value) for name, value in attributes.items() if name.endswith("_hooks"))


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """The hook dicts, of all kinds, of a module and its submodules; not copies."""
    return [hooks for part in module.modules() for name, hooks in vars(part).items() if "_hooks" in name]


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class defines ``__torch_dispatch__`` (DTensor, for example); False for fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return is_traceable_wrapper_subclass(tensor) or (
        not isinstance(tensor, FakeTensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of which a wrapper (a nested tensor, a DTensor) consists; empty for any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for part in parts for plain in inner_tensors(part) or (part,)]


def views_wrapper(value: Any) -> bool:
    """Whether a value is a plain tensor, but a view of a tensor that wraps others."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return base is not None and not inner_tensors(value) and bool(inner_tensors(base))


def path_of_graph(graph_module: Any) -> str:
    """The path of the module whose code the nodes of a graph are, ``layers.3.attn``; empty for the whole model.

    Nodes of several modules have the path that these share; if they share none, the paths of the first and the last.
    """
    paths = [path for node in graph_module.graph.nodes if (path := _path_of_node(node)) is not None]
    if not paths:
        return ""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    shared = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    if any(shared):
        return ".".join(shared)
    first, last = next(filter(None, paths), ""), next(filter(None, reversed(paths)), "")
    return f"{first} to {last}" if first != last else first


def _path_of_node(node: Any) -> str | None:
    stack = node.meta.get("nn_module_stack")
    if not stack or not node.op.startswith("call"):
        return None
    path, _ = list(stack.values())[-1]
    return ".".join(re.findall(r"[A-Za-z_0-9]+", re.sub(r"^L\['(\w+)'\]|_modules", "", path)))
