"""The only file that names private or undocumented torch. Everything is found by capability, never by version."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import linecache
import operator
import os
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# --- fx and symbolic shapes


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The FakeTensorMode of the first fake tensor in ``values``, or None.

    Asked of the tensors themselves: while a backend runs, the ambient tracing context has another mode than they.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def new_fake_mode(values: Iterable[Any] = ()) -> Any:
    """A fresh FakeTensorMode over the shape environment behind ``values``, or over a new one.

    In a new one host reads and data-dependent shapes become symbols.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = shape_env_of(values) or ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def fakify(fake_mode: Any, value: Any) -> Any:
    """``value`` as a fake tensor of ``fake_mode`` with the same, static shape; anything but a tensor as it is."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return fake_mode.from_tensor(value, static_shapes=True)
    return value


@contextlib.contextmanager
def quiet_shapes(fake_mode: Any) -> Iterator[None]:
    """Within the body, ``fake_mode`` records no guards, and fresh unbacked symbols are nobody's to bind."""
    shape_env = getattr(fake_mode, "shape_env", None)
    with contextlib.ExitStack() as stack:
        for name in ("suppress_guards", "ignore_fresh_unbacked_symbols"):
            scope = getattr(shape_env, name, None)
            if scope is not None:
                stack.enter_context(scope())
        yield


python_dispatcher: Callable[[], contextlib.AbstractContextManager[Any]] = enable_python_dispatcher
"""As Dynamo runs fake tensors: some operators in C++ take no symbolic sizes (``matmul`` of torch 2.11)."""


def storage_id(tensor: torch.Tensor) -> int | None:
    """A number shared by exactly the living tensors of one storage; None for tensors without storage (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def memory_id(tensor: torch.Tensor) -> int | None:
    """The address of a real tensor's memory, which several storages may share; of a fake one, :func:`storage_id`."""
    if fake_mode_of((tensor,)) is not None or tensor.layout is not torch.strided:
        return storage_id(tensor)
    return tensor.untyped_storage().data_ptr()


def expression_of(size: Any) -> sympy.Expr | int | None:
    """The sympy expression of a SymInt, SymFloat or SymBool, an int as it is, None for anything else."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size.node.expr
    return size if isinstance(size, int) else None


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Whether ``symbol`` names a value that only a run can tell (``.item()``, the row count of ``nonzero``)."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def shape_env_of(values: Iterable[Any]) -> Any | None:
    """The shape environment behind the symbolic sizes and fake tensors among ``values``, or None."""
    values = list(values)
    for value in values:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.shape_env
    return getattr(fake_mode_of(values), "shape_env", None)


def guards_of(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """The boolean expressions that ``shape_env`` has guarded on, without repeats, in order."""
    return tuple(dict.fromkeys(guard.expr for guard in shape_env.guards))


def facts_of(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """All that ``shape_env`` holds for true and may reason with: its guards, and the divisions known to be exact."""
    if shape_env is None:
        return ()
    divisible = (sympy.Eq(remainder, 0) for remainder in sorted(getattr(shape_env, "divisible", ()), key=str))
    return tuple(dict.fromkeys((*guards_of(shape_env), *divisible)))


def guard_on(shape_env: Any, conditions: Sequence[sympy.Basic]) -> bool:
    """Let the graph being traced guard on ``conditions``; False, and no guard, if one does not hold for its sizes."""
    hints = hints_of(shape_env)
    if any(condition.xreplace(hints) != sympy.true for condition in conditions):
        return False
    for condition in conditions:
        shape_env.evaluate_expr(condition)
    return True


def hints_of(shape_env: Any) -> dict[sympy.Symbol, Any]:
    """The size that each symbol had in the call being traced."""
    for name in ("backed_var_to_val", "var_to_val"):
        hints: dict[sympy.Symbol, Any] | None = getattr(shape_env, name, None)
        if hints is not None:
            return hints
    return {}


def new_symbol(shape_env: Any, name: str, lowest: int | None, highest: int | None, like: int) -> Any:
    """A symbol of ``shape_env`` within bounds, or the size itself where the bounds leave one.

    Args:
        shape_env: what it becomes a symbol of.
        name: for messages.
        lowest: the least size, None for 0.
        highest: the greatest size, None for any.
        like: the size to trace with, where it lies within the bounds.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    if lowest is not None and lowest == highest:
        return sympy.Integer(lowest)
    least = lowest or 0
    upper = sympy.Integer(highest) if highest is not None else ValueRanges.unknown().upper
    bounds = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(sympy.Integer(least), upper))
    hint = max(2, like if highest is None or least <= like <= highest else highest)
    return shape_env.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC, bounds, positive=None)


def size_of(shape_env: Any, expression: Any, symbols: Mapping[sympy.Symbol, Any]) -> Any:
    """The size that ``expression`` is over the ``symbols`` of ``shape_env``: an int or a SymInt."""
    if not isinstance(expression, sympy.Basic):
        return expression
    renamed = expression.xreplace(dict(symbols))
    hint = int(renamed.xreplace(hints_of(shape_env)))
    return shape_env.create_symintnode(renamed, hint=hint)


@contextlib.contextmanager
def tracing_with(fake_mode: Any) -> Iterator[None]:
    """Within the body compilers see ``fake_mode`` as that of the graph, and none of what Dynamo traces now."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def compiler_settings() -> tuple[Any, ...]:
    """Everything ambient that a compiler reads: modes, precision, and the configuration of its parts."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        inductor_config.get_hash(),
        aot_config.get_hash(),
    )


def bounds_of(shape_env: Any, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """The least and greatest value of ``symbol``; None where there is no bound that a tensor could reach."""
    value_range = shape_env.var_to_range.get(symbol)
    if value_range is None:
        return None, None
    return _finite(value_range.lower), _finite(value_range.upper)


def _finite(bound: Any) -> int | None:
    largest = 2**62
    return int(bound) if getattr(bound, "is_Integer", False) and abs(int(bound)) < largest else None


def source_text(node: fx.Node) -> str | None:
    """Where Dynamo took a placeholder from, as it writes it (``L['x']``), or None."""
    grapharg = node.meta.get("grapharg")
    name = getattr(getattr(grapharg, "source", None), "name", None)
    text = name() if callable(name) else name
    return text if isinstance(text, str) else None


def marked_dims(node: fx.Node) -> frozenset[int]:
    """The dimensions of a placeholder's tensor that the user marked with ``mark_dynamic`` or ``maybe_mark_dynamic``."""
    example = getattr(node.meta.get("grapharg"), "example", None)
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return frozenset[int]().union(*(getattr(example, name, ()) for name in names))


def forget_arguments(graph: fx.Graph) -> None:
    """Drop what Dynamo noted of each placeholder's argument: weak references, which would keep it from being swapped.

    ``torch.utils.swap_tensors``, and with it ``Module.to`` on request, takes no tensor that has one.
    """
    for node in graph.nodes:
        node.meta.pop("grapharg", None)


def is_static_address(node: fx.Node) -> bool:
    """Whether the placeholder is a parameter, a buffer, or a tensor marked with ``mark_static_address``."""
    from torch._dynamo.utils import get_static_address_type

    value = node.meta.get("example_value", node.meta.get("val"))
    marked = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return isinstance(value, torch.nn.Parameter) or bool(marked or get_static_address_type(value))


def transform_over(values: Iterable[Any]) -> str | None:
    """The transform that one of these tensors is under: a level of ``torch.func``, or forward-mode AD; else None.

    Such a tensor stands for others (a batch, a tangent) that its memory does not hold.
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


def is_higher_order(target: Any) -> bool:
    """Whether ``target`` is a higher-order operator: it takes subgraphs, or wraps a kernel (``torch.cond``, triton)."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator)


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """What a higher-order operator does on every device, in terms of other ops; None where it says nothing."""
    kernels: Mapping[Any, Callable[..., Any]] = getattr(operator, "py_kernels", {})
    return kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def wraps_for_functorch(target: Any) -> bool:
    """Whether ``target`` only wraps or unwraps a tensor for ``vmap`` or ``grad``; it runs inside their span alone."""
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    return "_functorch" in module and ("wrap" in name or name.endswith("_batch_dim"))


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
    """The overload behind the object that ``torch.library.custom_op`` returned, else None."""
    return getattr(target, "_opoverload", None)


def overloads_of(packet: Any) -> list[Any]:
    """Every overload of an operator packet."""
    return [getattr(packet, name) for name in packet.overloads()]


def resolved_overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The overload of ``packet`` whose schema takes these arguments, or None where torch cannot tell."""
    resolve = getattr(torch._C, "_jit_resolve_packet", None)
    try:
        name = resolve(packet._qualified_op_name, *args, **kwargs) if resolve is not None else None
    except RuntimeError:
        return None
    return getattr(packet, name) if isinstance(name, str) else None


def schema_of(overload: Any) -> Any:
    """The function schema of an operator overload."""
    return overload._schema


def operator_namespaces() -> tuple[tuple[str, Any], ...]:
    """(dotted prefix, namespace) of every place that Dynamo takes functions from, the public ones first."""
    return (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.special", torch.special),
        ("torch.linalg", torch.linalg),
        ("torch.fft", torch.fft),
        ("torch.Tensor", torch.Tensor),
        ("torch._C._nn", torch._C._nn),
        ("torch._C._special", _torch_attribute("_C._special")),
        ("torch._C._linalg", _torch_attribute("_C._linalg")),
        ("torch._C._fft", _torch_attribute("_C._fft")),
        ("torch._C._VariableFunctions", torch._C._VariableFunctions),
    )


@functools.cache
def mode_pairs() -> tuple[tuple[Any, Any], ...]:
    """(enter, exit) functions of every pair that Dynamo writes around a ``with`` block; missing ones left out."""
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
    found = ((_torch_attribute(enter), _torch_attribute(leave)) for enter, leave in paths)
    return tuple((enter, leave) for enter, leave in found if enter is not None and leave is not None)


@functools.cache
def mode_switches() -> tuple[Any, ...]:
    """Functions that set a mode to the value of their first argument, so that enter and exit are one function."""
    paths = (
        "_C._set_grad_enabled",
        "_C._set_fwd_grad_enabled",
        "_C._functorch.set_inplace_requires_grad_allowed",
        "nn.attention._sdpa_kernel",
        "_C._functorch.set_autograd_function_allowed",
    )
    found = (_torch_attribute(path) for path in paths)
    return tuple(switch for switch in found if switch is not None)


def is_mode_op(target: Any) -> bool:
    """Whether ``target`` enters, leaves or sets a mode; it touches no tensor."""
    return id(target) in _mode_op_ids()


@functools.cache
def _mode_op_ids() -> frozenset[int]:
    """Identities of all mode functions, which torch keeps for ever: one look-up for each node of a graph."""
    return frozenset(map(id, (*(function for pair in mode_pairs() for function in pair), *mode_switches())))


def autocast_pair() -> tuple[Any, Any]:
    """The functions with which Dynamo enters and leaves autocast."""
    from torch.amp import autocast_mode

    return autocast_mode._enter_autocast, autocast_mode._exit_autocast


def _torch_attribute(path: str) -> Any | None:
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# --- capture


def data_ptrs_equal(tensors: list[Any], expected: list[int | None], positions: list[int]) -> bool:
    """Whether ``tensors[p].data_ptr() == expected[p]`` for every ``p`` in ``positions``.

    One native call where torch has it (300 tensors in about 3 µs, against 12 µs from Python).
    """
    return bool(_data_ptrs_equal(tensors, expected, positions))


def _data_ptrs_equal_in_python(
    tensors: Sequence[Any], expected: Sequence[int | None], positions: Sequence[int]
) -> bool:
    addresses = map(torch.Tensor.data_ptr, map(tensors.__getitem__, positions))
    return all(map(operator.eq, addresses, map(expected.__getitem__, positions)))


_data_ptrs_equal: Callable[..., bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _data_ptrs_equal_in_python
)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side in memory, in whatever order, each once."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def any_overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether AOTAutograd takes any two of these tensors, all in one storage, to have an element in common."""
    overlapping = getattr(_torch_attribute("_C._dynamo.guards"), "compute_overlapping_tensors", None)
    if overlapping is None:
        return True
    numbers = [number for t in tensors for number in (*t.shape, *t.stride(), t.storage_offset())]
    return bool(overlapping(tensors, symbolic=any(isinstance(number, torch.SymInt) for number in numbers)))


def schema_name(op: torch._ops.OpOverload) -> str:
    """An op's qualified name without its overload, ``aten::add``."""
    return op._schema.name


OpOverload = torch._ops.OpOverload
"""One overload of an operator, ``torch.ops.aten.add.Tensor``."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""An operator with all its overloads, ``torch.ops.aten.add``."""


def operator_name(target: Any) -> str | None:
    """``mylib::attention`` of an overload, a packet or what ``custom_op`` returned; None for anything else."""
    op = custom_op_overload(target) or target
    if isinstance(op, OpOverload):
        return schema_name(op)
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else None


def is_mutable(op: torch._ops.OpOverload) -> bool:
    """Whether an op's schema says that it writes to an argument."""
    return op._schema.is_mutable


def version_of(tensor: torch.Tensor) -> int | None:
    """A tensor's version counter, which every in-place op bumps; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def frame_id() -> int | None:
    """Which Python frame Dynamo is compiling now: the same for all recompiles of one function; None outside."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def runs_python_kernel(op: torch._ops.OpOverload, dispatch_key: str) -> bool:
    """Whether ``op``'s kernel for ``dispatch_key`` ("CPU") was registered from Python.

    Only such kernels can be recorded op by op; a kernel written in C++ is a leaf.
    """
    impls: set[str] = getattr(torch.library, "_impls", set())
    namespace, _, name = schema_name(op).partition("::")
    overload = f".{op._schema.overload_name}" if op._schema.overload_name else ""
    keys = (dispatch_key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{namespace}/{name}{overload}/{key}" in impls for key in keys)


def keep_in_order(name: str) -> None:
    """Tell compilers that the op ``namespace::name`` does something that its schema does not show.

    They neither drop it nor move it past others of its kind.
    """
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    namespace, _, op = name.partition("::")
    ordered: Any = effects._EffectType.ORDERED
    effects._register_effectful_op(getattr(getattr(torch.ops, namespace), op).default, ordered)


def call_kernel(op: torch._ops.OpOverload, dispatch_key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op``'s kernel for ``dispatch_key`` in place, below every dispatch mode; ops inside it dispatch as usual."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    return op.redispatch(keys, *args, **kwargs)


def is_dynamo_compiled(runnable: Any) -> bool:
    """Whether calling ``runnable`` enters code that Dynamo compiled (torch.compile's module or function)."""
    return isinstance(runnable, torch._dynamo.eval_frame.OptimizedModule) or hasattr(
        runnable, "_torchdynamo_orig_callable"
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling, saving or loading a module does more than its class says: what another one would not do.

    Tensors replaced under the module's feet (weight norm) and forwards exchanged in the instance go by hooks as well.
    """
    kept = vars(module)
    return "forward" in kept or any(bool(value) for name, value in kept.items() if name.endswith("_hooks"))


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """The dicts in which a module and those within it keep their hooks of all kinds."""
    return [kept for part in module.modules() for name, kept in vars(part).items() if "_hooks" in name]


def has_static_address(tensor: torch.Tensor) -> bool:
    """Whether torch counts the tensor's address as fixed: ``mark_static_address``, or a module's own under Dynamo."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


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


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device, also of a fake tensor, whose ``to`` may be a no-op."""
    copy: torch.Tensor = torch.ops.aten._to_copy.default(tensor, device=device)
    return copy


tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def current_stream_of(device: torch.device) -> Any:
    """What tells a device's current stream from others, without an object for it: a tenth of the time."""
    return torch._C._cuda_getCurrentStream(device.index)


def is_capturing_stream(device: torch.device | None) -> bool:
    """Whether somebody else captures the current stream of a CUDA device."""
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def drop_blas_workspaces() -> None:
    """Have torch free the workspaces that it keeps for the matrix products of each stream."""
    torch._C._cuda_clearCublasWorkspaces()


def forget_failed_capture(device: torch.device, pool: Any) -> None:
    """Undo what a capture that was invalidated keeps in the caching allocator.

    Torch ends its redirection of allocations and gives back the graph's share of the pool only where the capture ends
    well; otherwise the pool's segments would never be freed. The pool takes no further capture afterwards.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        undo = getattr(torch._C, name, None)
        if undo is not None:
            with contextlib.suppress(RuntimeError):
                undo(device.index, pool)


foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy a list of tensors into another in one fused call; documented under its underscored name."""


# --- compilers


AtenHook = Callable[[fx.GraphModule], None]
"""Called with the aten graph of what is compiled, before the compiler changes it."""


def inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """Inductor without CUDA graphs of its own.

    Args:
        graph_module: what to compile.
        example_inputs: fake tensors and symbolic sizes.
        show: called with the aten graph. AOTAutograd's cache would skip the trace, so it is off then; Inductor's own
            cache serves all the same.
    """
    from torch._functorch import config as aot_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(aten: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if show is not None:
            show(aten)
        return compile_fx_inner(aten, inputs, **settings)

    off = {"triton.cudagraphs": False, "triton.cudagraph_trees": False}
    with aot_config.patch(enable_autograd_cache=False) if show is not None else contextlib.nullcontext():
        compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            graph_module, list(example_inputs), inner_compile=compile_inner, config_patches=off
        )
    return compiled


def aot_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """AOTAutograd with its ATen graph run as it is; ``show`` is called with that graph."""
    from torch._dynamo.backends.debugging import aot_eager as backend
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as aot_config

    def run_as_it_is(aten: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if show is not None:
            show(aten)
        return boxed_nop(aten, list(inputs))

    # Tokens that keep ops in order are made inside of the graph, as Inductor has them, and are no inputs.
    with aot_config.patch(unlift_effect_tokens=True):
        compiled: Callable[..., Any] = backend(graph_module, list(example_inputs), fw_compiler=run_as_it_is)
    return compiled


# --- attention


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_starts: torch.Tensor,
    key_lengths: torch.Tensor,
    max_query_len: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Torch's flash attention with a place for the keys of each sequence that does not follow from the one before.

    The operator behind ``varlen_attn``: it takes the number of keys in use on torch 2.11, too, and fills no tensor for
    random numbers that nobody draws.

    Args:
        query: [tokens, heads, head_dim] of half precision on a GPU.
        key: like ``query``.
        value: like ``query``.
        query_bounds: where the queries of each sequence begin, and the last ones end, int32 [sequences + 1].
        key_starts: where its keys begin, int32 [sequences + 1]; the last entry is not used.
        key_lengths: how many they are, int32 [sequences].
        max_query_len: bound on the queries of a sequence.
        scale: of the scores.
    """
    bounds = (query_bounds, key_starts, max_query_len, key.shape[0])
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, 0.0, False, False, scale=scale, seqused_k=key_lengths
    )[0]
    return attended


# --- Dynamo


def calling_compiler() -> Any | None:
    """The object through which Dynamo is calling a backend now: one for each ``torch.compile``; None outside."""
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    compiler = translator.output.compiler_fn
    return None if compiler is None else innermost_backend(compiler)


def backend_options(compiler: Any) -> dict[str, Any]:
    """The options that ``torch.compile`` was given, as the object that :func:`calling_compiler` returns keeps them."""
    options: dict[str, Any] = getattr(compiler, "kwargs", {}).get("options") or {}
    return options


def compilers_of(compiled: Any) -> list[Any]:
    """The objects through which Dynamo calls the backend of a ``torch.compile``'d callable, its own first.

    Dynamo also runs code that it compiled for another callable whose backend is equal: those follow.
    """
    from torch._dynamo.eval_frame import innermost_backend

    own = _dynamo_callback(compiled)
    if own is None:
        return []
    backend = innermost_backend(own)
    original = getattr(compiled, "_orig_mod", None) or getattr(compiled, "_torchdynamo_orig_callable", compiled)
    function = original.forward if isinstance(original, torch.nn.Module) else original
    code = getattr(function, "__code__", None)
    if code is None:
        return [backend]
    entries = [innermost_backend(entry.backend) for entry in _cache_entries(code)]
    return [backend, *(other for other in entries if other == backend)]


def _dynamo_callback(compiled: Any) -> Any | None:
    context = getattr(compiled, "dynamo_ctx", None)
    if context is not None:
        return context.callback
    function = getattr(compiled, "_compiled_call_impl", None) or compiled
    function = getattr(function, "__func__", function)
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    return inspect.getclosurevars(function).nonlocals.get("callback")


def specialize_wrapped_floats(graph_module: fx.GraphModule) -> None:
    """Replace Python floats that Dynamo passes as 0-d CPU tensors by their values, guarded by Dynamo.

    With dynamic shapes, a float attribute (a dropout rate, an epsilon) arrives as a tensor and an ``item()``: a host
    read in every layer. Reading the symbolic float's value makes Dynamo guard on it, so another value recompiles.
    """
    for node in list(graph_module.graph.find_nodes(op="call_method", target="item")):
        value = node.meta.get("example_value")
        (source,) = node.all_input_nodes
        argument = source.meta.get("grapharg")
        if isinstance(value, torch.SymFloat) and getattr(argument, "pass_arg_as_tensor", False):
            node.replace_all_uses_with(float(value))
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def came_from_tracing(error: BaseException) -> bool:
    """Whether Dynamo raised ``error`` because the code cannot be traced for its inputs."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def graph_break_reason(graph_module: fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before the function's end, with file and line of the user's code; None at its end."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    text = str(reason.reason).strip().splitlines()[0]
    if not reason.user_stack:
        return f"graph break: {text}"
    frame = reason.user_stack[-1]
    return f"graph break: {text} ({os.path.basename(frame.filename)}:{frame.lineno})"


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbolic size that tracing left on a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others behind ``__torch_dispatch__`` (DTensor and its like)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return is_traceable_wrapper_subclass(tensor) or (
        not isinstance(tensor, FakeTensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell Dynamo and the wrappers that this tensor's address stays; Dynamo does not guard on it."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def mark_maybe_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let a dimension be symbolic where the model allows it; sizes that it fixes are compiled each by itself."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Whether the tensors have the shapes and strides of now: one native call; False may also mean another mode."""
    guards: Any = _torch_attribute("_C._dynamo.guards.TensorGuards")
    return partial(guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check, *tensors)


def registered_backend(name: str) -> Callable[..., Any] | None:
    """What torch.compile calls for ``backend=name``, an entry point loaded for it; None where nobody registered one."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        return None


def active_transform() -> str | None:
    """The function transform around this code (``vmap``, ``grad``, ``jvp``), or forward-mode AD; None outside."""
    if torch._C._functorch.maybe_current_level() is not None:
        return str(torch._C._functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()
    return "forward-mode AD" if torch.autograd.forward_ad._current_level >= 0 else None


def is_at_recompile_limit(function: Any) -> bool:
    """Whether Dynamo compiles ``function`` no more, however it is called."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and len(_cache_entries(code)) >= torch._dynamo.config.recompile_limit


def _cache_entries(code: types.CodeType) -> list[Any]:
    """What Dynamo has compiled ``code`` to, the newest first."""
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


def floats_as_constants() -> contextlib.AbstractContextManager[None]:
    """Within the body, Dynamo guards floats by value.

    Symbolic ones (of a module traced for all sizes) end as constants all the same, and everything is compiled twice.
    """
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return patched


@dataclass(frozen=True, slots=True)
class SideEffect:
    """One change of Python state that Dynamo's code makes after the graph has run.

    Attributes:
        text: what it changes, as a sentence's predicate: "sets the attribute 'steps' of Decoder (model.py:12)".
        owner: id of the object that it changes, 0 for a global variable or one of an enclosing function; None where
            nobody has to put anything back, or nothing is known.
        keeps_tensor: it stores a tensor of this call, an argument or a result of the graph, beyond the call.
    """

    text: str
    owner: int | None
    keeps_tensor: bool


def side_effects_of_compilation() -> tuple[SideEffect, ...]:
    """What the code that Dynamo is compiling will do to Python state, asked while the backend runs.

    Objects that the code makes itself (its result) are left out, and so are attributes that are set to the constant
    that they hold already.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
        effects = output.side_effects
        objects = {id(item): item for item in effects.keepalive}
        owners = {variable: objects.get(key) for key, variable in effects.id_to_variable.items()}
        changed = [v for v, item in owners.items() if effects.is_modified(v) and not _is_made_here(v)]
        found = [effect for v in changed for effect in _changes_of(effects, v, owners[v])]
    except AttributeError:  # another release, with a record of another kind
        return (SideEffect("may change Python state: Dynamo's record was not found", None, keeps_tensor=False),)
    if getattr(output, "random_calls", ()):
        found.append(SideEffect("draws Python's random numbers", None, keeps_tensor=False))
    return tuple(found)


def _is_made_here(variable: Any) -> bool:
    return type(variable.mutation_type).__name__.endswith("New")


def _changes_of(effects: Any, variable: Any, item: Any) -> Iterator[SideEffect]:
    """The changes of one object: attribute by attribute, or as a whole."""
    from torch._dynamo import variables

    stacks = getattr(effects, "mutation_user_stacks", {}).get(variable) or [()]
    user = [frame for frame in stacks[-1] if not frame.filename.startswith(_LIBRARIES)]
    line = f" ({os.path.basename(user[-1].filename)}:{user[-1].lineno})" if user else ""
    attributes = effects.store_attr_mutations.get(variable, {})
    for name, value in attributes.items():
        keeps = _keeps_tensor(effects, variable, value)
        if isinstance(variable, variables.NewGlobalVariable) or isinstance(item, types.ModuleType):
            yield SideEffect(f"sets the global variable {name!r}{line}", 0, keeps)
        elif isinstance(variable, variables.CellVariable):
            yield SideEffect(f"sets a variable of an enclosing function{line}", 0, keeps)
        elif isinstance(value, variables.DeletedVariable):
            yield SideEffect(f"deletes the attribute {name!r} of {type(item).__name__}{line}", id(item), keeps)
        elif not _holds_already(item, name, value):
            yield SideEffect(f"sets the attribute {name!r} of {type(item).__name__}{line}", id(item), keeps)
    if not attributes:
        yield SideEffect(f"changes a {type(item).__name__}{line}", id(item), _keeps_tensor(effects, variable, variable))


def _holds_already(item: Any, name: str, value: Any) -> bool:
    """Whether an attribute is a constant, and set to just this one."""
    if not value.is_python_constant() or name not in getattr(item, "__dict__", {}):
        return False
    new, old = value.as_python_constant(), vars(item)[name]
    return new is old or (type(new) is type(old) and type(new) in (bool, int, float, str) and new == old)


def _keeps_tensor(effects: Any, owner: Any, value: Any) -> bool:
    """Whether ``value`` holds a tensor that belonged to nothing around its owner before: an argument or a result."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:

        def look(variable: Any) -> None:
            if id(variable) not in seen:
                seen.add(id(variable))
                waiting.extend(effects.store_attr_mutations.get(variable, {}).values() if variable is not owner else ())
                if isinstance(variable, TensorVariable):
                    found.append(variable)

        VariableTracker.visit(look, waiting.pop())
    root = _source_name(owner).partition("]")[0]  # L['model'
    return any(not root or _source_name(tensor).partition("]")[0] != root for tensor in found)


def _source_name(variable: Any) -> str:
    """Where Dynamo took a value from, ``L['self'].layers[0]``; empty for what the code computes."""
    try:
        name = getattr(variable.source, "name", "")
        text = name() if callable(name) else name
    except NotImplementedError:
        return ""
    return text if isinstance(text, str) else ""


# --- where something failed


def place_of_failure(error: BaseException, traced: Any = None) -> str | None:
    """The op that was running when ``error`` was raised, and the user's line that it comes from; None if unknown.

    Args:
        error: caught, so that it has a traceback.
        traced: the ``forward`` of the FX graph that was compiled, whose nodes Inductor's code names in comments.
    """
    node = _running_node(error, getattr(traced, "__self__", None))
    if node is not None:
        line = _user_line(node.meta.get("stack_trace") or "")
        return f"op {node.name} = {_op_text(node.target)}" + (f" at {line}" if line else "")
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if os.path.exists(name) and not name.startswith(_LIBRARIES):
            return f"at {os.path.basename(name)}:{number}: {linecache.getline(name, number).strip()}"
    return None


def _op_text(target: Any) -> str:
    """What a node calls, ``aten.add.Tensor`` or ``_operator.add``."""
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
_INDUCTOR_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\]")


def _running_node(error: BaseException, traced: fx.GraphModule | None) -> fx.Node | None:
    """The innermost node of an FX graph among the frames of a traceback."""
    found: fx.Node | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        # Frames that handle the error are left alone: a look at their variables would keep it, and them, alive.
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, fx.GraphModule) and type(module).forward.__code__ is frame.f_code:
            lines = getattr(module, "_lineno_map", None) or {}
            index = lines.get(number - (getattr(module, "_prologue_start", None) or 0))
            found = found if index is None else list(module.graph.nodes)[index]
        elif traced is not None and (names := _names_above(frame.f_code.co_filename, number)):
            # Compilers get copies whose values are named by position.
            nodes = list(traced.graph.nodes)
            numbers = [int(name[1:]) for name in names if re.fullmatch(r"v\d+", name)]
            found = nodes[numbers[-1]] if numbers and numbers[-1] < len(nodes) else found
    return found


def _names_above(filename: str, number: int) -> list[str]:
    """The source nodes that Inductor's comment above a line of its code names."""
    for line in reversed(range(max(1, number - 3), number)):
        match = _INDUCTOR_COMMENT.search(linecache.getline(filename, line))
        if match is not None:
            return match.group(1).split(", ")
    return []


def _user_line(stack_trace: str) -> str:
    """The last line of a stack trace as Dynamo writes it: ``file.py:12: code``."""
    lines = stack_trace.splitlines()
    for position in reversed(range(len(lines))):
        match = re.match(r'\s*File "([^"]*)", line (\d+)', lines[position])
        if match is not None:
            code = lines[position + 1].strip() if position + 1 < len(lines) else ""
            return f"{os.path.basename(match.group(1))}:{match.group(2)}: {code}"
    return ""
