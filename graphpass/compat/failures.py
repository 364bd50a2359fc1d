"""The op and the line of user code that an error comes from."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from typing import Any

import torch
from torch import fx

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))

_INDUCTOR_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\]")


def place_of_failure(error: BaseException, traced: Any = None) -> str | None:
    """The op that raised ``error`` and its line of user code; None if unknown.

    Args:
        error: a caught exception, which therefore has a traceback.
        traced: the ``forward`` of the compiled FX graph; comments in Inductor's code name its nodes.
    """
    node = _running_node(error, getattr(traced, "__self__", None))
    if node is not None:
        line = _user_line(node.meta.get("stack_trace") or "")
        return f"op {node.name} = {_op_text(node.target)}" + (f" at {line}" if line else "")
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if os.path.exists(name) and not name.startswith(LIBRARIES):
            return f"at {os.path.basename(name)}:{number}: {linecache.getline(name, number).strip()}"
    return None


def _op_text(target: Any) -> str:
    """A node's target as text: ``aten.add.Tensor``, ``_operator.add``."""
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _running_node(error: BaseException, traced: fx.GraphModule | None) -> fx.Node | None:
    """The innermost node of an FX graph among the frames of a traceback."""
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


def _user_line(stack_trace: str) -> str:
    """The innermost frame of Dynamo's stack trace as ``file.py:12: code``; empty if the trace has no frame."""
    lines = stack_trace.splitlines()
    for position in reversed(range(len(lines))):
        match = re.match(r'\s*File "([^"]*)", line (\d+)', lines[position])
        if match is not None:
            code = lines[position + 1].strip() if position + 1 < len(lines) else ""
            return f"{os.path.basename(match.group(1))}:{match.group(2)}: {code}"
    return ""
