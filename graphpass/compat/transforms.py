"""Modes and function transforms: autocast, grad modes, ``torch.func``, forward-mode AD."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from graphpass.compat.attributes import torch_attribute


def transform_over(values: Iterable[Any]) -> str | None:
    """The name of the transform (``torch.func`` or forward-mode AD) that wraps one of the tensors; None if none does.

    A wrapped tensor represents data (a batch, a tangent) that its memory does not contain.
    """
    functorch: Any = torch._C._functorch
    level: int = getattr(torch.autograd.forward_ad, "_current_level", -1)
    if level < 0 and functorch.maybe_current_level() is None:
        return None
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if functorch.is_functorch_wrapped_tensor(value):
            return "a transform of torch.func"
        if level >= 0 and torch.autograd.forward_ad.unpack_dual(value, level=level).tangent is not None:
            return "forward-mode AD"
    return None


def active_transform() -> str | None:
    """The function transform around this code (``vmap``, ``grad``, ``jvp``), or forward-mode AD; None outside."""
    if torch._C._functorch.maybe_current_level() is not None:
        return str(torch._C._functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()
    return "forward-mode AD" if torch.autograd.forward_ad._current_level >= 0 else None


def wraps_for_functorch(target: Any) -> bool:
    """Whether ``target`` only wraps or unwraps a tensor for ``vmap`` or ``grad``; it must run inside the transform."""
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    return "_functorch" in module and ("wrap" in name or name.endswith("_batch_dim"))


@functools.cache
def mode_pairs() -> tuple[tuple[Any, Any], ...]:
    """The (enter, exit) functions that Dynamo emits around a ``with`` block, without those that this torch lacks."""
    paths = (
        ("amp.autocast_mode._enter_autocast", "amp.autocast_mode._exit_autocast"),
        ("autograd.grad_mode._enter_inference_mode", "autograd.grad_mode._exit_inference_mode"),
        ("_functorch.predispatch._vmap_increment_nesting", "_functorch.predispatch._vmap_decrement_nesting"),
        ("_functorch.predispatch._jvp_increment_nesting", "_functorch.predispatch._jvp_decrement_nesting"),
        ("_functorch.predispatch._enter_dual_level", "_functorch.predispatch._exit_dual_level"),
        ("_C._functorch._vmap_increment_nesting", "_C._functorch._vmap_decrement_nesting"),
        ("_C._functorch._jvp_increment_nesting", "_C._functorch._jvp_decrement_nesting"),
        ("_C._functorch._grad_increment_nesting", "_C._functorch._grad_decrement_nesting"),
        ("_C._functorch.pop_dynamic_layer_stack", "_C._functorch.push_dynamic_layer_stack"),
        ("_C._autograd._saved_tensors_hooks_disable", "_C._autograd._saved_tensors_hooks_enable"),
        ("ops.profiler._record_function_enter_new", "ops.profiler._record_function_exit._RecordFunction"),
    )
    pairs = ((torch_attribute(enter), torch_attribute(leave)) for enter, leave in paths)
    return tuple((enter, leave) for enter, leave in pairs if enter is not None and leave is not None)


@functools.cache
def mode_switches() -> tuple[Any, ...]:
    """Functions that set a mode to their first argument; Dynamo calls the same function to enter and to exit."""
    paths = (
        "_C._set_grad_enabled",
        "_C._set_fwd_grad_enabled",
        "_C._functorch.set_inplace_requires_grad_allowed",
        "nn.attention._sdpa_kernel",
        "_C._functorch.set_autograd_function_allowed",
    )
    switches = (torch_attribute(path) for path in paths)
    return tuple(switch for switch in switches if switch is not None)


def is_mode_op(target: Any) -> bool:
    """Whether ``target`` enters, leaves or sets a mode; such an op does not read or write tensors."""
    return id(target) in _mode_op_ids()


@functools.cache
def _mode_op_ids() -> frozenset[int]:
    """Ids of all mode functions, valid because torch never frees them; a set makes the test per node one look-up."""
    return frozenset(map(id, (*(function for pair in mode_pairs() for function in pair), *mode_switches())))


def autocast_pair() -> tuple[Any, Any]:
    """The functions with which Dynamo enters and leaves autocast."""
    from torch.amp import autocast_mode

    return autocast_mode._enter_autocast, autocast_mode._exit_autocast
