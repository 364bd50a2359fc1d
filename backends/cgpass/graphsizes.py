"""The symbolic sizes of one graph: where to read them in a call, and the layouts of inputs and outputs by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.compat import memory, nnmodules, symbolic
from graphpass.paddedmemory import OutputCuts, TensorCut, ViewCut, dense_strides
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.split import Partition
from graphpass.regions.symbols import GraphInput, GuardedSymbols

Expression: TypeAlias = sympy.Expr | int
Sizes: TypeAlias = Mapping[sympy.Symbol, int]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout of one tensor input.

    Attributes:
        name: its name for users.
        shape: size of each dimension.
        strides: stride of each dimension, in elements.
        offset: storage offset, in elements.
        order: the dimensions, sorted by ascending stride in the traced call.
    """

    name: str
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    offset: Expression
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor among the flat outputs.

    Attributes:
        shape: size of each dimension.
        strides: stride of each dimension, in elements.
        offset: storage offset, in elements.
        group: equal for outputs of the same storage.
        viewed: position of the input whose storage the output uses; None for memory of the graph.
        is_input: whether the output is that input itself.
    """

    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    offset: Expression
    group: int
    viewed: int | None
    is_input: bool


@dataclass(frozen=True, slots=True)
class OutputNumber:
    """A number among the flat outputs, as a function of the sizes.

    Attributes:
        expression: its value.
        kind: int, float or bool.
    """

    expression: Expression
    kind: type


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of one graph, without references to fake tensors.

    Attributes:
        symbols: the sizes that distinguish calls, in the order of :meth:`read`.
        places: (position, dimension) where each symbol is read; dimension None for an int argument.
        numbers: {position: expression} of the ints among the inputs, layout numbers included.
        layouts: {position: layout} of the tensor inputs whose memory the graph does not exchange.
        outputs: the flat outputs; None for an output that is neither a plain tensor nor a number.
        by_data: {index of an output whose layout or value is known only when the graph has run: the sizes that it may
            depend on besides}. Outputs that share memory with one are included.
        guards: which sizes the graph serves.
        unread: symbols in shapes that cannot be read from an input.
        hints: the size of each symbol in the traced call.
    """

    symbols: tuple[sympy.Symbol, ...]
    places: tuple[tuple[int, int | None], ...]
    numbers: Mapping[int, Expression]
    layouts: Mapping[int, InputLayout]
    outputs: tuple[OutputTensor | OutputNumber | None, ...]
    by_data: Mapping[int, frozenset[sympy.Symbol]]
    guards: GuardedSymbols
    unread: frozenset[sympy.Symbol]
    hints: Mapping[sympy.Symbol, int]

    def read(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a call, in the order of ``symbols``."""
        return tuple([args[p] if dim is None else args[p].shape[dim] for p, dim in self.places])

    def named(self, sizes: Sequence[int]) -> dict[sympy.Symbol, int]:
        """{symbol: size}."""
        return dict(zip(self.symbols, sizes, strict=True))

    def admits(self, sizes: Sequence[int]) -> bool:
        """Whether the guards hold at these sizes; guards with other symbols are ignored.

        A guard that stays undecided counts as false.
        """
        named = self.named(sizes)
        if self.guards.excluded_by(named) is not None:
            return False
        numbers = {symbol: sympy.Integer(size) for symbol, size in named.items()}
        concerned = [guard for guard in self.guards.guards if guard.free_symbols & named.keys()]
        return all(guard.free_symbols - named.keys() or guard.xreplace(numbers) == sympy.true for guard in concerned)


def value_at(expression: Expression, sizes: Sizes) -> int:
    """The value of an expression whose symbols are all among ``sizes``."""
    if isinstance(expression, int):
        return expression
    return int(expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}))


def symbols_in(expressions: Iterable[Expression]) -> frozenset[sympy.Symbol]:
    """The free symbols of several expressions."""
    return frozenset[sympy.Symbol]().union(*(getattr(e, "free_symbols", frozenset()) for e in expressions))


def sizes_of(parts: Partition) -> GraphSizes:
    """Read the sizes off the inputs and outputs of a partitioned graph."""
    env = symbolic.shape_env_of(graph_input.value for graph_input in parts.inputs)
    simplified = _simplifier(env)
    layouts = {
        p: _layout(graph_input, simplified, env)
        for p, graph_input in enumerate(parts.inputs)
        if isinstance(graph_input.value, torch.Tensor) and not graph_input.is_exchanged
    }
    numbers = {
        p: simplified(graph_input.value)
        for p, graph_input in enumerate(parts.inputs)
        if isinstance(graph_input.value, torch.SymInt)
    }
    values = [graph_input.value for graph_input in parts.inputs if isinstance(graph_input.value, torch.Tensor)]
    in_shapes = symbols_in(simplified(size) for value in values for size in value.shape)
    places = _places(numbers, layouts, frozenset(parts.layout_inputs) if in_shapes else frozenset())
    symbols = tuple(sorted(places, key=str))
    outputs = _outputs(parts, simplified)
    return GraphSizes(
        symbols=symbols,
        places=tuple(places[symbol] for symbol in symbols),
        numbers=numbers,
        layouts=layouts,
        outputs=outputs,
        by_data=_by_data(outputs, layouts),
        guards=GuardedSymbols.from_values(graph_input.value for graph_input in parts.inputs),
        unread=in_shapes - places.keys(),
        hints={symbol: int(hint) for symbol, hint in symbolic.hints_of(env).items()} if env is not None else {},
    )


def _simplifier(env: Any) -> Callable[[Any], Expression]:
    def simplified(size: Any) -> Expression:
        expression = symbolic.expression_of(size)
        assert expression is not None, "sizes are ints or symbolic"
        return env.replace(expression) if env is not None and isinstance(expression, sympy.Expr) else expression

    return simplified


def _places(
    numbers: Mapping[int, Expression], layouts: Mapping[int, InputLayout], layout_numbers: frozenset[int]
) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where each symbol is read; int arguments are preferred, because they cost less to read than shapes."""
    places: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for position, expression in numbers.items():
        if isinstance(expression, sympy.Symbol) and position not in layout_numbers:
            places.setdefault(expression, (position, None))
    for position, layout in layouts.items():
        for dim, size in enumerate(layout.shape):
            if isinstance(size, sympy.Symbol):
                places.setdefault(size, (position, dim))
    return places


def _layout(graph_input: GraphInput, simplified: Callable[[Any], Expression], env: Any) -> InputLayout:
    tensor = graph_input.value
    strides = tuple(map(simplified, tensor.stride()))
    hints = symbolic.hints_of(env) if env is not None else {}
    traced = [int(s.xreplace(hints)) if isinstance(s, sympy.Expr) else s for s in strides]
    order = sorted(range(tensor.dim()), key=lambda dim: (traced[dim], -dim))
    shape, offset = tuple(map(simplified, tensor.shape)), simplified(tensor.storage_offset())
    return InputLayout(graph_input.shown, shape, strides, offset, tuple(order))


def _viewed(parts: Partition, inputs: Mapping[str, int], name: str, homes: Sequence[int]) -> int | None:
    """Position of the input that an output is, or is a view of.

    Args:
        parts: the partition.
        inputs: name -> position.
        name: the output's name.
        homes: positions of the inputs with the output's storage in the traced call. Several inputs may have shared
            memory there by chance, and not in later calls, so the view is followed back to its base.
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


def _outputs(
    parts: Partition, simplified: Callable[[Any], Expression]
) -> tuple[OutputTensor | OutputNumber | None, ...]:
    homes: dict[int | None, list[int]] = {}
    for position, graph_input in enumerate(parts.inputs):
        if isinstance(graph_input.value, torch.Tensor):
            homes.setdefault(memory.storage_id(graph_input.value), []).append(position)
    inputs = {graph_input.name: position for position, graph_input in enumerate(parts.inputs)}
    groups: dict[int | None, int] = {}
    found: list[OutputTensor | OutputNumber | None] = []
    for index, (name, value) in enumerate(parts.output_values()):
        if isinstance(value, torch.Tensor) and not nnmodules.inner_tensors(value):
            storage = memory.storage_id(value)
            viewed = _viewed(parts, inputs, name, homes.get(storage, []))
            found.append(
                OutputTensor(
                    shape=tuple(map(simplified, value.shape)),
                    strides=tuple(map(simplified, value.stride())),
                    offset=simplified(value.storage_offset()),
                    group=groups.setdefault(storage, index),
                    viewed=viewed,
                    # What an operator returns after it wrote to an input is that input.
                    is_input=viewed is not None and parts.inputs[viewed].value is value,  # guard: written_inputs
                )
            )
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
            found.append(OutputNumber(simplified(value), kinds[type(value)]))
        else:
            found.append(None)
    return tuple(found)


def _by_data(
    outputs: Sequence[OutputTensor | OutputNumber | None], layouts: Mapping[int, InputLayout]
) -> dict[int, frozenset[sympy.Symbol]]:
    """See :class:`GraphSizes`."""
    groups: dict[Any, tuple[list[int], list[Expression]]] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, OutputNumber):
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


def layout_numbers(
    layouts: Mapping[int, InputLayout], positions: Sequence[int], sizes: Sizes, numbers: Mapping[int, Expression]
) -> dict[int, int] | InputLayout:
    """Values of the layout numbers for dense buffers.

    Args:
        layouts: {position: layout} of the tensor inputs.
        positions: of the padded inputs.
        sizes: the key's sizes.
        numbers: {position: expression} of the ints among the inputs.

    Returns:
        {position: value} of the layout numbers; or the layout of an input whose traced strides no dense buffer has.
    """
    values: dict[Any, int] = {}
    for position in positions:
        layout = layouts[position]
        shape = [value_at(size, sizes) for size in layout.shape]
        expected = [*zip(layout.strides, dense_strides(shape, layout.order), shape, strict=True), (layout.offset, 0, 2)]
        for traced, actual, size in expected:
            unknown = symbols_in([traced]) - sizes.keys() - values.keys()
            if size <= 1:
                continue
            if unknown and traced not in unknown:
                return layout
            if unknown:
                values[traced] = actual
            elif value_at(traced, {**sizes, **values}) != actual:
                return layout
    return {position: values[expression] for position, expression in numbers.items() if expression in values}


def cuts_of(graph: GraphSizes, real: Sizes, numbers: Mapping[sympy.Symbol, int]) -> OutputCuts:
    """The cuts at these real sizes.

    Args:
        graph: the graph's outputs.
        real: the real sizes.
        numbers: {symbol: value} of the call's layout numbers, which occur in strides of its inputs.
    """
    known = {**numbers, **real}
    groups: dict[int, list[tuple[int, OutputTensor]]] = {}
    views, values = [], {}
    for index, output in enumerate(graph.outputs):
        if index in graph.by_data:
            continue
        if isinstance(output, OutputNumber):
            values[index] = _number(output, known)
        elif output is not None and output.viewed is None:
            groups.setdefault(output.group, []).append((index, output))
        elif output is not None:
            assert output.viewed is not None
            at = _evaluator(known)
            base = graph.layouts[output.viewed].offset
            shape, strides = tuple(map(at, output.shape)), tuple(map(at, output.strides))
            views.append(ViewCut(index, output.viewed, output.is_input, shape, strides, at(output.offset) - at(base)))
    tensors = tuple(_group(members, known) for members in groups.values())
    return OutputCuts(tensors, tuple(views), values, tuple(graph.by_data))


def _group(members: Sequence[tuple[int, OutputTensor]], known: Sizes) -> tuple[TensorCut, ...]:
    at = _evaluator(known)
    offsets = [at(output.offset) for _, output in members]
    return tuple(
        TensorCut.of(index, tuple(map(at, output.shape)), tuple(map(at, output.strides)), offset - min(offsets))
        for (index, output), offset in zip(members, offsets, strict=True)
    )


def _evaluator(known: Sizes) -> Callable[[Expression], int]:
    return lambda expression: value_at(expression, known)


def _number(output: OutputNumber, known: Sizes) -> int | float | bool:
    if not symbols_in([output.expression]):
        return output.kind(output.expression)  # type: ignore[no-any-return]
    assert isinstance(output.expression, sympy.Basic)
    value = output.expression.xreplace({symbol: sympy.Integer(size) for symbol, size in known.items()})
    return bool(value) if output.kind is bool else output.kind(value)
