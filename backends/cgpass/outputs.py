"""The results of one graph by size: which memory each has, and how padded results are cut to the sizes of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from cgpass.sizes import Expression, InputLayout, Sizes, simplifier, symbols_in, value_at
from graphpass.compat import memory, nnmodules, symbolic
from graphpass.paddedmemory import OutputCuts, TensorCut, ViewCut
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.split import Partition


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]  #: in elements
    offset: Expression  #: storage offset, in elements
    group: int  #: equal for outputs of the same storage
    viewed: int | None  #: position of the input whose storage the output uses; None for memory of the graph
    is_input: bool  #: whether the output is that input itself


@dataclass(frozen=True, slots=True)
class _OutputNumber:
    expression: Expression
    kind: type  #: int, float or bool


_Output: TypeAlias = _OutputTensor | _OutputNumber | None


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """The flat outputs of one graph as functions of its sizes."""

    outputs: tuple[_Output, ...]  #: None for an output that is neither a plain tensor nor a number
    #: {index of an output whose layout or value is known only when the graph has run: the sizes that it may depend on
    #: besides}. Outputs that share memory with one are included.
    by_data: Mapping[int, frozenset[sympy.Symbol]]
    layouts: Mapping[int, InputLayout]  #: of the inputs, by position

    @classmethod
    def of(cls, parts: Partition, layouts: Mapping[int, InputLayout]) -> GraphOutputs:
        """Read the layouts off the outputs of a partitioned graph."""
        outputs = _outputs(parts)
        return cls(outputs, _by_data(outputs, layouts), layouts)

    def cuts(self, known: Sizes) -> OutputCuts:
        """How to cut the outputs for calls of these sizes and layout numbers."""

        def at(expression: Expression) -> int:
            return value_at(expression, known)

        groups: dict[int, list[tuple[int, _OutputTensor]]] = {}
        views, numbers = [], {}
        for index, output in enumerate(self.outputs):
            if index in self.by_data or output is None:
                continue
            if isinstance(output, _OutputNumber):
                numbers[index] = _number(output, known)
            elif output.viewed is None:
                groups.setdefault(output.group, []).append((index, output))
            else:
                shape, strides = tuple(map(at, output.shape)), tuple(map(at, output.strides))
                offset = at(output.offset) - at(self.layouts[output.viewed].offset)
                views.append(ViewCut(index, output.viewed, output.is_input, shape, strides, offset))
        tensors = []
        for members in groups.values():
            first = min(at(output.offset) for _, output in members)
            tensors.append(
                tuple(
                    TensorCut.of(index, tuple(map(at, o.shape)), tuple(map(at, o.strides)), at(o.offset) - first)
                    for index, o in members
                )
            )
        return OutputCuts(tuple(tensors), tuple(views), numbers, tuple(self.by_data))


def _number(output: _OutputNumber, known: Sizes) -> int | float | bool:
    if not symbols_in([output.expression]):
        return output.kind(output.expression)  # type: ignore[no-any-return]
    assert isinstance(output.expression, sympy.Basic)
    value = output.expression.xreplace({symbol: sympy.Integer(size) for symbol, size in known.items()})
    return bool(value) if output.kind is bool else output.kind(value)


def _outputs(parts: Partition) -> tuple[_Output, ...]:
    simplified = simplifier(symbolic.shape_env_of(graph_input.value for graph_input in parts.inputs))
    homes: dict[int | None, list[int]] = {}
    for position, graph_input in enumerate(parts.inputs):
        if isinstance(graph_input.value, torch.Tensor):
            homes.setdefault(memory.storage_id(graph_input.value), []).append(position)
    inputs = {graph_input.name: position for position, graph_input in enumerate(parts.inputs)}
    groups: dict[int | None, int] = {}
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    found: list[_Output] = []
    for index, (name, value) in enumerate(parts.output_values):
        if isinstance(value, torch.Tensor) and not nnmodules.inner_tensors(value):
            storage = memory.storage_id(value)
            viewed = _viewed(parts, inputs, name, homes.get(storage, []))
            found.append(
                _OutputTensor(
                    shape=tuple(map(simplified, value.shape)),
                    strides=tuple(map(simplified, value.stride())),
                    offset=simplified(value.storage_offset()),
                    group=groups.setdefault(storage, index),
                    viewed=viewed,
                    # What an operator returns after it wrote to an input is that input.
                    is_input=viewed is not None and parts.inputs[viewed].value is value,  # guard: written_inputs
                )
            )
        else:
            found.append(_OutputNumber(simplified(value), kinds[type(value)]) if type(value) in kinds else None)
    return tuple(found)


def _viewed(parts: Partition, inputs: Mapping[str, int], name: str, homes: Sequence[int]) -> int | None:
    """Position of the input that the output ``name`` is, or is a view of.

    ``homes`` are the inputs with the output's storage in the traced call. Several inputs may have shared memory there
    by chance, and not in later calls, so the view is followed back to its base.
    """
    if len(homes) <= 1:
        return inputs[name] if name in inputs else next(iter(homes), None)
    producers = {value: (region, at) for region in parts.regions for at, value in enumerate(region.outputs)}
    while name not in inputs and name in producers:
        region, at = producers[name]
        graph = region.graph_module.graph
        results: Any = graph.output_node().args[0]
        node, storage = results[at], memory.storage_id(value_of(results[at]))
        while node.op != "placeholder":
            bases = [n for n in node.all_input_nodes if storage in storages_of(value_of(n))]
            if not bases:
                return homes[0]
            node = bases[0]  # a view's base is its first argument, and so is what an in-place operator returns
        name = region.inputs[graph.find_nodes(op="placeholder").index(node)]
    return inputs.get(name, homes[0])


def _by_data(outputs: Sequence[_Output], layouts: Mapping[int, InputLayout]) -> dict[int, frozenset[sympy.Symbol]]:
    groups: dict[Any, tuple[list[int], list[Expression]]] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, _OutputNumber):
            groups[None, index] = [index], [output.expression]
        elif output is not None:
            members, sizes = groups.setdefault((output.viewed, output.group), ([], []))
            members.append(index)
            sizes += (*output.shape, *output.strides, output.offset)
            if (
                output.viewed is not None and output.viewed in layouts
            ):  # the offset of a view may be a symbol of its own, which hides the input's
                sizes += (*layouts[output.viewed].shape, *layouts[output.viewed].strides)
    symbols = {tuple(members): symbols_in(sizes) for members, sizes in groups.values()}
    return {index: own for members, own in symbols.items() if any(map(symbolic.is_unbacked, own)) for index in members}
