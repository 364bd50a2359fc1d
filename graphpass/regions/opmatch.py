"""Which nodes a listed splitting op stands for."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import fx

from graphpass.compat import operators, symbolic
from graphpass.compat.nnmodules import frames_of
from graphpass.errors import PartitionError, did_you_mean
from graphpass.regions.execute import execute, tensors_in, value_of
from graphpass.regions.opnames import (
    callable_names,
    canonical,
    dotted_names,
    module_of,
    names_of,
    overload_name,
    qualified,
)

__all__ = ["OpMatcher", "matcher_of"]

OpMatcher = Callable[[fx.Node], bool]


def matcher_of(op: object) -> OpMatcher:
    """A predicate on nodes for one listed splitting op: a name, an op object or a Python callable.

    Raises:
        PartitionError: nothing of that name is registered or importable.
    """
    if isinstance(op, str):
        return _matcher_of_name(op)
    if not callable(op):
        raise PartitionError(
            "a splitting op cannot be told from its value",
            expected="a name, an op object or a callable",
            found=repr(op),
            remedy="pass a name such as 'mylib::attention' or the function itself",
        )
    return _matcher_of_callable(op)


def _matcher_of_name(name: str) -> OpMatcher:
    if "::" not in name:
        function = _function_of(name)
        if function is not None:
            return _matcher_of_callable(function)
        namespace, _, rest = name.partition(".")
        if operators.operator_packet(namespace, rest.partition(".")[0]) is None:
            raise _unknown(name, dotted_names())
        name = f"{namespace}::{rest}"  # as graphs print it: mylib.attention.default
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = operators.operator_packet(namespace, base)
    if packet is None and namespace == "higher_order" and operators.higher_order_operator(base) is not None:
        return _by_names(frozenset({name}))
    if packet is None:
        raise _unknown(name, operators.registered_operator_names())
    if not overload:
        return _by_names(frozenset({canonical(f"{namespace}::{base}")}))
    if overload not in packet.overloads():
        raise _unknown(name, [f"{namespace}::{base}.{known}" for known in packet.overloads()])
    return functools.partial(_calls_overload, overload=getattr(packet, overload))


def _matcher_of_callable(op: Any) -> OpMatcher:
    op = operators.custom_op_overload(op) or op
    if isinstance(op, type) and issubclass(op, torch.nn.Module):
        return functools.partial(_in_module, kind=op)
    if hasattr(op, "overloadpacket"):
        if len(op.overloadpacket.overloads()) > 1:
            return functools.partial(_calls_overload, overload=op)
        return _by_names(frozenset({canonical(qualified(op.overloadpacket))}))
    names = callable_names(op)
    if not names:
        return functools.partial(_in_function, function=op, code=getattr(inspect.unwrap(op), "__code__", None))
    in_place = frozenset(name for name in names if name.endswith("_"))
    wanted = in_place or names
    return lambda node: node.target is op or bool(wanted & names_of(node))


def _in_module(node: fx.Node, *, kind: type[torch.nn.Module]) -> bool:
    """Whether a node calls a module of this class, or was traced inside the forward of one."""
    if node.op == "call_module" and isinstance(module_of(node), kind):
        return True
    return any(outer is kind for _, outer in node.meta.get("nn_module_stack", {}).values())


def _in_function(node: fx.Node, *, function: Any, code: CodeType | None) -> bool:
    """Whether a node calls this Python function, or was traced inside it: Dynamo inlines what it can."""
    if node.op == "call_function" and node.target is function:
        return True
    trace = node.meta.get("stack_trace") or ""
    if code is None or code.co_filename not in trace:
        return False
    last_line = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return any(
        frame.file == code.co_filename
        and frame.function == code.co_name
        and code.co_firstlineno <= frame.line <= last_line
        for frame in frames_of(trace)
    )


def _by_names(wanted: frozenset[str]) -> OpMatcher:
    return lambda node: bool(wanted & names_of(node))


def _calls_overload(node: fx.Node, *, overload: Any) -> bool:
    """Whether a node calls ``overload``: by its target, or by what the call resolves to with its fake arguments."""
    target = node.target
    if hasattr(target, "overloadpacket"):
        return target is overload
    packet = overload.overloadpacket
    if canonical(qualified(packet)) not in names_of(node):
        return False
    candidates = [known for known in packet.overloads() if "out" not in known or "out" in node.kwargs]
    return candidates == [overload_name(overload)] or _reaches(node, overload)


def _reaches(node: fx.Node, overload: Any) -> bool:
    """Whether the call, run on its fake arguments, reaches ``overload``; a composite op is matched by its schema."""
    packet = overload.overloadpacket
    arguments = [value_of(argument) for argument in node.all_input_nodes]
    try:
        execution = execute(node, value_of, symbolic.fake_mode_of(tensors_in(arguments)) or symbolic.new_fake_mode())
    except Exception:
        return False
    reached = [known for known in execution.overloads if known.overloadpacket is packet]
    if reached:
        return overload in reached
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return operators.resolved_overload(packet, args, kwargs) is overload


def _function_of(name: str) -> Any | None:
    """The callable that a dotted name of an imported module stands for; None if no imported module has it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is None:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
            if found is None:
                break
        if callable(found):
            return found
    return None


def _unknown(name: str, known: Iterable[str]) -> PartitionError:
    return PartitionError(
        f"unknown splitting op {name!r}",
        expected="a registered operator ('aten::add', 'mylib::attention') or an imported function's dotted name",
        found=f"{name!r}",
        remedy=did_you_mean(name, known, otherwise="register or import it before compiling"),
    )
