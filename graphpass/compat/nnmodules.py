"""Module internals and tensor subclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensor_dicts(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its own parameters and buffers: the dicts themselves, no copies."""
    return module._parameters, module._buffers


def child_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The dict in which a module keeps its direct submodules: the dict itself, no copy."""
    return module._modules


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling, saving or loading a module does more than its class says: what another one would not do.

    Tensors replaced under the module's feet (weight norm) and forwards exchanged in the instance go by hooks as well.
    """
    kept = vars(module)
    return "forward" in kept or any(bool(value) for name, value in kept.items() if name.endswith("_hooks"))


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """The dicts in which a module and those within it keep their hooks of all kinds."""
    return [kept for part in module.modules() for name, kept in vars(part).items() if "_hooks" in name]


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others behind ``__torch_dispatch__`` (DTensor and its like)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return is_traceable_wrapper_subclass(tensor) or (
        not isinstance(tensor, FakeTensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )
