"""The stitched callable: generated Python that calls the regions in order and frees each value after its last use.

And the canonical text of a partition, for golden tests and readers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import symbolic
from graphpass.errors import PartitionError
from graphpass.regions.analysis import is_rebuilt_output
from graphpass.regions.assign import Region
from graphpass.regions.execute import owner_of, value_of
from graphpass.regions.names import display_name
from graphpass.regions.symbols import GraphInput

FILENAME = "<graphpass stitched>"


class Stitching:
    """The stitched function before it is bound to callables: its names, and its code for each set of fixed regions.

    It is saved and outlives the graph, of which it keeps no node.
    """

    def __init__(self, gm: fx.GraphModule, regions: Sequence[Region]) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._regions = regions
        self._arguments = [node.name for node in placeholders]
        self._variables = self._variable_names(placeholders)
        self._taken = frozenset(self._variables.values())
        self._constants: dict[str, Any] = {}  # other names in the source: output constants, returned parameters
        self._defaults = tuple(node.args[0] for node in placeholders if node.args)
        self._parameters = ", ".join(map(self._parameter, placeholders))
        output = gm.graph.output_node()
        self._result = self._expression(output.args[0] if output.args else None)
        self._returned = [
            used.name
            for node in output.all_input_nodes
            for used in (node.all_input_nodes if is_rebuilt_output(node) else (node,))
        ]
        self._codes: dict[frozenset[str], CodeType] = {}

    def bind(
        self, callees: Mapping[str, Callable[..., Any]], fixed: Mapping[str, Sequence[Any]] | None = None
    ) -> Callable[..., Any]:
        """See :meth:`graphpass.regions.Partition.bind`."""
        names = [region.name for region in self._regions]
        if callees.keys() != set(names):
            raise PartitionError(
                "the stitched code calls every region once",
                expected=f"callees for {', '.join(names) or 'no region'}",
                found=", ".join(sorted(callees)) or "none",
                remedy="pass one callable for each name in Partition.regions",
            )
        values = fixed or {}
        key = frozenset(values)
        if key not in self._codes:
            compiled = compile(self.source(key), FILENAME, "exec").co_consts
            self._codes[key] = next(code for code in compiled if isinstance(code, CodeType))
        results = {
            self._variables[output]: value
            for region in self._regions
            if region.name in values
            for output, value in zip(region.outputs, values[region.name], strict=True)
        }
        return FunctionType(self._codes[key], {**self._constants, **results, **callees}, "stitched", self._defaults)

    def source(self, fixed: Collection[str] = ()) -> str:
        """The function, with ``del`` of values after their last use; ``fixed`` regions return the same objects."""
        last_use = self._last_uses(fixed)
        released: list[list[str]] = [[] for _ in range(len(self._regions) + 1)]
        for value, position in last_use.items():
            released[position].append(value)
        lines = [f"def stitched({self._parameters}):"]
        if not fixed:  # else the unused arguments are as many as the weights, and the caller holds them
            lines += self._release([name for name in self._arguments if name not in last_use])
        for position, region in enumerate(self._regions):
            outputs = self._listed(region.outputs)
            unpacking = f"{outputs}{',' if len(region.outputs) == 1 else ''} = " if outputs else ""
            call = f"{unpacking}{region.name}({self._listed(region.inputs)})"
            lines.append(f"    {region.name}()" if region.name in fixed else f"    {call}")
            lines += self._release(released[position])
        return "\n".join([*lines, f"    return {self._result}", ""])

    def _listed(self, values: Iterable[str]) -> str:
        return ", ".join(self._variables[value] for value in values)

    def _release(self, values: Sequence[str]) -> list[str]:
        return [f"    del {self._listed(values)}"] if values else []

    def _last_uses(self, fixed: Collection[str]) -> dict[str, int]:
        """Value name -> position of the last region that reads it from a local variable; the output is one more."""
        last: dict[str, int] = {}
        for position, region in enumerate(self._regions):
            if region.name not in fixed:
                last.update(dict.fromkeys(region.inputs, position))
        last.update(dict.fromkeys(self._returned, len(self._regions)))
        kept = {output for region in self._regions if region.name in fixed for output in region.outputs}
        return {name: position for name, position in last.items() if name not in kept}

    def _variable_names(self, placeholders: Iterable[fx.Node]) -> dict[str, str]:
        """Value name -> variable. Arguments keep their names, which callers use as keywords, unless a region has it."""
        used = {region.name for region in self._regions}
        named: dict[str, str] = {}
        values = [output for region in self._regions for output in region.outputs]
        wanted = [(node.name, str(node.target).lstrip("*")) for node in placeholders]
        for value, name in [*wanted, *((value, value) for value in values)]:
            free = next(name + "_" * n for n in itertools.count() if name + "_" * n not in used)
            used.add(free)
            named[value] = free
        return named

    def _parameter(self, node: fx.Node) -> str:
        target = str(node.target)
        stars = target[: len(target) - len(target.lstrip("*"))]
        default = f"={self._constant(node.args[0])}" if node.args else ""
        return f"{stars}{self._variables[node.name]}{default}"

    def _expression(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._node_expression(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({', '.join(map(self._expression, value))})"
        if isinstance(value, (tuple, list, dict)):
            return _container_text(value, self._expression)
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _node_expression(self, node: fx.Node) -> str:
        if is_rebuilt_output(node):
            return f"{self._constant(node.target)}({', '.join(map(self._expression, node.args))})"
        if node.op == "get_attr":
            return self._constant(operator.attrgetter(str(node.target))(owner_of(node)))
        return self._variables[node.name]

    def _constant(self, value: Any) -> str:
        names = (f"_constant_{number}" for number in itertools.count(len(self._constants)))
        name = next(name for name in names if name not in self._taken and name not in self._constants)
        self._constants[name] = value
        return name


def _container_text(value: Any, write: Callable[[Any], str]) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write(key)}: {write(item)}' for key, item in value.items())}}}"
    items = ", ".join(map(write, value))
    return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"


def dump_partition(
    inputs: Sequence[GraphInput], mutated_inputs: Sequence[int], regions: Sequence[Region], outputs: Any
) -> str:
    """The canonical text of a partition, names in order of first use; ``outputs`` has names in place of values."""
    names = _Names()
    lines = ["inputs:"]
    for position, graph_input in enumerate(inputs):
        marks = (" static" if graph_input.is_static else "") + (" mutated" if position in mutated_inputs else "")
        lines.append(f"  {names.of(graph_input.name)}: {names.type_of(graph_input.value)}{marks}")
    for region in regions:
        lines += _region_lines(region, names)
    lines.append(f"return {names.argument(outputs)}")
    return "\n".join(lines) + "\n"


def _region_lines(region: Region, names: _Names) -> list[str]:
    takes = [names.of(name) for name in region.inputs]
    lines = [f"{region.name} {region.kind}({', '.join(takes)}):"]
    if region.why is not None:
        lines.append(f"  reason: {region.why}")
    if region.mutated_inputs:
        lines.append(f"  mutates: {', '.join(takes[i] for i in region.mutated_inputs)}")
    lines += [f"  {line}" for node in region.graph_module.graph.nodes for line in _node_lines(node, names)]
    lines.append(f"  -> {', '.join(names.of(name) for name in region.outputs) or 'nothing'}")
    return lines


def _node_lines(node: fx.Node, names: _Names) -> list[str]:
    if node.op in ("placeholder", "output", "get_attr"):
        return []
    arguments = [names.argument(value) for value in node.args]
    arguments += [f"{key}={names.argument(value)}" for key, value in node.kwargs.items()]
    call = f"{display_name(node)}({', '.join(arguments)})"
    if value_of(node) is None:
        names.of(node.name)
        return [call]
    return [f"{names.of(node.name)}: {names.type_of(value_of(node))} = {call}"]


class _Names:
    """Renames values to v0, v1, ... and symbols to s0, s1, ... in the order of first use in the text."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def of(self, name: str) -> str:
        return self._values.setdefault(name, f"v{len(self._values)}")

    def type_of(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_abbreviated(value.dtype)}{self._sizes(value.shape)}{self._place(value)}"
        if isinstance(value, symbolic.NUMBERS):
            return f"Sym({self._symbolic(value)})"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.type_of, value))})"
        return type(value).__name__

    def _sizes(self, sizes: Iterable[Any]) -> str:
        return f"[{', '.join(map(self._symbolic, sizes))}]"

    def _place(self, value: torch.Tensor) -> str:
        """The device unless it is the CPU, and the strides unless the tensor is contiguous."""
        place = "" if value.device.type == "cpu" else f" {value.device}"
        if value.layout is not torch.strided:
            return f"{place} {str(value.layout).removeprefix('torch.')}"
        expected: Any = sympy.Integer(1)
        strides = []
        for size in reversed(value.shape):
            strides.append(expected)
            expected = expected * symbolic.expression_of(size)
        actual = [symbolic.expression_of(stride) for stride in reversed(value.stride())]
        same = all(
            size == 1 or a == e or sympy.simplify(a - e) == 0
            for a, e, size in zip(actual, strides, map(symbolic.expression_of, reversed(value.shape)), strict=True)
        )
        return place if same else f"{place} strides {self._sizes(value.stride())}"

    def _symbolic(self, size: Any) -> str:
        expression = symbolic.expression_of(size)
        if isinstance(expression, int) or expression is None:
            return str(size)
        for symbol in sorted(expression.free_symbols, key=str):
            letter = "u" if symbolic.is_unbacked(symbol) else "s"
            known = sum(str(name).startswith(letter) for name in self._symbols.values())
            self._symbols.setdefault(symbol, sympy.Symbol(f"{letter}{known}", integer=True))
        return str(expression.xreplace(self._symbols))

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node) and is_rebuilt_output(value):
            return f"{getattr(value.target, '__name__', '?')}({', '.join(map(self.argument, value.args))})"
        if isinstance(value, fx.Node):
            return f"self.{value.target}" if value.op == "get_attr" else self.of(value.name)
        if isinstance(value, (tuple, list, dict)):
            return _container_text(value, self.argument)
        if isinstance(value, slice):
            parts = ["" if part is None else self.argument(part) for part in (value.start, value.stop, value.step)]
            return ":".join(parts if value.step is not None else parts[:2])
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")
        if value is Ellipsis:
            return "..."
        return getattr(value, "__name__", type(value).__name__)


def _abbreviated(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
