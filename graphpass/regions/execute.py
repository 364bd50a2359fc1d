"""Run one node on fake tensors and record its value, the operators that it called, and the storages that it wrote.

The graph does not change, and the shape environment of the fake mode gains no guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from graphpass.compat import memory, operators, symbolic, trees
from graphpass.compat.subclasses import plain_tensors

_STATISTICS = ("running_mean", "running_var")
# Operators that write to these arguments without a mark in the schema: {operator: flag that enables it}.
UNDECLARED_WRITES = {
    **dict.fromkeys((f"aten::{kind}batch_norm" for kind in ("", "native_", "cudnn_", "miopen_")), "training"),
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
}


@dataclass(frozen=True, slots=True)
class Execution:
    """The record of one run of a node."""

    value: Any  #: its result on fake tensors
    overloads: tuple[Any, ...]  #: the operator overloads that the dispatcher saw, in order
    functions: tuple[Any, ...]  #: the torch functions that were called, in order
    written: frozenset[int]  #: ids of the storages that the node wrote to
    exchanged: tuple[fx.Node, ...]  #: the arguments that have another storage afterwards, see Note [Exchanged memory]
    memory: frozenset[int]  #: ids of the storages of these arguments, before and after


def value_of(argument: Any) -> Any:
    """The metadata of a node: fake tensors, symbolic sizes, plain values, or tuples of these; None if unknown.

    Other arguments are their own values.
    """
    if not isinstance(argument, fx.Node):
        return argument
    is_known = "example_value" in argument.meta or "val" in argument.meta
    return symbolic.example_value(argument) if is_known else None


def call_for(source: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A new call with this value, for the same line of the user's code as the node ``source``."""
    node = source.graph.call_function(target, args)
    node.meta = {key: source.meta[key] for key in ("stack_trace", "nn_module_stack") if key in source.meta}
    node.meta["example_value"] = value
    return node


def are_fake(values: Iterable[Any]) -> bool:
    """Whether there are tensors without contents among these."""
    return symbolic.fake_mode_of(values) is not None


def values_at(node: fx.Node) -> list[Any]:
    """The value of a node and those of its arguments."""
    return [value_of(node), *map(value_of, node.all_input_nodes)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a value, in order; those inside a tensor that wraps others, such as a nested one."""
    if isinstance(value, torch.Tensor):
        yield from (tensor for _, tensor in plain_tensors(value))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storages_of(value: Any) -> frozenset[int]:
    """Ids of the storages of all tensors inside a value."""
    storages = (memory.storage_id(tensor) for tensor in tensors_in(value))
    return frozenset(storage for storage in storages if storage is not None)


def argument_storages(node: fx.Node) -> frozenset[int]:
    """Ids of the storages of a node's arguments."""
    return frozenset[int]().union(*(storages_of(value_of(argument)) for argument in node.all_input_nodes))


def owner_of(node: fx.Node) -> torch.nn.Module:
    """The module in which the targets of a node's get_attr and call_module are looked up."""
    owner = node.graph.owning_module
    assert owner is not None, "partition works on the graph of a module"
    return owner


def execute(node: fx.Node, fake_mode: Any = None) -> Execution:
    """Run ``node`` on the fake tensors in its arguments' metadata; ``fake_mode`` is theirs by default.

    Tensors are passed detached: in-place changes of shape do not affect the metadata. Errors of the op propagate.
    """
    if fake_mode is None:
        tensors = tensors_in([value_of(argument) for argument in node.all_input_nodes])
        fake_mode = symbolic.fake_mode_of(tensors) or symbolic.new_fake_mode()
    with ExitStack() as stack:
        stack.enter_context(symbolic.quiet_shapes(fake_mode))
        stack.enter_context(torch.no_grad())
        stack.enter_context(fake_mode)
        stack.enter_context(symbolic.python_dispatcher())
        given: dict[fx.Node, Any] = {}
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda argument: given.setdefault(argument, _detached(value_of(argument)))
        )
        state = _fake_state(node, fake_mode)
        parts_of = {node: tuple(tensors_in(value)) for node, value in given.items()}
        before = {node: storages_of(parts) for node, parts in parts_of.items()}
        functions = stack.enter_context(_FunctionLog())
        writes = stack.enter_context(_DispatchLog())
        value = _call(node, args, kwargs, state)
    exchanged = tuple(
        node
        for node, parts in parts_of.items()
        # guard: exchanged_parts
        if storages_of((parts, given[node])) != before[node] or not writes.exchanged.isdisjoint(map(id, parts))
    )
    return Execution(
        value=value,
        overloads=tuple(writes.overloads),
        functions=tuple(functions.called),
        written=frozenset(writes.written),
        exchanged=exchanged,
        memory=frozenset[int]().union(
            *(before[node] | storages_of(parts) for node, parts in parts_of.items() if exchanged)
        ),
    )


def _fake_state(node: fx.Node, fake_mode: Any) -> dict[str, Any]:
    if node.op != "call_module":
        return {}
    module = owner_of(node).get_submodule(str(node.target))
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: symbolic.fakify(fake_mode, tensor).detach() for name, tensor in state.items()}


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], state: dict[str, Any]) -> Any:
    target: Any = node.target
    if node.op == "call_method":
        return _call_method(args[0], target, args[1:], kwargs)
    if node.op == "call_module":
        return torch.func.functional_call(owner_of(node).get_submodule(target), state, args, kwargs)
    return target(*args, **kwargs)


def _call_method(tensor: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return getattr(tensor, name)(*args, **kwargs)
    except (RuntimeError, AssertionError):
        # PyTorch built without CUDA rejects the device of .to() before the fake mode sees the call.
        device = "cuda" if name == "cuda" else next(iter(args), kwargs.get("device"))
        if name not in ("to", "cuda") or not isinstance(device, (str, torch.device)):
            raise
        return memory.copied_to(tensor, torch.device(device))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
        return trees.map_tensors(torch.Tensor.detach, value)
    return value


class _FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class _DispatchLog(operators.TorchDispatchMode):
    """Records every operator that the dispatcher sees, and what it does to the storages of its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overloads: list[Any] = []
        self.written: set[int] = set()
        self.exchanged: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.overloads.append(func)
        for target in (t for value in _written_arguments(func, args, kwargs) for t in tensors_in(value)):
            self.written |= storages_of(target)
            if _takes_over(func, args, kwargs, target):  # guard: exchange_by_metadata
                self.exchanged.add(id(target))
        return func(*args, **kwargs)


# Of a fake tensor, torch 2.15 exchanges the storage in some processes only.
_TAKE_OVER = frozenset({"aten::shallow_copy_data_"})


def _takes_over(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.Tensor) -> bool:
    """Whether an operator gives ``target`` the storage of another argument, as the metadata may show already."""
    # guard: exchange_by_name
    if operators.operator_name(overload) in _TAKE_OVER:
        return True
    leaves, spec = trees.flatten((args, kwargs))
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf is not target]
    if storages_of(others).isdisjoint(storages_of(target)):
        return False
    apart = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
    storage = memory.storage_id(apart)
    args, kwargs = trees.unflatten([apart if leaf is target else leaf for leaf in leaves], spec)
    overload(*args, **kwargs)
    return memory.storage_id(apart) != storage


def _written_arguments(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    schema = operators.schema_of(overload)
    flag = UNDECLARED_WRITES.get(schema.name)
    if not schema.is_mutable and flag is None:
        return
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    for argument in schema.arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (argument.name in _STATISTICS and arguments.get(flag)):
            yield arguments.get(argument.name)
