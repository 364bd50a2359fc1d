"""What Dynamo knows: the frame, the compiler, the placeholders of a graph, the compiled code."""

from __future__ import annotations

import contextlib
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def frame_id() -> int | None:
    """Which Python frame Dynamo is compiling now: the same for all recompiles of one function; None outside."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def is_dynamo_compiled(runnable: Any) -> bool:
    """Whether calling ``runnable`` enters code that Dynamo compiled (torch.compile's module or function)."""
    return isinstance(runnable, torch._dynamo.eval_frame.OptimizedModule) or hasattr(
        runnable, "_torchdynamo_orig_callable"
    )


def registered_backend(name: str) -> Callable[..., Any] | None:
    """What torch.compile calls for ``backend=name``, an entry point loaded for it; None where nobody registered one."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        return None


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


def is_at_recompile_limit(function: Any) -> bool:
    """Whether Dynamo compiles ``function`` no more, however it is called."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and len(_cache_entries(code)) >= torch._dynamo.config.recompile_limit


def _cache_entries(code: types.CodeType) -> list[Any]:
    """What Dynamo has compiled ``code`` to, the newest first."""
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


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


def floats_as_constants() -> contextlib.AbstractContextManager[None]:
    """Within the body, Dynamo guards floats by value.

    Symbolic ones (of a module traced for all sizes) end as constants all the same, and everything is compiled twice.
    """
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return patched


def mark_maybe_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let a dimension be symbolic where the model allows it; sizes that it fixes are compiled each by itself."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


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


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbolic size that tracing left on a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


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


def is_static_address(node: fx.Node) -> bool:
    """Whether the placeholder is a parameter, a buffer, or a tensor marked with ``mark_static_address``."""
    from torch._dynamo.utils import get_static_address_type

    value = node.meta.get("example_value", node.meta.get("val"))
    marked = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return isinstance(value, torch.nn.Parameter) or bool(marked or get_static_address_type(value))


def forget_arguments(graph: fx.Graph) -> None:
    """Drop what Dynamo noted of each placeholder's argument: weak references, which would keep it from being swapped.

    ``torch.utils.swap_tensors``, and with it ``Module.to`` on request, takes no tensor that has one.
    """
    for node in graph.nodes:
        node.meta.pop("grapharg", None)
