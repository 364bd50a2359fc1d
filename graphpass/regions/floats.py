"""Python floats as tensors: a float that varies from call to call is an input of the graph, not a constant in it.

Dynamo passes such a float as a 0-d float64 tensor and reads it back with ``item()``, which a graph would record. What
is computed with the number is computed with the tensor, in the type in which torch computes with a number. Where an
operator takes numbers only, Dynamo compiles each value apart.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from graphpass.compat import dynamo, symbolic
from graphpass.compat.nnmodules import where_of
from graphpass.regions.execute import execute, tensors_in, value_of
from graphpass.regions.names import display_name, names_of

# Torch computes these for 16-bit tensors in float32, with a number that is not rounded to 16 bits.
_ARITHMETIC = frozenset(f"aten::{name}" for name in ("add", "sub", "rsub", "mul", "div", "pow"))
_COMPARISONS = frozenset(f"aten::{name}" for name in ("gt", "lt", "ge", "le", "eq", "ne"))
_CHOICES = frozenset(f"aten::{name}" for name in ("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "fill"))
_MAKES = frozenset({"scalar_tensor", "tensor"})
# A number as another keyword argument, such as alpha, cannot be a tensor.
_KEYWORDS = frozenset({"input", "self", "other", "min", "max", "value", "exponent"})

_OF_NUMBERS: Mapping[Any, Any] = {
    **{f: f for f in (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.abs)},
    "__abs__": operator.abs,  # as Dynamo of torch 2.11 writes abs()
    torch.sym_max: torch.clamp_min,
    torch.sym_min: torch.clamp_max,
}
_NOT_IN_PLACE: Mapping[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    **{f"{name}_": name for name in ("add", "sub", "mul", "div", "pow")},
}


FloatConstants: TypeAlias = Sequence[tuple[str, str, str]]
"""(name of the float, operator that takes numbers only, line of the user's code) of each float that varies and is a
constant all the same."""


def floats_as_tensors(
    graph_module: fx.GraphModule,
) -> tuple[dict[int, Callable[[torch.Tensor], torch.Tensor] | None], FloatConstants]:
    """Compute with 0-d tensors what Dynamo computes with numbers that it reads from floats; else make them constants.

    Returns {position of an input that is a float: what moves it from the CPU, where Dynamo passes it}, and the
    constants. A float that is no argument is a constant until it has had a second value.
    """
    graph = graph_module.graph
    rewriting = _Rewriting(graph)
    for node in list(graph.nodes):
        rewriting.visit(node)
    made = {*rewriting.numbers, *rewriting.numbers.values(), *rewriting.cast.values()}
    for node in reversed(graph.nodes):
        if node in made and node.op != "placeholder" and not node.users:
            graph.erase_node(node)  # numbers of constants stay, where an operator takes numbers
    floats = {node for node in rewriting.numbers.values() if node.op == "placeholder" and node.users}
    positions = [p for p, node in enumerate(graph.find_nodes(op="placeholder")) if node in floats]
    moves = None if rewriting.device.type == "cpu" else functools.partial(_moved, rewriting.device)
    return dict.fromkeys(positions, moves), rewriting.constants


def _moved(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    # A fill: a copy from the CPU would wait, or fail inside a capture.
    return torch.full((), number.item(), dtype=torch.float64, device=device)


class _Rewriting:
    def __init__(self, graph: fx.Graph) -> None:
        #: Node whose value is a number computed from floats -> node with the same value as a float64 tensor.
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.cast: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # (number, dtype) -> the number as a tensor
        self.constants: list[tuple[str, str, str]] = []
        devices = [tensor.device for node in graph.nodes for tensor in tensors_in(value_of(node))]
        self.device = next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))
        self._graph = graph
        self._floats = dynamo.wrapped_floats(graph)
        self._items: dict[Any, fx.Node] = {}  # the symbol of a float -> the node that reads the float

    def visit(self, node: fx.Node) -> None:
        if node in self._floats:
            self._read(node, self._floats[node])
            return
        given = [argument for argument in node.all_input_nodes if argument in self.numbers]
        if given and node.target is operator.truediv and node.args[1] not in self.numbers:
            node = self._product(node)
        if given and not self._takes_tensors(node):
            expressions: list[Any] = [symbolic.expression_of(value_of(number)) for number in given]
            for symbol in {symbol for of in expressions for symbol in getattr(of, "free_symbols", ())}:
                if symbol in self._items:
                    self._make_constant(self._items.pop(symbol), node)

    def _product(self, quotient: fx.Node) -> fx.Node:
        """What torch computes where a number is divided by a tensor; a quotient of two numbers unchanged."""
        number, tensor = quotient.args
        if not isinstance(value_of(quotient), torch.Tensor) or number not in self.numbers:
            return quotient
        inverse = self._new("reciprocal", (tensor,), {}, before=quotient)
        product = self._new(operator.mul, (inverse, number), {}, before=quotient)
        product.meta["example_value"] = value_of(quotient)
        quotient.replace_all_uses_with(product)
        self._graph.erase_node(quotient)
        return product

    def _read(self, item: fx.Node, placeholder: fx.Node) -> None:
        self.numbers[item] = placeholder
        symbol = symbolic.expression_of(value_of(item))
        if not getattr(symbol, "is_Symbol", False):  # an operator made it a constant when it was traced
            self._make_constant(item, next(iter(item.users), None))
        elif dynamo.float_varies(placeholder) or _name(placeholder).isidentifier():
            self._items[symbol] = item
            with symbolic.fake_mode_of([value_of(placeholder)]):  # type: ignore[union-attr]
                placeholder.meta["example_value"] = torch.empty((), dtype=torch.float64, device=self.device)
        else:
            self._make_constant(item, None)

    def _make_constant(self, item: fx.Node, user: fx.Node | None) -> None:
        """Make the float that ``item`` reads a constant, which Dynamo guards, because ``user`` takes numbers only."""
        placeholder = self.numbers[item]
        item.replace_all_uses_with(float(value_of(item)))  # type: ignore[arg-type]
        if user is not None and dynamo.float_varies(placeholder):
            where = where_of(user.meta.get("stack_trace"))
            self.constants.append((_name(placeholder), display_name(user), where))

    def _takes_tensors(self, node: fx.Node) -> bool:
        """Replace a node by one that takes tensors for numbers; False, with nothing changed, if there is none."""
        result, names = value_of(node), names_of(node)
        if isinstance(result, torch.SymFloat):
            return self._computes_number(node)
        given = [tensor for argument in node.all_input_nodes for tensor in tensors_in(value_of(argument))]
        target = given[0] if node.target is operator.setitem and given else result
        if not isinstance(target, torch.Tensor) or {tensor.device for tensor in (*given, target)} != {self.device}:
            return False
        if names & _COMPARISONS:
            compared_in = given[0].dtype if given[0].is_floating_point() else torch.get_default_dtype()
            return self._put(node, self._with_tensors(node, compared_in))
        by_name = {name for name, argument in node.kwargs.items() if argument in self.numbers}
        if not target.is_floating_point() or not by_name <= _KEYWORDS or {"out", "rounding_mode"} & node.kwargs.keys():
            return False
        if names & _ARITHMETIC and target.dtype in (torch.float16, torch.bfloat16):
            # On a CPU, torch's kernels take a float64 tensor without dimensions as they take a number.
            is_taken = self.device.type == "cpu" and self._put(node, self._with_tensors(node, torch.float64))
            return is_taken or self._put(node, self._widened(node, target.dtype))
        if names & (_ARITHMETIC | _CHOICES) or node.target is operator.setitem:
            return self._put(node, self._with_tensors(node, target.dtype))
        if getattr(node.target, "__name__", "") in _MAKES and node.args[0] in self.numbers:
            return self._put(node, [self._new("clone", (self._as(node.args[0], target.dtype),), {}, before=node)])
        return False

    def _put(self, node: fx.Node, made: list[fx.Node]) -> bool:
        """Replace ``node`` by the last of the new nodes if that has a result of the same kind, else drop them."""
        is_same = bool(_kind(value_of(made[-1])) == _kind(value_of(node)))  # guard: floats_keep_types
        if is_same:
            made[-1].meta["example_value"] = value_of(node)  # guard: floats_keep_storages
            node.replace_all_uses_with(made[-1])
        for unused in [node] if is_same else reversed(made):
            self._graph.erase_node(unused)
        return is_same

    def _computes_number(self, node: fx.Node) -> bool:
        name = getattr(node.target, "__name__", "")
        target = getattr(torch, name[5:], None) if name.startswith("_sym_") else _OF_NUMBERS.get(node.target)
        args = [self.numbers.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
        if target is None or node.kwargs:
            return False
        if target in (torch.clamp_min, torch.clamp_max) and args[0] is node.args[0]:  # the tensor comes first
            args.reverse()
        self.numbers[node] = self._new(target, tuple(args), {}, before=node)
        return True

    def _with_tensors(self, node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
        made: list[fx.Node] = []

        def bound(of: Any) -> Any:
            if of is None or isinstance(of, fx.Node):
                return of
            made.append(self._new(torch.full, ((), of), {"dtype": dtype, "device": self.device}, before=node))
            return made[-1]

        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._as(argument, dtype))
        if "aten::clamp" in names_of(node):
            args = (args[0], *map(bound, args[1:]))
            kwargs = {name: bound(of) if name in ("min", "max") else of for name, of in kwargs.items()}
        return [*made, self._new(node.target, args, kwargs, before=node)]

    def _widened(self, node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
        narrow = [argument for argument in node.all_input_nodes if argument not in self.numbers]
        wide = {argument: self._new("to", (argument, torch.float32), {}, before=node) for argument in narrow}
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda argument: wide.get(argument) or self._as(argument, torch.float32)
        )
        is_in_place = node.target in _NOT_IN_PLACE
        result = self._new(_NOT_IN_PLACE[node.target] if is_in_place else node.target, args, kwargs, before=node)
        target, args = ("copy_", (node.args[0], result)) if is_in_place else ("to", (result, dtype))
        return [*wide.values(), result, self._new(target, args, {}, before=node)]

    def _as(self, number: Any, dtype: torch.dtype) -> Any:
        tensor = self.numbers.get(number)
        if tensor is None or dtype is torch.float64:
            return tensor or number
        if (number, dtype) not in self.cast:
            self.cast[number, dtype] = self._new("to", (tensor, dtype), {}, before=number)
        return self.cast[number, dtype]

    def _new(self, target: Any, args: Any, kwargs: Any, *, before: fx.Node) -> fx.Node:
        """A new node with the value that it has over fake tensors; no value if it fails."""
        with self._graph.inserting_before(before):
            kind = "call_method" if isinstance(target, str) else "call_function"
            node = self._graph.create_node(kind, target, args, kwargs)
        node.meta = {key: value for key, value in before.meta.items() if key in ("stack_trace", "nn_module_stack")}
        fake_mode = symbolic.fake_mode_of(value_of(argument) for argument in self._floats.values())
        with contextlib.suppress(Exception):
            node.meta["example_value"] = execute(node, fake_mode).value
        return node


def _name(placeholder: fx.Node) -> str:
    return re.sub(r"^L\['(\w+)'\]", r"\1", dynamo.source_text(placeholder) or placeholder.name)


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes = (*value.shape, *value.stride())
    return value.dtype, value.device, [symbolic.expression_of(size) for size in sizes]
