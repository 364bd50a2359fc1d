"""What torch needs to save a compiled graph and a traced call, and to load both in another process.

See Note [Saved starts].
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import importlib
import inspect
import itertools
import marshal
import operator
import os
import pickle
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from graphpass.compat import symbolic
from graphpass.compat.operators import is_of_torch
from graphpass.compat.subclasses import Rebuild, is_wrapper

_META = frozenset({"example_value", "val", "stack_trace", "custom", "unbacked_bindings"})
_NONCE = (f"graphpass-{os.getpid()}-{number}" for number in itertools.count())
_ADDRESS = re.compile(r"(?<=, )\d+(?=\), type=|\)$)|\b0x[0-9a-f]+")
"""In the code of a guard: what an identity is compared with, and the address of an object."""
_Kind = TypeVar("_Kind")


class CannotSaveError(Exception):
    """Something cannot be saved; the text says what."""


@contextlib.contextmanager
def serializable() -> Iterator[None]:
    """Within the body, artifacts are compiled so that they can be saved; they are new ones.

    Inductor compiles each reduction with one configuration: of several each process would time its own fastest.
    """
    from torch._dynamo.backends import debugging
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    patch = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True, "enable_autograd_cache": True}
    if hasattr(debugging, "AOTEagerOutputCode"):  # then artifacts of aot_eager can be saved, too
        patch["force_autograd_cache"] = True
    # A result from the cache would come without the aten graph that the proofs read: no entry has this tag.
    config: Any = torch.compiler.config
    # guard: saved_one_reduction
    one_reduction = {"test_configs.force_filter_reduction_configs": True, "dynamic_scale_rblock": False}
    with aot_config.patch(patch), config.patch(cache_key_tag=next(_NONCE)), inductor_config.patch(one_reduction):
        yield


def are_serializable() -> bool:
    """Whether the caller is inside of :func:`serializable`."""
    from torch._functorch import config

    return bool(config.bundled_autograd_cache)


def traced_through(graph_module: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """A graph of operators on plain tensors, if it is to be saved and makes wrappers, which torch saves no calls of."""
    if not are_serializable() or not any(isinstance(node.target, Rebuild) for node in graph_module.graph.nodes):
        return graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = symbolic.fake_mode_of(examples) or contextlib.nullcontext()

    def run(*given: Any) -> Any:
        return fx.Interpreter(graph_module).run(*given)

    with torch.no_grad(), fake_mode, symbolic.python_dispatcher(), fx.traceback.preserve_node_meta():
        return make_fx(run, _allow_non_fake_inputs=True)(*examples)


def guards_of_compilers() -> str | None:
    """What AOTAutograd has made Dynamo guard in the current compilation besides sizes; None if nothing."""
    context = torch._guards.TracingContext.try_get()
    found = [] if context is None else context.guards_context.aotautograd_guards
    return f"AOTAutograd's guard {found[0]}" if found else None


@functools.cache
def _pickler() -> Any:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx._graph_pickler import GraphPickler

    class Pickler(GraphPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                return marshal.loads, (marshal.dumps(obj),)
            if isinstance(obj, MappingProxyType):
                return _view_of, (dict(obj),)
            if isinstance(obj, torch.Tensor) and not isinstance(obj, FakeTensor):
                raise CannotSaveError("a tensor that the code itself makes or holds, and that no module has")
            if callable(getattr(obj, "serialize", None)) and not isinstance(obj, type):
                return _artifact, (Bundle.serialize_compile_artifacts(Bundle(obj)),)
            if isinstance(obj, FakeTensor) and obj._base is not None:  # torch pickles no base
                return super().reducer_override(symbolic.without_base(obj, obj.fake_mode))
            with _without_wrappers(obj) as wrappers:
                reduced = super().reducer_override(obj)
            if isinstance(obj, fx.GraphModule):
                make, (data, state) = reduced
                data.gm_dict["meta"] = {}
                for node in data.graph.nodes:
                    node.target = wrappers.get(node.name, node.target)
                    value = node.meta.get("example_value")
                    if is_wrapper(value):
                        del node.meta["example_value"]
                    if isinstance(value, FakeTensor):
                        node.meta["example_value"] = symbolic.LateValue(*self.reducer_override(value))
                return _with_code, (make, data, state)
            return reduced

    return Pickler


@contextlib.contextmanager
def _without_wrappers(obj: Any) -> Iterator[dict[str, Any]]:
    """Within the body, a graph calls no :class:`Rebuild`, which torch does not pickle; {node: the call} of them."""
    nodes = list(obj.graph.nodes) if isinstance(obj, fx.GraphModule) else []
    found = {node: node.target for node in nodes if isinstance(node.target, Rebuild)}
    for node in found:
        node.target = operator.getitem
    try:
        yield {n.name: types.SimpleNamespace(unpickle=functools.partial(_first, call)) for n, call in found.items()}
    finally:
        for node, target in found.items():
            node.target = target
        if found:
            obj.recompile()


def _first(target: Any, _: Any) -> Any:
    return target


def _view_of(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


def _artifact(saved: bytes) -> Any:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle

    return Bundle.deserialize_compile_artifacts(saved).compiled_fn


def _with_code(make: Callable[..., fx.GraphModule], data: Any, state: Any) -> fx.GraphModule:
    graph_module = make(data, state)
    graph_module.recompile()
    return graph_module


def dumps(record: Any) -> bytes:
    """A record with graphs, fake tensors and artifacts as bytes, for :func:`loads`."""
    from torch.fx._graph_pickler import Options

    options = Options(ops_filter=None, node_metadata_key_filter=_META.__contains__)
    try:
        with torch.inference_mode(False):
            data: bytes = _pickler().dumps(record, options)
    except CannotSaveError:
        raise
    except Exception as error:
        raise CannotSaveError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return data


def loads(data: bytes) -> Any:
    """The record of :func:`dumps`, over a shape environment of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.inference_mode(False):
        return GraphPickler.loads(data, mode)


# -- calls that Dynamo has traced -----------------------------------------------------------------------------------


def runs_compiled_ahead(kind: type[_Kind]) -> type[_Kind]:
    """Declare to ``torch.compile(...).aot_compile`` that it may run callables of this class."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    SerializableCallable.register(kind)
    return kind


class Recorded(BaseException):
    """Raised by what the backend returns in :func:`record_call`: the trace is done, and nothing is to run."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Dynamo's work for one kind of call of a function."""

    code: bytes  #: what Dynamo made of the function's code
    graph: str  #: the name in that code of the function's only graph
    modules: Mapping[str, str]  #: {name in that code: Python module}
    guards: bytes  #: the guards on arguments and ambient state
    #: for each leaf of each argument the marks of its dynamic dimensions: its guard compares them, torch saves none
    marks: Mapping[str, list[dict[str, Any]]]
    #: the guards on the model and on global variables, without what they compare with: see :func:`rebuilt`
    of_model: bytes


@dataclass(frozen=True, slots=True)
class ModelGuard:
    """A guard on the model or on a global variable, as Dynamo made it or as it is made again."""

    kinds: tuple[str, ...]  #: of the guard, and of those that it consists of
    expression: str  #: what it reads
    arguments: tuple[Any, ...]  #: such as the name of an attribute
    code: tuple[str, ...]  #: what it checks, as text without addresses


def record_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backend: str,
    options: Mapping[str, Any],
    dynamic: bool | None,
    owners: Sequence[str],
) -> tuple[TracedCall, list[types.CodeType], set[str]]:
    """Trace a call of a new function object for a backend whose graph raises :class:`Recorded`.

    ``owners`` are the variables of enclosing functions that hold the model. Returns the traced call, the code that was
    traced, and the names of its Python modules.
    """
    package, of_model = _package_of(function), list[Any]()

    def keep(entries: Sequence[Any]) -> list[bool]:
        of_model.clear()
        kept = []
        for entry in entries:
            name = _name_of(entry.orig_guard)
            is_own = "G[" in name or any(f"L['{owner}']" in name for owner in owners)
            kept.append(not is_own)
            if is_own:
                of_model.append(entry.orig_guard)
        return kept

    wrapper = torch._TorchCompileWrapper(backend, None, dict(options), dynamic)
    compiled = torch._dynamo.optimize(backend=wrapper, dynamic=dynamic, guard_filter_fn=keep, package=package)(function)
    try:
        with torch._dynamo.config.patch(strict_precompile=True):
            compiled(*args, **kwargs)
    except Recorded:
        pass
    except Exception as error:
        raise CannotSaveError(str(error).strip().partition("\n")[0]) from error
    for code in package.traced:
        require_lasting(code)  # guard: saved_lasting
    call = _traced_call(function, inspect.signature(function).bind(*args, **kwargs).arguments, package, of_model)
    return call, package.traced, {source.module for source in package._source_info.inlined_sources}


def _package_of(function: Callable[..., Any]) -> Any:
    """A package of torch that keeps all code objects that Dynamo traces for a function, in ``traced``."""
    from torch._dynamo.package import CompilePackage

    class Package(CompilePackage):
        traced: list[types.CodeType]

        def add_inlined_source(self, sources: Any) -> None:
            self.traced.extend(sources)
            super().add_inlined_source(sources)

    package = Package(function)
    package.traced = []
    return package


def require_lasting(code: types.CodeType) -> None:
    """Refuse traced code whose meaning Dynamo does not guard and another process may not share."""
    if code.co_name == "getenv" and code.co_filename in ("<frozen os>", os.__file__):
        raise CannotSaveError("the trace reads os.getenv, which nothing guards; os.environ is guarded")
    for one, following in itertools.pairwise(dis.get_instructions(code)):
        held = one.argval if one.opname == "LOAD_CONST" and following.opname != "CONTAINS_OP" else None
        if isinstance(held, frozenset) and any(isinstance(item, str) for item in held) and len(held) > 1:
            raise CannotSaveError(f"{code.co_name} iterates over a set of strings, in an order of this process's own")


def _traced_call(
    function: Callable[..., Any], given: Mapping[str, Any], package: Any, of_model: Sequence[Any]
) -> TracedCall:
    from torch._dynamo.package import SerializedCode

    entries = list(package._codes.values())
    guarded = entries[0].guarded_codes
    if len(entries) != 1 or len(guarded) != 1 or len(entries[0].backend_ids) != 1:
        raise CannotSaveError("the model has graph breaks: Python runs between its graphs")
    code, scope = SerializedCode.to_code_object(guarded[0].dynamo_code), function.__globals__
    modules = {name: value.__name__ for name, value in scope.items() if isinstance(value, types.ModuleType)}
    (graph,) = entries[0].backend_ids
    known = {graph, "__name__", "__builtins__", *modules}
    held = [name for name in code.co_names if name in scope.keys() - known and "__builtins_dict__" not in name]
    if held:
        raise CannotSaveError(f"its code holds objects of this process: {', '.join(held)}")
    try:
        return TracedCall(
            marshal.dumps(code),
            str(graph),
            modules,
            guarded[0].guards_state,
            {name: list(map(_marks_of, tree_leaves(value))) for name, value in given.items()},
            pickle.dumps(list(map(_plain, of_model))),
        )
    except Exception as error:
        raise CannotSaveError(f"a guard: {error}") from error


def calls_triton(graph_module: fx.GraphModule) -> bool:
    """Whether a graph calls a Triton kernel of the user: its node has the kernel's number in this process, no code."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any("triton_kernel_wrapper" in str(node.target) for graph in graphs for node in graph.nodes)


def _name_of(guard: Any) -> str:
    return str(guard.name)


def _plain(guard: Any) -> Any:
    """A guard without references to objects; what it compares with is looked up again."""

    def without(value: Any) -> Any:
        return None if isinstance(value, weakref.ref) or type(value).__name__ == "TensorWeakRef" else value

    create = guard.create_fn
    if isinstance(create, functools.partial):
        keywords = {name: without(value) for name, value in create.keywords.items()}
        create = functools.partial(create.func, *map(without, create.args), **keywords)
    of_process = ("guard_types", "code_list", "obj_weakref", "guarded_class_weakref", "stack", "user_stack")
    return dataclasses.replace(guard, create_fn=create, **dict.fromkeys(of_process))


def _marks_of(value: Any) -> dict[str, Any]:
    named = vars(value) if isinstance(value, torch.Tensor) else {}
    return {name: mark for name, mark in named.items() if name.startswith(("_dynamo_", "_has_dynamo_"))}


ABSENT = type("Absent", (), {})()
"""The value of an expression that has none."""


def values_of(expressions: Iterable[str], call: TracedCall, function: Callable[..., Any]) -> dict[str, Any]:
    """{expression of a guard on the model or on global variables: its value, or :data:`ABSENT`}."""
    from torch._dynamo.guards import _get_closure_vars

    bind_modules(call, function)
    scope = {**_get_closure_vars(), "L": _closure_of(function), "G": function.__globals__}
    values = {}
    for expression in expressions:
        try:
            values[expression] = eval(expression, scope)
        except Exception:
            values[expression] = ABSENT
    return values


def _closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def bind_modules(call: TracedCall, function: Callable[..., Any]) -> None:
    """Make the Python modules, under the names that a traced call has for them, known to a function."""
    from torch._dynamo.output_graph import get_builtins_dict
    from torch._dynamo.package import load_guards_state

    scope = function.__globals__
    scope.update({name: importlib.import_module(module) for name, module in call.modules.items()})
    name = load_guards_state(call.guards).output_graph.name_of_builtins_dict_key_in_fglobals
    if name:
        scope[name] = get_builtins_dict(scope)


def setting_that_differs(call: TracedCall) -> str | None:
    """The names of torch's settings that are not those of a call's trace, which its guards compare; None if all are."""
    from torch._dynamo.package import load_guards_state

    state: Any = load_guards_state(call.guards).output_graph.global_state_guard
    return None if state.check() else str(state.reason()).strip()


def rebuilt(function: Callable[..., Any], call: TracedCall) -> tuple[Any, list[ModelGuard]]:
    """Torch's tree of the guards of a call, made anew, and those on the model and global variables as they are now."""
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.output_graph import OutputGraphCommon
    from torch._dynamo.package import load_guards_state

    scope, state = function.__globals__, load_guards_state(call.guards)
    local = {**state.output_graph.local_scope, **_closure_of(function)}
    for name, marks in call.marks.items():
        for leaf, named in zip(tree_leaves(local.get(name)), marks, strict=False):
            for mark, value in named.items():
                setattr(leaf, mark, value)
    saved, live = state.output_graph._guards.inner, pickle.loads(call.of_model)
    guards = torch._guards.GuardsSet(type(saved)([*saved, *live]))  # guard: saved_live_guards
    output = dataclasses.replace(state.output_graph, local_scope=local, global_scope=scope, _guards=guards)
    parts = {"shape_code_parts": state.shape_code_parts, "runtime_global_scope": scope}
    manager = CheckFunctionManager(function.__code__, OutputGraphCommon(output), **parts).guard_manager
    return manager, list(map(_model_guard, live))


def _model_guard(guard: Any) -> ModelGuard:
    create = guard.create_fn
    given = (*create.args, *create.keywords.values()) if isinstance(create, functools.partial) else ()
    plain = tuple(
        _name_of(value) if isinstance(value, torch._guards.Source) else value
        for value in given
        if not isinstance(value, weakref.ref)
    )
    kinds = tuple(dict.fromkeys((guard.create_fn_name(), *(guard.guard_types or ()))))
    code = tuple(_ADDRESS.sub("", part) for part in guard.code_list or ())
    return ModelGuard(kinds, _name_of(guard), plain, code)


def install_call(function: Callable[..., Any], call: TracedCall, guards: Any, graph: Callable[..., Any]) -> None:
    """Let a function run a traced call, as if Dynamo had just traced it; other calls are traced as ever."""
    from torch._C._dynamo.eval_frame import _load_precompile_entry

    function.__globals__[call.graph] = torch._dynamo.disable(graph)
    _load_precompile_entry(function.__code__, guards, marshal.loads(call.code))


def implementations_of(op: str) -> list[Callable[..., Any]] | None:
    """The Python functions behind an operator, none for one in C++; None if torch hides the code of a composite."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    name = "::".join(op.split(".")[:2])
    definition: Any = OPDEFS.get(name)
    kernel = singleton.find(name).fake_impl.kernel
    fake = None if kernel is None else kernel.func
    if definition is not None:
        given = (definition._init_fn, definition._abstract_fn, *definition._backend_fns.values())
        return [function for function in (*given, fake) if function is not None]
    is_known = (
        is_of_torch(name)
        or name.startswith(("c10d::", "_c10d_functional::"))
        or not torch._C._dispatch_has_kernel(name)
    )
    if not is_known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return None
    return [] if fake is None else [fake]
