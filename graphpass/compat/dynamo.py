"""Dynamo's state: the frame, the backend, the placeholders of a graph, the compiled code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphpass.ledger import Reason

_SOURCE = "graphpass_source"


def frame_id() -> int | None:
    """Id of the Python frame that Dynamo is compiling, equal in all recompiles of a function; None at other times."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def argument_aliases() -> dict[str, str]:
    """{another name of a positional argument of the frame being compiled: its name in Dynamo's sources}.

    An argument may be named by its position, ``0`` or ``args[0]``. A module of torch.nn is called through a function
    with ``*args``, so Dynamo names the argument ``args[0]``, and the parameter of ``forward`` has the other name.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code, closure = (frame := InstructionTranslator.current_tx()).f_code, getattr(frame, "closure", None)
    except AttributeError:
        return {}
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    if names or not code.co_flags & inspect.CO_VARARGS:
        return {alias: name for p, name in enumerate(names) for alias in (str(p), f"args[{p}]")}
    called = dict(zip(code.co_freevars, closure or (), strict=False)).get("fn")
    function = getattr(called, "cell_contents", None)
    try:
        parameters = [*inspect.signature(getattr(function, "forward", function)).parameters]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        parameters = []
    by_position = {str(position): f"args[{position}]" for position in range(10)}
    return by_position | {name: f"args[{position}]" for position, name in enumerate(parameters)}


def recompile_reason() -> str:
    """The guard that made Dynamo compile the current frame again, with its line; empty if Dynamo does not say."""
    try:
        from torch._dynamo.utils import get_metrics_context

        reason = str(get_metrics_context()._metrics["recompile_reason"] or "").strip()
    except (ImportError, AttributeError, KeyError):
        return ""
    if re.match(r"\d+/\d+: (?!Unexpected recompilation)", reason) is None:  # beside another thread Dynamo cannot say
        return ""
    guard, _, comment = reason.partition("\n")[0].partition("#")
    line, _, place = comment.partition(" (HINT")[0].rpartition("#")
    guard, place = guard.partition(": ")[2].strip(), os.path.basename(place.partition(" in ")[0].strip())
    return f"{guard} (at {place}: {line.strip()})" if place and line.strip() else guard


def is_dynamo_compiled(runnable: Any) -> bool:
    """Whether calling ``runnable`` enters code that Dynamo compiled (torch.compile's module or function)."""
    return isinstance(runnable, torch._dynamo.eval_frame.OptimizedModule) or hasattr(
        runnable, "_torchdynamo_orig_callable"
    )


def registered_backend(name: str) -> Callable[..., Any] | None:
    """The backend that torch.compile calls for ``backend=name``, loading its entry point; None if not registered."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        return None


def calling_compiler() -> Any | None:
    """The object through which Dynamo is calling a backend, one per ``torch.compile``; None outside compilation."""
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    compiler = translator.output.compiler_fn
    return None if compiler is None else innermost_backend(compiler)


def backend_options(compiler: Any) -> dict[str, Any]:
    """The ``options`` passed to ``torch.compile``, read from the object that :func:`calling_compiler` returns."""
    options: dict[str, Any] = getattr(compiler, "kwargs", {}).get("options") or {}
    return options


def compilers_of(compiled: Any) -> list[Any]:
    """The objects through which Dynamo calls the backend of a ``torch.compile``'d callable, the callable's first.

    Objects of other callables with an equal backend follow, because Dynamo also runs the code compiled for them.
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
    """Whether ``function`` has reached the recompile limit, so that Dynamo will not compile it again."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and len(_cache_entries(code)) >= torch._dynamo.config.recompile_limit


def _cache_entries(code: types.CodeType) -> list[Any]:
    """Dynamo's cache entries of ``code``, the newest first."""
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


def came_from_tracing(error: BaseException) -> bool:
    """Whether ``error`` is one of Dynamo's own: it could not trace the code with these inputs."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


_REWRITE = "rewrite that line so that torch.compile traces it; torch.compile(model, fullgraph=True) raises there"


def graph_break_after(graph_module: fx.GraphModule) -> Reason | None:
    """The graph break after this graph; None if the function ends here.

    The remedy has Dynamo's first hint, or what makes Dynamo trace the RNN in the model.
    """
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    lines = [line.strip() for line in str(reason.reason).strip().splitlines()]
    text, hint = lines[0], next((line for line in lines if line.startswith("Hint: ")), "").removeprefix("Hint: ")
    hint = hint or (f"{ALLOW_RNN}, for {rnn}" if (rnn := untraced_rnn()) is not None else "")
    remedy = f"{_REWRITE}; Dynamo's hint: {hint}" if hint else _REWRITE
    if not reason.user_stack:
        return Reason(text, remedy)
    frame = reason.user_stack[-1]
    line = f": {frame.line}" if frame.line else ""
    return Reason(text, remedy, f"{os.path.basename(frame.filename)}:{frame.lineno}{line}")


_MODULE_CALLS = ("forward", "_call_impl", "_wrapped_call_impl")
ALLOW_RNN = "set torch._dynamo.config.allow_rnn = True before the model is compiled"


def untraced_rnn() -> str | None:
    """An RNN, GRU or LSTM of the modules whose calls are under way, ``rnn (LSTM)``; None where Dynamo traces it.

    Dynamo may leave out the whole function that calls it, without a graph break, and compile only what it calls. So the
    modules are those of the Python stack.
    """
    frame, outermost = None if torch._dynamo.config.allow_rnn else inspect.currentframe(), None
    while frame is not None:
        # A frame keeps what f_locals has shown for as long as it runs: frames of callers are not looked into.
        called = frame.f_locals.get("self") if frame.f_code.co_name in _MODULE_CALLS else None
        if isinstance(called, torch.nn.Module) and not is_dynamo_compiled(called):
            outermost = called
        frame = frame.f_back
    parts = () if outermost is None else outermost.named_modules()
    rnn = (f"{name} ({type(part).__name__})" for name, part in parts if isinstance(part, torch.nn.RNNBase))
    return next(rnn, None)


def floats_as_constants() -> contextlib.AbstractContextManager[None]:
    """Within the body, Dynamo guards floats by value.

    Symbolic floats, as in a module traced for all sizes, become constants in the end, at the cost of a second compile.
    """
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(specialize_float=True)
    return patched


def mark_maybe_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make a dimension symbolic where the model allows it; where the model fixes it, each size compiles separately."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def wrapped_floats(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """{``item()`` of a placeholder: the placeholder} of the Python floats that Dynamo passes as 0-d CPU tensors."""
    return {
        node: node.args[0]
        for node in graph.find_nodes(op="call_method", target="item")
        if isinstance(node.meta.get("example_value"), torch.SymFloat)
        and getattr(node.args[0].meta.get("grapharg"), "pass_arg_as_tensor", False)
    }


def float_varies(placeholder: fx.Node) -> bool:
    """Whether Dynamo has seen two values of a Python float, so that it compiles the float for all values."""
    if torch._dynamo.config.assume_static_by_default:  # else the float would be a constant already
        return True
    try:
        from torch._dynamo.pgo import auto_dynamic, get_code_state
    except ImportError:
        return False
    name = source_text(placeholder) or ""
    states = [state.automatic_dynamic for state in get_code_state().values()]
    return any(name in state and state[name].scalar is auto_dynamic for state in states)


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbolic size that tracing stored on a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def attribute_sources(graph_module: fx.GraphModule) -> dict[str, str]:
    """{attribute of Dynamo's graph module: its source in Dynamo's notation}; empty for another tracer's module."""
    sources = getattr(graph_module, "_param_name_to_source", None) or {}
    return {attribute: text for attribute, source in sources.items() if (text := _text_of(source)) is not None}


def meta_of_static_input(node: fx.Node, tensor: torch.Tensor, source: str) -> dict[str, Any]:
    """Metadata for a placeholder with a static address in place of a ``get_attr`` node that reads ``tensor``."""
    tensor_dict = {"_dynamo_static_input_type": "unguarded", **node.meta.get("tensor_dict", {})}
    value = node.meta.get("example_value", node.meta.get("val", tensor))
    return {**node.meta, "example_value": value, "tensor_dict": tensor_dict, _SOURCE: source}


def source_text(node: fx.Node) -> str | None:
    """The source of a placeholder in Dynamo's notation (``L['x']``), or None."""
    if _SOURCE in node.meta:
        return str(node.meta[_SOURCE])
    return _text_of(getattr(node.meta.get("grapharg"), "source", None))


def _text_of(source: Any) -> str | None:
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    return _DICT_ENTRY.sub(_entry_by_key, text) if isinstance(text, str) else None


_DICT_ENTRY = re.compile(r"dict\.__getitem__\(([^()]+), (list\(dict\.keys\(\1\)\)\[\d+\])\)")


def _entry_by_key(match: re.Match[str]) -> str:
    """``L['outputs'].hidden`` for Dynamo's text of an entry of a dict of another class, which has the key's number."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        scope = {"L": InstructionTranslator.current_tx().output.local_scope}
        of, key = (eval(text, scope) for text in match.groups())
    except Exception:  # outside of a compilation, or of another notation
        return match[0]
    return f"{match[1]}.{key}" if isinstance(key, str) and hasattr(of, key) else f"{match[1]}[{key!r}]"


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
    """Delete Dynamo's weak references to the arguments from the placeholders.

    ``torch.utils.swap_tensors``, which ``Module.to`` can use, rejects tensors that have weak references.
    """
    for node in graph.nodes:
        node.meta.pop("grapharg", None)


@functools.cache
def guards_module_layouts() -> bool:
    """Whether Dynamo notices that a tensor of a module has other strides at its old address.

    Torch 2.11 skips the guards of a dict's tensors while the dict is unchanged. This asks such a guard, without a
    compilation; False also if its interface is unknown.
    """
    module, tensor = torch.nn.Module(), torch.empty(2, 3, device="cpu")
    module.register_buffer("tensor", tensor)
    try:
        from torch._C._dynamo.guards import RootGuardManager
        from torch._dynamo.guards import GuardManagerType

        root: Any = RootGuardManager()
        kind = {"source": "", "guard_manager_enum": GuardManagerType.GUARD_MANAGER}
        guard = root.get_generic_dict_manager(example_value=module.__dict__, **kind)
        guard = guard.dict_getitem_manager(key="_buffers", example_value=module._buffers, **kind)
        guard = guard.dict_getitem_manager(key="tensor", example_value=tensor, **kind)
        keys = torch._C._dispatch_keys(tensor)
        guard.add_tensor_match_guard(tensor, [2, 3], [3, 1], "tensor", ["strides"], None, type(tensor), keys)
        knows = bool(root.check(module) and root.check(module))
        tensor.data = torch.empty(3, 2, device="cpu").t()
        return knows and not root.check(module)
    except (ImportError, AttributeError, TypeError):
        return False
