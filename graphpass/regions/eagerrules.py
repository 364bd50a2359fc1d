"""Eager rules: each takes one node and returns why it cannot be captured, or None. And what a listed op matches."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import fx

from graphpass.compat import nnmodules, operators
from graphpass.compat.subclasses import is_made_of_tensors
from graphpass.errors import PartitionError, did_you_mean
from graphpass.regions.analysis import SplitReason, facts_of, free_symbols
from graphpass.regions.execute import execute, storages_of, tensors_in, value_of, values_at
from graphpass.regions.names import (
    callable_names,
    canonical,
    display_name,
    dotted_names,
    module_of,
    names_of,
    overload_name,
    qualified,
    traits_of,
)

_FIXED_SHAPE = "keep the shape fixed: a mask and torch.where, instead of indexing with a mask"
_FIXED_SHAPES = {
    "nonzero": "keep the shape fixed: torch.nonzero_static(x, size=n) pads its result",
    "repeat_interleave": "keep the shape fixed: pass output_size",
    "one_hot": "keep the shape fixed: pass num_classes",
    "bincount": "keep the shape fixed: torch.zeros(n).scatter_add_ counts the same",
    "unique": "the number of different values is known on the device alone: compute it outside of the model",
}
_BRANCHES = {
    "cond": "compute both branches and choose with torch.where",
    "while_loop": "run a fixed number of steps, and keep finished rows as they are with torch.where",
    "while_loop_stack_output": "run a fixed number of steps, and keep finished rows as they are with torch.where",
}


SplitRule = Callable[[fx.Node], SplitReason | None]

# Ops that read a tensor's value into Python, on any device; named as in ``names``.
READS = frozenset(
    f"aten::{name}" for name in ["item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "numpy"]
)
READING_METHODS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
READING_BUILTINS = (bool, int, float)

BRANCHING = frozenset(_BRANCHES)
ASSIGNMENTS = frozenset({"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"})
STRIDING = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def splits_at(ops: Iterable[object]) -> SplitRule:
    """A rule that matches the listed splitting ops: names, op objects or callables.

    Raises:
        PartitionError: a name is unknown.
    """
    if isinstance(ops, str):
        raise PartitionError(
            "splitting_ops is one string",
            expected="a list of ops",
            found=repr(ops),
            remedy=f"write splitting_ops=[{ops!r}]",
        )
    matchers = [matcher_of(op) for op in ops]

    def splitting_op(node: fx.Node) -> SplitReason | None:
        if any(matches(node) for matches in matchers):
            return SplitReason("splitting op", display_name(node))
        return None

    return splitting_op


def unsafe_tag(node: fx.Node) -> SplitReason | None:
    """An operator whose author tagged it ``cudagraph_unsafe``."""
    if not any(torch.Tag.cudagraph_unsafe in traits.tags for traits in traits_of(node, out=True)):
        return None
    text = f"{display_name(node)} is tagged cudagraph_unsafe"
    return SplitReason("unsafe tag", text, remedy="use an operator without that tag")


def reshapes_in_place(node: fx.Node) -> bool:
    """Whether a node changes shape or strides of its argument in place: ``t_``, ``unsqueeze_``, ``resize_``."""
    return any(torch.Tag.inplace_view in traits.tags for traits in traits_of(node, out=False))


def read_by_storage(node: fx.Node) -> frozenset[int]:
    """Ids of the storages that a node addresses from their start, not from its argument's offset (``as_strided``)."""
    if not node.all_input_nodes or STRIDING.isdisjoint(names_of(node)):
        return frozenset()
    return storages_of(value_of(node.all_input_nodes[0]))


def beyond_input(node: fx.Node) -> SplitReason | None:
    """``as_strided`` of an input, which may reach past the input's elements. See Note [Copied inputs]."""
    if read_by_storage(node).isdisjoint(facts_of(node).copied_storages):
        return None
    text = f"{display_name(node)} of an input reaches into memory that is not copied"
    return SplitReason(
        "beyond an input", text, remedy="pass the whole tensor and index it, instead of as_strided of a view"
    )


def kept_memory(node: fx.Node) -> SplitReason | None:
    """A node of memory that outlives the call in another tensor than before it. See Note [Exchanged memory]."""
    kept = facts_of(node).kept
    if not kept:
        return None
    values = values_at(node)
    return next((kept[storage] for storage in sorted(storages_of(values)) if storage in kept), None)


def nested_tensor(node: fx.Node) -> SplitReason | None:
    """A tensor that consists of several tensors (``torch.jagged``): Python code chooses what is done to each."""
    values = values_at(node)
    for value in values:
        if is_made_of_tensors(value) and value.is_nested:
            text = f"{display_name(node)} has a tensor that consists of several tensors ({value.layout})"
            remedy = "compute with the values and the offsets, or with a padded tensor and its mask"
            return SplitReason("nested tensor", text, remedy=remedy)
    return None


def object_with_state(node: fx.Node) -> SplitReason | None:
    """A call on an object that is no tensor (``torch.ScriptObject``, an opaque type): a replay would not change it."""
    for value in values_at(node):
        kind = operators.type_with_state(value)
        if kind is not None:
            text = f"{display_name(node)} has an object of type {kind}, which may change"
            constant = f"register the type with typ={operators.CONSTANT_TYPE!r} if its objects never change"
            remedy = f"keep the state in a tensor, or {constant}"
            return SplitReason("object with state", text, remedy=remedy)
    return None


def host_read(node: fx.Node) -> SplitReason | None:
    """Python or the CPU waits for a tensor's value: ``item``, ``tolist``, ``bool(t)``, a copy off the accelerator."""
    arguments = [value_of(argument) for argument in node.all_input_nodes]
    tensors = list(tensors_in(arguments))
    if not tensors:
        return None
    by_name = bool(READS & names_of(node)) or (node.op == "call_method" and node.target in READING_METHODS)
    by_builtin = node.op == "call_function" and node.target in READING_BUILTINS
    if by_name or by_builtin or _leaves_accelerator(node, tensors):
        remedy = "keep the value on the device: compute with the tensor instead of a Python number"
        return SplitReason("host read", display_name(node), remedy=remedy)
    return None


def _leaves_accelerator(node: fx.Node, arguments: list[torch.Tensor]) -> bool:
    results = list(tensors_in(value_of(node)))
    return any(r.device.type == "cpu" for r in results) and any(a.device.type not in ("cpu", "meta") for a in arguments)


def control_flow(node: fx.Node) -> SplitReason | None:
    """``torch.cond`` or ``while_loop``: the host chooses the branch at each run, but a graph records one branch."""
    if operators.is_higher_order(node.target) and str(node.target) in BRANCHING:
        text = f"the host decides how {display_name(node)} goes on"
        return SplitReason("control flow", text, remedy=_BRANCHES[str(node.target)])
    return None


def data_dependent_shape(node: fx.Node) -> SplitReason | None:
    """A tensor whose shape depends on data: ``nonzero``, ``unique``, ``masked_select``, indexing with a mask.

    So does assigning many values under a mask: the host waits for their count.
    """
    if _reads_a_size(node) or _always_data_dependent(node) or _assigns_under_mask(node):
        names = " ".join((display_name(node), *names_of(node)))
        remedy = next((remedy for name, remedy in _FIXED_SHAPES.items() if name in names), _FIXED_SHAPE)
        return SplitReason("data-dependent shape", display_name(node), remedy=remedy)
    return None


def _assigns_under_mask(node: fx.Node) -> bool:
    """``x[mask] = values`` or ``index_put`` by a mask; one value that is not accumulated is a masked fill."""
    if names_of(node).isdisjoint(ASSIGNMENTS):
        return False
    given = dict(zip(("self", "indices", "values", "accumulate"), node.args, strict=False)) | node.kwargs
    parts = given["indices"] if isinstance(given["indices"], (tuple, list)) else (given["indices"],)
    known = map(value_of, parts)
    if not any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in known):
        return False
    values = value_of(given["values"])
    is_one = not isinstance(values, torch.Tensor) or all(isinstance(size, int) and size == 1 for size in values.shape)
    return not is_one or bool(given.get("accumulate", False))


def _reads_a_size(node: fx.Node) -> bool:
    """Whether a result of the node has a size that this node produces at run time."""
    readers, value = facts_of(node).readers, value_of(node)
    if not readers or not any(True for _ in tensors_in(value)):
        return False
    return any(readers.get(symbol) is node for symbol in free_symbols(value))


def _always_data_dependent(node: fx.Node) -> bool:
    functional = traits_of(node, out=False)
    if not functional or not all(torch.Tag.dynamic_output_shape in traits.tags for traits in functional):
        return False
    num_classes: Any = (*node.args[1:], node.kwargs.get("num_classes", -1))[0]
    return "aten::one_hot" not in names_of(node) or bool(num_classes == -1)


def host_scalar(node: fx.Node) -> SplitReason | None:
    """A node that uses a number read on the host: a capture would record that of the first run.

    The remedy is that of the node that reads, if it has a reason of its own.
    """
    readers = facts_of(node).readers
    if not readers:
        return None
    values = values_at(node)
    for symbol in sorted(free_symbols(values), key=str):
        reader = readers.get(symbol)
        if reader is not None and reader is not node:
            is_reason_enough = host_read(reader) is not None or data_dependent_shape(reader) is not None
            remedy = "" if is_reason_enough else "keep the number on the device, as a tensor of no dimensions"
            return SplitReason(
                "host scalar", f"{display_name(node)} uses what {display_name(reader)} read", remedy=remedy
            )
    return None


def foreign_device(node: fx.Node) -> SplitReason | None:
    """A tensor that is not on the graph's device: on the CPU in a GPU graph, or on a second device."""
    home = facts_of(node).main_device
    if home is None or home.type in ("cpu", "meta"):
        return None
    for tensor in tensors_in(values_at(node)):
        # No kernel reads a tensor without entries: a stand-in for a weight, as torch.nn.functional passes it on.
        if tensor.device.type == "cpu" and tuple(tensor.shape) != (0,):  # guard: tensors_without_entries
            text = f"{display_name(node)} has a tensor on the CPU in a graph on {home}"
            remedy = "create the tensor on the model's device, or register it as a buffer of the module"
            return SplitReason("cpu tensor", text, remedy=remedy)
        if tensor.device.type != "cpu" and tensor.device not in (home, torch.device("meta")):
            text = f"{display_name(node)} has a tensor on {tensor.device}, not {home}"
            return SplitReason("second device", text, remedy="move the tensor to the model's device before the call")
    return None


DEFAULT_RULES: tuple[SplitRule, ...] = (
    unsafe_tag,
    host_read,
    control_flow,  # guard: control_flow_splits
    data_dependent_shape,
    host_scalar,
    beyond_input,  # guard: read_by_storage
    kept_memory,  # guard: exchanged_memory
    nested_tensor,
    object_with_state,  # guard: objects_with_state
    foreign_device,
)


OpMatcher = Callable[[fx.Node], bool]


def matcher_of(op: object) -> OpMatcher:
    """A predicate on nodes for one listed splitting op: a name, an op object or a Python callable."""
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
        if operators.higher_order_operator(name.removeprefix("higher_order.")) is not None:
            namespace, rest = "higher_order", name.removeprefix("higher_order.")
        elif operators.operator_packet(namespace, rest.partition(".")[0]) is None:
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
        for frame in nnmodules.frames_of(trace)
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
    try:
        execution = execute(node)
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
