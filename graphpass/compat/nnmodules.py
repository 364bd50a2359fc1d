"""Module internals, and the lines and modules of the user that a graph's nodes come from."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpass.compat import dynamo, symbolic


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


def features_of_layers(graph: fx.Graph) -> Iterator[tuple[Any, int]]:
    """(size of the features, width of the weights) for each input of an attention layer that is one operator."""
    for layer in (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention):
        for node in graph.find_nodes(op="call_function", target=layer):
            inputs = list(itertools.takewhile(lambda argument: isinstance(argument, fx.Node), node.args))
            width: Any = node.args[len(inputs)]
            yield from ((symbolic.example_value(one).shape[-1], width) for one in inputs)


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


_TORCH = os.path.dirname(torch.__file__)
LIBRARIES = (_TORCH, os.path.dirname(os.path.dirname(__file__)))

_FRAME = re.compile(r'File "(.+?)", line (\d+)(?:, in (\S+))?')
_INDUCTOR_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\]")


class TraceFrame(NamedTuple):
    """One frame of the stack trace that Dynamo writes on a node."""

    file: str
    line: int
    function: str
    code: str  #: the line's text; empty if the trace does not have it


@functools.lru_cache(maxsize=1024)
def frames_of(stack_trace: str | None) -> tuple[TraceFrame, ...]:
    """The frames of a node's stack trace, the outermost first; empty without a trace."""
    lines = (stack_trace or "").splitlines()
    frames = []
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        match = _FRAME.search(line)
        if match is not None:
            code = "" if _FRAME.search(following) else following.strip()
            frames.append(TraceFrame(match[1], int(match[2]), match[3] or "", code))
    return tuple(frames)


@functools.lru_cache(maxsize=1024)
def where_of(stack_trace: str | None) -> str:
    """The innermost line of a stack trace outside torch, as ``model.py:123: x.mean(1)``; empty without a trace."""
    frames = frames_of(stack_trace)
    outside = [frame for frame in frames if not frame.file.startswith(_TORCH + os.sep)]
    for frame in (outside or frames)[-1:]:
        return f"{os.path.basename(frame.file)}:{frame.line}" + (f": {frame.code}" if frame.code else "")
    return ""


def place_of_failure(error: BaseException, traced: Any = None) -> str | None:
    """The op that raised ``error`` and its line of user code; None if unknown.

    ``traced`` is the ``forward`` of the compiled FX graph, whose nodes the comments in Inductor's code name.
    """
    node = _running_node(error, getattr(traced, "__self__", None))
    if node is not None:
        line = where_of(node.meta.get("stack_trace"))
        return f"op {node.name} = {_op_text(node.target)}" + (f" at {line}" if line else "")
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if os.path.exists(name) and not name.startswith(LIBRARIES):
            return f"at {os.path.basename(name)}:{number}: {linecache.getline(name, number).strip()}"
    return None


def _op_text(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _running_node(error: BaseException, traced: fx.GraphModule | None) -> fx.Node | None:
    running: fx.Node | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        # Do not read f_locals of other frames: in those that handle the error it would keep the error alive.
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, fx.GraphModule) and type(module).forward.__code__ is frame.f_code:
            lines = getattr(module, "_lineno_map", None) or {}
            index = lines.get(number - (getattr(module, "_prologue_start", None) or 0))
            running = running if index is None else list(module.graph.nodes)[index]
        elif traced is not None and (names := _names_above(frame.f_code.co_filename, number)):
            # The graph that compilers receive names its values by position: v0, v1, ...
            nodes = list(traced.graph.nodes)
            numbers = [int(name[1:]) for name in names if re.fullmatch(r"v\d+", name)]
            running = nodes[numbers[-1]] if numbers and numbers[-1] < len(nodes) else running
    return running


def _names_above(filename: str, number: int) -> list[str]:
    """The source nodes in Inductor's comment above a line of its generated code."""
    for line in reversed(range(max(1, number - 3), number)):
        match = _INDUCTOR_COMMENT.search(linecache.getline(filename, line))
        if match is not None:
            return match.group(1).split(", ")
    return []


def compiled_code() -> str:
    """File and name of the function that Dynamo is compiling, ``model.py:forward``; empty outside of a compilation.

    The code after a graph break is a function of another name.
    """
    frame = dynamo.translator()
    return "" if frame is None else code_name(frame.output.root_tx.f_code)


def code_name(code: types.CodeType) -> str:
    """File and name of a function's code."""
    return f"{os.path.basename(code.co_filename)}:{code.co_name}"
