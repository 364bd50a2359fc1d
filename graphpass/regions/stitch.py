"""The stitched callable: generated Python that calls the regions in order and frees each value after its last use."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from graphpass.errors import PartitionError
from graphpass.regions.passes import is_rebuilt_output
from graphpass.regions.regions import Region

__all__ = ["Stitching", "stitch"]

FILENAME = "<graphpass stitched>"


@dataclass(frozen=True, slots=True)
class Stitching:
    """Generated code, before it is bound to the callables of the regions.

    Attributes:
        source: one function definition.
        code: its code object, shared by everything that :meth:`bind` returns.
        constants: values of the other names in the source: output constants, parameters that are returned.
        defaults: default values of the trailing arguments.
        callees: the region names that must be bound.
    """

    source: str
    code: CodeType
    constants: Mapping[str, Any]
    defaults: tuple[Any, ...]
    callees: tuple[str, ...]

    def bind(self, callees: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The generated function with ``callees``, one for each region name; no code is compiled again.

        Raises:
            PartitionError: a region has no callee, or a callee no region.
        """
        if set(callees) != set(self.callees):
            raise PartitionError(
                "the stitched code calls every region once",
                expected=f"callees for {', '.join(self.callees) or 'no region'}",
                found=", ".join(sorted(callees)) or "none",
                remedy="pass one callable for each name in Partition.regions",
            )
        namespace = {**self.constants, **callees}
        return FunctionType(self.code, namespace, "stitched", self.defaults)


def stitch(gm: fx.GraphModule, regions: Sequence[Region]) -> Stitching:
    """Generate the code for ``regions``, which must come from the graph of ``gm``."""
    return _Writer(gm, regions).stitching()


class _Writer:
    """Writes one stitched function; owns its variable names and constants."""

    def __init__(self, gm: fx.GraphModule, regions: Sequence[Region]) -> None:
        self._gm = gm
        self._regions = regions
        self._placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
        self._constants: dict[str, Any] = {}
        self._variables = self._variable_names()
        used = frozenset(self._variables.values())
        self._free_names = (name for n in itertools.count() if (name := f"_constant_{n}") not in used)

    def stitching(self) -> Stitching:
        parameters, defaults = self._parameters()
        result = self._expression(self._output.args[0] if self._output.args else None)
        lines = [f"def stitched({parameters}):", *self._body(), f"    return {result}"]
        source = "\n".join(lines) + "\n"
        code = next(c for c in compile(source, FILENAME, "exec").co_consts if isinstance(c, CodeType))
        callees = tuple(region.name for region in self._regions)
        return Stitching(source, code, dict(self._constants), defaults, callees)

    def _variable_names(self) -> dict[str, str]:
        """Value name -> variable. Arguments keep their names, which callers use as keywords, unless a region has it."""
        used = {region.name for region in self._regions}
        named: dict[str, str] = {}
        values = [output for region in self._regions for output in region.outputs]
        wanted = [(node.name, str(node.target).lstrip("*")) for node in self._placeholders]
        for value, name in [*wanted, *((value, value) for value in values)]:
            free = next(name + "_" * n for n in itertools.count() if name + "_" * n not in used)
            used.add(free)
            named[value] = free
        return named

    def _parameters(self) -> tuple[str, tuple[Any, ...]]:
        parameters, defaults = [], []
        for node in self._placeholders:
            target = str(node.target)
            stars = target[: len(target) - len(target.lstrip("*"))]
            parameters.append(stars + self._variables[node.name])
            if node.args:
                defaults.append(node.args[0])
                parameters[-1] += f"={self._constant(node.args[0])}"
        return ", ".join(parameters), tuple(defaults)

    def _body(self) -> list[str]:
        """The calls, each followed by ``del`` of the values that have no later use."""
        last_use = self._last_uses()
        released: list[list[str]] = [[] for _ in range(len(self._regions) + 1)]
        for value, position in last_use.items():
            released[position].append(value)
        lines: list[str] = []
        unused = [node.name for node in self._placeholders if node.name not in last_use]
        lines += self._release(unused)
        for position, region in enumerate(self._regions):
            names = [self._variables[name] for name in region.inputs]
            call = f"{region.name}({', '.join(names)})"
            outputs = ", ".join(self._variables[name] for name in region.outputs)
            unpacking = f"{outputs}{',' if len(region.outputs) == 1 else ''} = " if outputs else ""
            lines.append(f"    {unpacking}{call}")
            lines += self._release(released[position])
        return lines

    def _release(self, values: Sequence[str]) -> list[str]:
        return [f"    del {', '.join(self._variables[value] for value in values)}"] if values else []

    def _last_uses(self) -> dict[str, int]:
        """Value name -> position of the last region that uses it; the graph's output counts as one more region."""
        last: dict[str, int] = {}
        for position, region in enumerate(self._regions):
            last.update(dict.fromkeys(region.inputs, position))
        for node in self._output.all_input_nodes:
            for used in node.all_input_nodes if is_rebuilt_output(node) else (node,):
                last[used.name] = len(self._regions)
        return last

    def _expression(self, value: Any) -> str:
        """Python text for an output value or structure."""
        if isinstance(value, fx.Node):
            return self._node_expression(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({', '.join(map(self._expression, value))})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._expression, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._expression, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._expression(k)}: {self._expression(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _node_expression(self, node: fx.Node) -> str:
        if is_rebuilt_output(node):
            return f"{self._constant(node.target)}({', '.join(map(self._expression, node.args))})"
        if node.op == "get_attr":
            return self._constant(operator.attrgetter(str(node.target))(self._gm))
        return self._variables[node.name]

    def _constant(self, value: Any) -> str:
        name = next(self._free_names)
        self._constants[name] = value
        return name
