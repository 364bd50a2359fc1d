"""Operators (look-up, schemas, kernels), and the modes around them: autocast, function transforms, profilers."""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from graphpass.errors import CaptureError

OpOverload = torch._ops.OpOverload
"""One overload of an operator, ``torch.ops.aten.add.Tensor``."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""An operator with all its overloads, ``torch.ops.aten.add``."""


def is_higher_order(target: Any) -> bool:
    """Whether ``target`` is a higher-order operator: it takes subgraphs (``torch.cond``) or wraps a Triton kernel."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The device-independent kernel of a higher-order operator, composed of other ops; None if it has none.

    Those that torch has for ``invoke_subgraph`` and ``scan`` refuse to run under a dispatch mode, so their bodies do.
    """
    kernels: Mapping[Any, Callable[..., Any]] = getattr(operator, "py_kernels", {})
    kernel = kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return None if kernel is None else _UNDER_MODES.get(getattr(operator, "__name__", ""), kernel)


def _subgraph(subgraph: Callable[..., Any], _: str, *operands: Any) -> Any:
    return subgraph(list(operands)) if getattr(subgraph, "_boxed_call", False) else subgraph(*operands)


def _scan(body: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(body, init, xs, additional_inputs=additional_inputs)


_UNDER_MODES: Mapping[str, Callable[..., Any]] = {"invoke_subgraph": _subgraph, "scan": _scan}


def operator_packet(namespace: str, name: str) -> Any | None:
    """``torch.ops.<namespace>.<name>``, or None when no such operator is registered."""
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
    try:
        return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))
    except RuntimeError:
        return None


def schema_of(overload: Any) -> Any:
    """The function schema of an operator overload."""
    return overload._schema


def operator_name(target: Any) -> str | None:
    """The qualified name (``mylib::attention``) of an overload, a packet or a ``custom_op``; None for anything else."""
    op = custom_op_overload(target) or target
    if isinstance(op, OpOverload):
        return op._schema.name
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else None


def is_of_torch(name: str) -> bool:
    """Whether the operator with this qualified name is torch's own, apart from its collectives."""
    return name.partition("::")[0] in _OF_TORCH


_OF_TORCH = (
    "aten",
    "prims",
    "prim",
    "higher_order",
    "inductor",
    "quantized",
    "quantized_decomposed",
    "mkldnn",
    "onednn",
)


def written_node(node: fx.Node) -> fx.Node:
    """The node whose tensor an operator in place such as ``+=`` has written to and returned; else the node itself."""
    while node.target in _IN_PLACE and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def operator_namespaces() -> tuple[tuple[str, Any], ...]:
    """(dotted prefix, namespace) of each namespace whose functions appear in Dynamo's graphs, the public ones first."""
    native: Any = torch._C
    return (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.special", torch.special),
        ("torch.linalg", torch.linalg),
        ("torch.fft", torch.fft),
        ("torch.Tensor", torch.Tensor),
        ("torch._C._nn", native._nn),
        ("torch._C._special", native._special),
        ("torch._C._linalg", native._linalg),
        ("torch._C._fft", native._fft),
        ("torch._C._VariableFunctions", native._VariableFunctions),
    )


def runs_python_kernel(op: torch._ops.OpOverload, dispatch_key: str) -> bool:
    """Whether ``op``'s kernel for ``dispatch_key`` ("CPU") was registered from Python.

    The ops inside a Python kernel can be recorded one by one; a C++ kernel is a leaf.
    """
    namespace, _, name = op._schema.name.partition("::")
    overload = f".{op._schema.overload_name}" if op._schema.overload_name else ""
    keys = (dispatch_key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{namespace}/{name}{overload}/{key}" in torch.library._impls for key in keys)


def call_kernel(op: torch._ops.OpOverload, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op``'s kernel for ``dispatch_key`` directly, below all dispatch modes; ops inside it dispatch as usual."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    return op.redispatch(keys, *args, **kwargs)


_opaque: Any = importlib.import_module("torch._library.opaque_object")
_is_opaque: Callable[[type], bool] = getattr(_opaque, "is_custom_class", None) or _opaque.is_opaque_type
_is_constant: Any = getattr(_opaque, "is_opaque_constant_type", None)

CONSTANT_TYPE = "value" if _is_constant is None else "constant"
"""The ``typ`` with which the type of objects that never change is registered."""


def type_with_state(value: Any) -> str | None:
    """The type of a custom object that operators take, unless it is declared immutable; None for any other value.

    A graph follows the state of a ``torch.Generator``, and the ranks that of their process groups.
    """
    real: Any = value.real_obj if type(value).__name__ == "FakeScriptObject" else value
    kind, is_constant = type(real), _is_constant or _opaque.is_opaque_value_type
    if isinstance(real, torch.Generator) or kind.__module__.startswith("torch.distributed"):
        return None
    if isinstance(real, torch.ScriptObject):
        declared: Any = real._type()
        name = str(declared.name())
        return None if name == "ProcessGroup" else name
    return kind.__qualname__ if _is_opaque(kind) and not is_constant(kind) else None


def keep_in_order(name: str) -> None:
    """Declare to compilers that the op ``namespace::name`` has a side effect that its schema does not show.

    Compilers then neither remove the op nor reorder it with other ops that have side effects.
    """
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    namespace, _, op = name.partition("::")
    ordered: Any = effects._EffectType.ORDERED
    effects._register_effectful_op(getattr(getattr(torch.ops, namespace), op).default, ordered)


class PackedSequences(NamedTuple):
    """Where the queries and keys of concatenated sequences lie."""

    #: The row of each sequence's first query and the end of the last sequence, int32 [sequences + 1].
    query_bounds: torch.Tensor
    key_starts: torch.Tensor  #: the row of each sequence's first key, int32 [sequences + 1]; the last is not used
    key_lengths: torch.Tensor  #: the number of keys of each sequence, int32 [sequences]
    max_query_len: int  #: upper bound on the queries of a sequence
    max_key_len: int  #: upper bound on the keys of a sequence


_MAX_HEAD_DIM, _MIN_CAPABILITY = 256, (8, 0)
"""Requirements of torch's flash attention."""


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why :func:`flash_attention` does not serve such tensors; None if it does.

    ``head_dim`` is the width of a head, before it is padded to a multiple of 8.
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


def attention_to_lengths(dtype: torch.dtype, width: Any) -> str | None:
    """The kernel that attends to as many keys of each sequence as it is told: flash, efficient, or None.

    One counts only if a small call of it hides NaN behind the keys in use: in other forms both ignore the number.
    """
    if not (torch.cuda.is_available() and isinstance(width, int) and width % 8 == 0 and width <= _MAX_HEAD_DIM):
        return None
    kind = "efficient" if dtype is torch.float32 else "flash"
    obstacle = kind == "flash" and flash_obstacle(torch.device("cuda"), dtype, width)
    return kind if not obstacle and _hears(kind, dtype) else None


@functools.cache
def _hears(kind: str, dtype: torch.dtype) -> bool:
    device, used = torch.device("cuda"), 5
    x = torch.ones(8, 1, 8, dtype=dtype, device=device)
    y = x.clone()
    y[used:] = math.nan
    bounds, lengths = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, 8], [used]))
    try:
        if kind == "flash":
            found = flash_attention(x, y, y, PackedSequences(bounds, bounds, lengths, 8, 8), scale=1.0)
        else:
            rows, options = [one[None] for one in (x, y, y)], {"seqlen_k": lengths}
            found = torch.ops.aten._efficient_attention_forward(
                *rows, None, bounds, bounds, 8, 8, 0.0, 0, False, **options
            )[0]
    except (RuntimeError, TypeError):
        return False
    return bool((found == 1).all())


def needs_grad(values: Iterable[Any]) -> bool:
    """Whether autograd would record a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


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


def refuse_transform(who: str, transform: str | None) -> None:
    """Refuse a call of ``who``, which replays graphs, under a transform; None is none."""
    if transform is not None:
        raise CaptureError(
            f"{who} cannot replay under {transform}",
            expected="a call outside of function transforms and forward-mode AD: a graph computes plain values",
            found=transform,
            remedy="transform the model itself, or graph a model or function that has the transform inside",
        )


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
    return (
        torch._C._set_grad_enabled,
        torch._C._set_fwd_grad_enabled,
        torch._C._functorch.set_inplace_requires_grad_allowed,
        torch.nn.attention._sdpa_kernel,
    )


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


is_profiled: Callable[[], bool] = functools.partial(
    operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)
"""Whether ``torch.profiler``, ``torch.autograd.profiler`` or ``emit_nvtx`` is on in this process.

One call of C code, about 40 ns: no Python function runs. torch sets the flag for such checks.
"""


def ranged(label: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` within a range that profilers show as ``label``, and ``emit_nvtx`` turns into an NVTX range."""

    def in_range(*args: Any) -> Any:
        with torch.profiler.record_function(label):
            return launch(*args)

    return in_range


def torch_attribute(path: str) -> Any | None:
    """``torch.<path>``, or None where this release has no such attribute."""
    attribute: Any = torch
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute
