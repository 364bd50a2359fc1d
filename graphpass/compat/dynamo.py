"""Dynamo's state (the frame, the backend, the placeholders of a graph, side effects), and the compilers behind it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._logging._internal import trace_structured

from graphpass.compat import saving, symbolic
from graphpass.ledger import Reason

_SOURCE = "graphpass_source"


def frame_id() -> int | None:
    """Id of the Python frame that Dynamo is compiling, equal in all recompiles of a function; None at other times."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def translator() -> Any | None:
    """Dynamo's state of the frame that it is compiling in this thread; None outside of a compilation."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    with contextlib.suppress(AttributeError):
        return InstructionTranslator.current_tx()
    return None


def frame_code() -> types.CodeType | None:
    """The code of the Python frame that Dynamo is compiling; None outside of a compilation."""
    return getattr(translator(), "f_code", None)


def argument_aliases() -> dict[str, str]:
    """{another name of a positional argument of the frame being compiled: its name in Dynamo's sources}.

    An argument may be named by its position, ``0`` or ``args[0]``. A module of torch.nn is called through a function
    with ``*args``, so Dynamo names the argument ``args[0]``, and the parameter of ``forward`` has the other name.
    """
    if (frame := translator()) is None:
        return {}
    code, closure = frame.f_code, getattr(frame, "closure", None)
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
        reason = str(torch._dynamo.utils.get_metrics_context()._metrics["recompile_reason"] or "").strip()
    except (AttributeError, KeyError):
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
    from torch._dynamo import exc
    from torch._dynamo.backends.registry import lookup_backend

    try:
        return lookup_backend(name)
    except exc.InvalidBackend:
        return None


def calling_compiler() -> Any | None:
    """The object through which Dynamo is calling a backend, one per ``torch.compile``; None outside compilation."""
    from torch._dynamo.eval_frame import innermost_backend

    compiler = None if (frame := translator()) is None else frame.output.compiler_fn
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
    others = [innermost_backend(entry.backend) for entry in _entries_of(compiled)]
    return [backend, *(other for other in others if other == backend)]


def _entries_of(compiled: Any) -> list[Any]:
    """Dynamo's cache entries of a callable's code.

    Where the code of a model is torch's (``nn.Sequential``), they are those of one function of Dynamo's that runs all
    such models, and their guards tell the models' types apart.
    """
    code = code_of(compiled)
    entries = [] if code is None else _cache_entries(code)
    wrapper: Any = getattr(getattr(compiled, "forward", None), "_torchdynamo_orig_callable", None)
    if hasattr(wrapper, "__wrapped__"):
        checked = f"___check_type_id(L['fn'], {id(type(wrapper.__wrapped__))})"
        of_torch = _cache_entries(wrapper.__code__)
        entries += [entry for entry in of_torch if checked in str(entry.guard_manager)]  # guard: copies_of_one_type
    return entries


def compiled_ahead(compiled: Any) -> Any:
    """What the backend returned for a function that ``torch.compile(...).aot_compile`` made; anything else itself."""
    return getattr(getattr(compiled, "_artifacts", None), "compiled_fn", compiled)


def code_of(compiled: Any) -> types.CodeType | None:
    """The code of the function that a ``torch.compile``'d callable runs."""
    original = getattr(compiled, "_orig_mod", None) or getattr(compiled, "_torchdynamo_orig_callable", compiled)
    function = original.forward if isinstance(original, torch.nn.Module) else original
    return getattr(function, "__code__", None)


def _dynamo_callback(compiled: Any) -> Any | None:
    context = getattr(compiled, "dynamo_ctx", None)
    if context is not None:
        return context.callback
    function = getattr(compiled, "_compiled_call_impl", None) or compiled
    function = getattr(function, "__func__", function)
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    return inspect.getclosurevars(function).nonlocals.get("callback")


def _cache_entries(code: types.CodeType) -> list[Any]:
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


def came_from_tracing(error: BaseException) -> bool:
    """Whether Dynamo raised ``error``: it could not trace the code, or not say which guard made it compile again."""
    from torch._dynamo import exc, guards

    passed = (frame.f_globals is vars(guards) for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, exc.TorchDynamoException) or any(passed)


@contextlib.contextmanager
def errors_of_backend(name: str) -> Iterator[None]:
    """Within the body, errors come as Dynamo raises those of a backend that it calls."""
    from torch._dynamo import exc

    try:
        yield
    except (exc.ShortenTraceback, IndexError):
        raise
    except Exception as error:
        wrapped = exc.BackendCompilerFailed(types.SimpleNamespace(__name__=name), error, inspect.currentframe())
        raise wrapped.with_traceback(error.__traceback__) from None


_REWRITE = "rewrite that line so that torch.compile traces it; torch.compile(model, fullgraph=True) raises there"

_PADDED_RNN = (
    "call the RNN on padded sequences, not packed ones: in one direction a row's outputs are the same up to its length,"
    " and outputs[torch.arange(len(outputs)), lengths - 1] are the last; for the other direction give a second RNN each"
    " row reversed up to its length"
)


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
    remedy = _PADDED_RNN if "pack_padded" in hint or "pad_packed" in hint else remedy
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
    from torch._dynamo.pgo import auto_dynamic, get_code_state

    name = source_text(placeholder) or ""
    states = [state.automatic_dynamic for state in get_code_state().values()]
    return any(name in state and state[name].scalar is auto_dynamic for state in states)


def attribute_sources(graph_module: fx.GraphModule) -> dict[str, str]:
    """{attribute of Dynamo's graph module: its source in Dynamo's notation}; empty for another tracer's module."""
    sources = getattr(graph_module, "_param_name_to_source", None) or {}
    return {attribute: text for attribute, source in sources.items() if (text := _text_of(source)) is not None}


def meta_of_static_input(node: fx.Node, tensor: torch.Tensor, source: str) -> dict[str, Any]:
    """Metadata for a placeholder with a static address in place of a ``get_attr`` node that reads ``tensor``."""
    tensor_dict = {"_dynamo_static_input_type": "unguarded", **node.meta.get("tensor_dict", {})}
    value = node.meta.get("example_value", node.meta.get("val", tensor))
    return {**node.meta, "example_value": value, "tensor_dict": tensor_dict, _SOURCE: source}


def entry_meta(read: fx.Node, given: fx.Node, entry: int) -> dict[str, Any]:
    """Metadata for a placeholder in place of ``read``, which takes an entry of the list ``given``.

    The list has another tensor there in another call, so none has a static address.
    """
    left_out = {"tensor_dict", "source_fn_stack"}
    kept = {key: value for key, value in read.meta.items() if key not in left_out}
    return {**kept, _SOURCE: f"{source_text(given) or given.name}[{entry}]"}


def part_meta(given: fx.Node, part: torch.Tensor, path: Sequence[str]) -> dict[str, Any]:
    """Metadata for a placeholder of a tensor inside the wrapper ``given``: static where the wrapper is."""
    marked = {"_dynamo_static_input_type": "unguarded"} if is_static_address(given) else {}
    source = ".".join((source_text(given) or given.name, *path))
    return {"example_value": part, "tensor_dict": marked, _SOURCE: source}


def source_text(node: fx.Node) -> str | None:
    """The source of a placeholder in Dynamo's notation (``L['x']``), or None."""
    if _SOURCE in node.meta:
        return str(node.meta[_SOURCE])
    return _text_of(getattr(node.meta.get("grapharg"), "source", None))


def _text_of(source: Any) -> str | None:
    text = name_of_source(source)
    return None if text is None else _DICT_ENTRY.sub(_entry_by_key, text)


def name_of_source(source: Any) -> str | None:
    """A source in Dynamo's notation; None if it has no name."""
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else None


_DICT_ENTRY = re.compile(r"dict\.__getitem__\(([^()]+), (list\(dict\.keys\(\1\)\)\[\d+\])\)")


def _entry_by_key(match: re.Match[str]) -> str:
    """``L['outputs'].hidden`` for Dynamo's text of an entry of a dict of another class, which has the key's number."""
    try:
        scope = {"L": translator().output.local_scope}  # type: ignore[union-attr]
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


def pass_only(graph: fx.Graph, positions: Collection[int]) -> bool:
    """Make Dynamo call the compiled graph with the arguments at ``positions`` only; False if this is not its graph.

    Dynamo reads the placeholders of its own graph after the backend has returned, and writes the code that evaluates
    their arguments in every call. An argument that no operator reads, or a float that is a constant, needs no code.
    """
    placeholders = graph.find_nodes(op="placeholder")
    dropped = [node for position, node in enumerate(placeholders) if position not in positions]
    reads = [user for node in dropped for user in node.users]
    if any("grapharg" not in node.meta for node in placeholders) or not wrapped_floats(graph).keys() >= set(reads):
        return False
    for item in reads:
        item.replace_all_uses_with(float(item.meta["example_value"]))
        graph.erase_node(item)
    for node in dropped:
        graph.erase_node(node)
    return True


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


AtenHook = Callable[[fx.GraphModule], None]
"""A callback that receives the ATen graph of a region before the compiler changes it."""


def inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    show: AtenHook | None = None,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Compile with Inductor, whose CUDA graphs are off, and so is the pass that returns ``x`` itself for ``x * 1``.

    That pass gives results that torch's semantics keep apart one memory (``x * torch.ones(n)`` on 2.13, also ``x * 1``
    and ``x + 0`` on 2.15). The code after the graph may write to a result, so its input would change.

    ``show`` is called with the ATen graph. It disables AOTAutograd's cache, which would skip the trace, but not
    Inductor's cache. ``settings`` patches Inductor's configuration, which is a part of its cache's keys.
    """
    from torch._functorch import config as aot_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(aten: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if show is not None:
            show(aten)
        return compile_fx_inner(aten, inputs, **settings)

    # guard: results_folded_into_inputs
    off = dict.fromkeys(("triton.cudagraphs", "triton.cudagraph_trees", "joint_graph_constant_folding"), False)
    is_fresh = show is None or saving.are_serializable()
    graph_module = saving.traced_through(graph_module, example_inputs)
    caching = contextlib.nullcontext() if is_fresh else aot_config.patch(enable_autograd_cache=False)
    with caching, _examples_kept(example_inputs):
        compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            graph_module, list(example_inputs), inner_compile=compile_inner, config_patches={**settings, **off}
        )
    return compiled


def aot_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """Compile with AOTAutograd alone and run its ATen graph unchanged; ``show`` receives that graph."""
    from torch._dynamo.backends.debugging import aot_eager as backend
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as aot_config

    def run_as_it_is(aten: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        move_constants(aten)
        if show is not None:
            show(aten)
        return boxed_nop(aten, list(inputs))

    graph_module = saving.traced_through(graph_module, example_inputs)
    # As with Inductor, the graph creates its effect tokens, which order ops, instead of taking them as inputs.
    with aot_config.patch(unlift_effect_tokens=True), _examples_kept(example_inputs):
        compiled: Callable[..., Any] = backend(graph_module, list(example_inputs), fw_compiler=run_as_it_is)
    return compiled


def decompositions(compiler: str) -> Mapping[Any, Any]:
    """What a compiler decomposes: {operator: its decomposition}."""
    if compiler != "inductor":
        return {}
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Any] = select_decomp_table()
    return table


def move_constants(aten: fx.GraphModule) -> None:
    """Numbers that are put into a tensor go to its device: AOTAutograd has them on the CPU, and no capture copies them.

    One that is put where a mask says becomes an argument: ATen fills without a look at the mask only if it is on the
    CPU. Inductor computes such a constant in its kernel.
    """
    for node in aten.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default):
        into, indices, number = node.args[:3]
        chain = [number]
        while chain[-1].target is torch.ops.aten.lift_fresh_copy.default:
            chain.append(chain[-1].args[0])
        device, constant = into.meta["val"].device, chain[-1]
        if constant.op != "get_attr" or any(len(one.users) > 1 for one in chain):
            continue
        with symbolic.without_modes():
            value: torch.Tensor = getattr(aten, constant.target)
            mask = _mask_among(indices)
            if mask is not None and value.numel() == 1 and not any(node.args[3:]):  # guard: numbers_by_mask
                _fill(aten.graph, node, mask, value.item())
                continue
            setattr(aten, constant.target, value.to(device))
        for one in chain:
            if "val" in one.meta:
                one.meta["val"] = one.meta["val"].to(device)


def _mask_among(indices: Any) -> tuple[int, fx.Node] | None:
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 and given[0][1].meta["val"].dtype is torch.bool else None


def _fill(graph: fx.Graph, node: fx.Node, placed: tuple[int, fx.Node], number: complex) -> None:
    (place, mask), aten = placed, torch.ops.aten
    into: Any = node.args[0]
    with graph.inserting_before(node):
        for _ in range(into.meta["val"].dim() - place - mask.meta["val"].dim()):
            wider = graph.call_function(aten.unsqueeze.default, (mask, -1))
            wider.meta["val"], mask = mask.meta["val"].unsqueeze(-1), wider
        filled = graph.call_function(aten.masked_fill.Scalar, (into, mask, number))
    filled.meta = node.meta
    node.replace_all_uses_with(filled)
    graph.erase_node(node)


@contextlib.contextmanager
def _examples_kept(examples: Sequence[Any]) -> Iterator[None]:
    """Within the body, AOTAutograd traces with the mode of fake inputs that hold real tensors.

    It cannot convert such inputs to its own mode, which it otherwise does, if their sizes are symbols.
    """
    context, own = torch._guards.TracingContext.try_get(), symbolic.fake_mode_of(examples)
    if context is None or own is None or not own.propagate_real_tensors:
        yield
        return
    before, context.fake_mode = context.fake_mode, own
    try:
        yield
    finally:
        context.fake_mode = before


@contextlib.contextmanager
def tracing_with(fake_mode: Any) -> Iterator[None]:
    """Within the body, compilers use ``fake_mode`` and do not see the tracing context of Dynamo's current frame."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


@contextlib.contextmanager
def floats_as_tensors(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Within the body, compilers expect that their graph computes with tensors where the model has Python floats.

    AOTAutograd makes Dynamo start again, with a constant, for each float that its graph does not read as a number.
    """
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    symbols = symbolic.hints_of(symbolic.shape_env_of(example_inputs))
    floats = {str(symbol) for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)}
    floats -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= floats
    try:
        yield
    finally:
        TensorifyState.force_specializations -= floats


def trace(name: str, payload: Callable[[], str | Mapping[str, Any]], encoding: str = "json") -> None:
    """Add a record, or with ``encoding="string"`` a text, to the trace; without ``TORCH_TRACE`` it is not made.

    tlparse shows it as ``name``. Inside a compilation of Dynamo it belongs to the compiled frame, outside it stands
    alone.
    """
    named = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: named, payload_fn=payload, expect_trace_id=False)
