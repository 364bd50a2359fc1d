"""Canonical text of a partition for golden tests and readers: no addresses or paths, names in order of first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import symbolic
from graphpass.regions.execute import value_of
from graphpass.regions.opnames import display_name
from graphpass.regions.passes import is_rebuilt_output
from graphpass.regions.regions import Region
from graphpass.regions.symbols import GraphInput

__all__ = ["dump_partition"]


def dump_partition(
    inputs: Sequence[GraphInput], mutated_inputs: Sequence[int], regions: Sequence[Region], outputs: Any
) -> str:
    """The canonical text of a partition.

    Args:
        inputs: the graph's inputs.
        mutated_inputs: positions in ``inputs`` of the tensors that the graph writes to.
        regions: the regions in order.
        outputs: the graph's output with names in place of values.
    """
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
    if node.op in ("placeholder", "output"):
        return []
    if node.op == "get_attr":
        names.attribute(node.name, str(node.target))
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
        self._attributes: dict[str, str] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def of(self, name: str) -> str:
        if name in self._attributes:
            return self._attributes[name]
        return self._values.setdefault(name, f"v{len(self._values)}")

    def attribute(self, name: str, target: str) -> None:
        self._attributes[name] = f"self.{target}"

    def type_of(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_abbreviated(value.dtype)}{self._sizes(value.shape)}{self._place(value)}"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
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
        """Text for an argument of a node or for the output, with canonical names for values."""
        if isinstance(value, fx.Node) and is_rebuilt_output(value):
            return f"{getattr(value.target, '__name__', '?')}({', '.join(map(self.argument, value.args))})"
        if isinstance(value, fx.Node):
            return f"self.{value.target}" if value.op == "get_attr" else self.of(value.name)
        if isinstance(value, tuple):
            return f"({', '.join(map(self.argument, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in value.items())}}}"
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
    """A dtype in short: ``f32``, ``bf16``, ``i64``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
