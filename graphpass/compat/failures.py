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
        if os.path.exists(name) and not name.startswith(LIBRARIES):
            return f"at {os.path.basename(name)}:{number}: {linecache.getline(name, number).strip()}"
    return None


def _op_text(target: Any) -> str:
    """What a node calls, ``aten.add.Tensor`` or ``_operator.add``."""
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


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
