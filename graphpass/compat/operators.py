"""Operators: look-up, schemas, kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from graphpass.compat.attributes import torch_attribute

OpOverload = torch._ops.OpOverload
"""One overload of an operator, ``torch.ops.aten.add.Tensor``."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""An operator with all its overloads, ``torch.ops.aten.add``."""


def is_higher_order(target: Any) -> bool:
    """Whether ``target`` is a higher-order operator: it takes subgraphs (``torch.cond``) or wraps a Triton kernel."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator)


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The device-independent kernel of a higher-order operator, composed of other ops; None if it has none."""
    kernels: Mapping[Any, Callable[..., Any]] = getattr(operator, "py_kernels", {})
    return kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def operator_packet(namespace: str, name: str) -> Any | None:
    """``torch.ops.<namespace>.<name>``, or None when no such operator is registered."""
    from torch._ops import OpOverloadPacket

    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError):
        return None
    return packet if isinstance(packet, OpOverloadPacket) else None


def higher_order_operator(name: str) -> Any | None:
    """``torch.ops.higher_order.<name>``, or None."""
    target = getattr(torch.ops.higher_order, name, None)
    return target if is_higher_order(target) else None


def registered_operator_names() -> list[str]:
    """The qualified names (``aten::add``) of all registered operators, sorted."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


def custom_op_overload(target: Any) -> Any | None:
    """The overload of an object that ``torch.library.custom_op`` returned; None for any other object."""
    return getattr(target, "_opoverload", None)


def overloads_of(packet: Any) -> list[Any]:
    """Every overload of an operator packet."""
    return [getattr(packet, name) for name in packet.overloads()]


def resolved_overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The overload of ``packet`` whose schema accepts the arguments; None where torch cannot resolve it."""
    resolve = getattr(torch._C, "_jit_resolve_packet", None)
    try:
        name = resolve(packet._qualified_op_name, *args, **kwargs) if resolve is not None else None
    except RuntimeError:
        return None
    return getattr(packet, name) if isinstance(name, str) else None


def schema_of(overload: Any) -> Any:
    """The function schema of an operator overload."""
    return overload._schema


def schema_name(op: torch._ops.OpOverload) -> str:
    """An op's qualified name without its overload, ``aten::add``."""
    return op._schema.name


def operator_name(target: Any) -> str | None:
    """The qualified name (``mylib::attention``) of an overload, a packet or a ``custom_op``; None for anything else."""
    op = custom_op_overload(target) or target
    if isinstance(op, OpOverload):
        return schema_name(op)
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else None


def is_mutable(op: torch._ops.OpOverload) -> bool:
    """Whether an op's schema declares a write to an argument."""
    return op._schema.is_mutable


def operator_namespaces() -> tuple[tuple[str, Any], ...]:
    """(dotted prefix, namespace) of each namespace whose functions appear in Dynamo's graphs, the public ones first."""
    return (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.special", torch.special),
        ("torch.linalg", torch.linalg),
        ("torch.fft", torch.fft),
        ("torch.Tensor", torch.Tensor),
        ("torch._C._nn", torch._C._nn),
        ("torch._C._special", torch_attribute("_C._special")),
        ("torch._C._linalg", torch_attribute("_C._linalg")),
        ("torch._C._fft", torch_attribute("_C._fft")),
        ("torch._C._VariableFunctions", torch._C._VariableFunctions),
    )


def runs_python_kernel(op: torch._ops.OpOverload, dispatch_key: str) -> bool:
    """Whether ``op``'s kernel for ``dispatch_key`` ("CPU") was registered from Python.

    The ops inside a Python kernel can be recorded one by one; a C++ kernel is a leaf.
    """
    impls: set[str] = getattr(torch.library, "_impls", set())
    namespace, _, name = schema_name(op).partition("::")
    overload = f".{op._schema.overload_name}" if op._schema.overload_name else ""
    keys = (dispatch_key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{namespace}/{name}{overload}/{key}" in impls for key in keys)


def call_kernel(op: torch._ops.OpOverload, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op``'s kernel for ``dispatch_key`` directly, below all dispatch modes; ops inside it dispatch as usual."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    return op.redispatch(keys, *args, **kwargs)


def keep_in_order(name: str) -> None:
    """Declare to compilers that the op ``namespace::name`` has a side effect that its schema does not show.

    Compilers then neither remove the op nor reorder it with other ops that have side effects.
    """
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    namespace, _, op = name.partition("::")
    ordered: Any = effects._EffectType.ORDERED
    effects._register_effectful_op(getattr(getattr(torch.ops, namespace), op).default, ordered)


class PackedSequences(NamedTuple):
    """Where the queries and keys of concatenated sequences lie.

    Attributes:
        query_bounds: the row of each sequence's first query and the end of the last sequence, int32 [sequences + 1].
        key_starts: the row of each sequence's first key, int32 [sequences + 1]; the last entry is not used.
        key_lengths: the number of keys of each sequence, int32 [sequences].
        max_query_len: upper bound on the queries of a sequence.
        max_key_len: upper bound on the keys of a sequence.
    """

    query_bounds: torch.Tensor
    key_starts: torch.Tensor
    key_lengths: torch.Tensor
    max_query_len: int
    max_key_len: int


_MAX_HEAD_DIM, _MIN_CAPABILITY = 256, (8, 0)
"""Requirements of torch's flash attention."""


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why :func:`flash_attention` does not serve such tensors; None if it does.

    Args:
        device: device of the tensors.
        dtype: dtype of the tensors.
        head_dim: width of a head, before it is padded to a multiple of 8.
    """
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM:
        return f"it takes heads of width {_MAX_HEAD_DIM} or less, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return "it needs compute capability {}.{}, not {}.{}".format(*_MIN_CAPABILITY, *capability)
    return None


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    *,
    scale: float,
    causal_window: int | None = None,
) -> torch.Tensor:
    """Torch's flash attention, where the keys of a sequence need not follow the keys of the sequence before it.

    It calls the operator behind ``varlen_attn``, which accepts the number of keys in use already on torch 2.11 and does
    not fill a tensor for an unused random state.

    Args:
        query: [tokens, heads, head_dim], half precision, on a GPU.
        key: [rows, kv heads, head_dim]; ``kv heads`` divides ``heads``.
        value: like ``key``.
        sequences: where the sequences lie in them.
        scale: factor of the scores.
        causal_window: None: every query attends to all keys of its sequence. Otherwise the last query of a sequence has
            the position of its last key, and a query attends to the keys up to its own position: to this many of them,
            its own position included, or to all for 0.

    Returns:
        Shaped like ``query``. Rows of a sequence without keys are zero; rows behind the last sequence are
        uninitialised.
    """
    options: dict[str, int] = {"window_size_left": causal_window - 1, "window_size_right": 0} if causal_window else {}
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        sequences.query_bounds,
        sequences.key_starts,
        sequences.max_query_len,
        sequences.max_key_len,
        0.0,
        causal_window is not None,
        False,
        scale=scale,
        seqused_k=sequences.key_lengths,
        **options,
    )[0]
    return attended
