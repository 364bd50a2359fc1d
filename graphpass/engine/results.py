"""Learns from a first run how to cut a model's result to real sizes, and how to rebuild its structure.

Graphs return flat tensors at padded sizes. The symbols of the graphs tell which dimension of a tensor has the size of
which key field: they are followed from the manager's inputs through every graph that the run entered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from graphpass.capture.scope import ReachedCall, ReachedCallable
from graphpass.compat import symbolic, trees
from graphpass.errors import ShapeError
from graphpass.paddedmemory import PaddedBuffer

__all__ = ["GraphSymbols", "LeafSources", "Reached", "ResultRecipe", "leaf_sources", "learn_recipe", "symbols_of"]

Reached = Sequence[ReachedCall]
"""The calls of graphs in one run, in order: each with callable, flat arguments and flat outputs."""

Dims = Mapping[int, str]
LeafSources = tuple[int | PaddedBuffer | None, ...]
"""The source of each leaf of a result: the index of a flat output of the graph, the buffer of an input that the model
returns unchanged, or None for a leaf that is None."""


@dataclass(frozen=True, slots=True)
class GraphSymbols:
    """The meaning of the symbols of one graph.

    Attributes:
        fields: {symbol: key field}.
        fixed: key fields without a symbol, because the model fixes their size.
        others: symbols that are not key fields.
        unknown: (name, tensor) of each graph input that is neither an input of the model, nor a parameter, nor an
            output of an earlier graph of the same run.
    """

    fields: Mapping[sympy.Symbol, str]
    fixed: tuple[str, ...]
    others: frozenset[sympy.Symbol]
    unknown: tuple[tuple[str, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class ResultRecipe:
    """How to turn the outputs of a graph into the model's result, and the state that a run changes.

    Attributes:
        cuts: for each leaf of the result, {dimension: key field} of the dimensions to cut to the real size.
        spec: the pytree structure of the result.
        build_result: builds that structure from a list of leaves.
        mutated: names of the inputs that the model writes to.
        state: other tensors that the model writes to.
        generators: random number generators that the model draws from.
    """

    cuts: tuple[Dims, ...]
    spec: Any
    build_result: Callable[[list[Any]], Any]
    mutated: frozenset[str]
    state: tuple[torch.Tensor, ...]
    generators: tuple[torch.Generator, ...]

    def with_state(self, tensors: Iterable[torch.Tensor], generators: Iterable[torch.Generator]) -> ResultRecipe:
        """The same recipe for a model that may also change these tensors and generators."""
        state = {id(tensor): tensor for tensor in (*self.state, *tensors)}
        drawn = {id(generator): generator for generator in (*self.generators, *generators)}
        return replace(self, state=tuple(state.values()), generators=tuple(drawn.values()))


def learn_recipe(
    result: Any,
    reached: Reached,
    buffers: Mapping[int, PaddedBuffer],
    *,
    padded: Mapping[str, int],
    written: Collection[str],
) -> ResultRecipe:
    """Derive the recipe from one run.

    Args:
        result: the model's result in that run.
        reached: the calls of graphs in that run.
        buffers: {id of an input tensor: its buffer}.
        padded: the padded size of each key field.
        written: names of the inputs that the run wrote to, also between graphs.

    Raises:
        ShapeError: it is not known how to cut an output to the real size.
    """
    leaves, spec = trees.flatten(result)
    followed = _followed(reached, buffers, padded)
    numbers = _numbers_of_sizes(reached, padded)
    cuts: list[Dims] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            _refuse_unknown_structure(index, leaf)
            _refuse_padded_number(index, leaf, numbers)
            cuts.append({})
        elif id(leaf) in followed.dims:
            cuts.append(followed.dims[id(leaf)])
        else:
            raise _unclear(index, leaf, followed.unclear.get(id(leaf), "it is computed outside of the captured graphs"))
    mutations = [call.args[position] for call in reached for position in call.callable.partition.mutated_inputs]
    return ResultRecipe(
        cuts=tuple(cuts),
        spec=spec,
        build_result=trees.builder_of(spec),
        mutated=frozenset(written) | {buffers[id(value)].name for value in mutations if id(value) in buffers},
        state=tuple(value for value in mutations if id(value) not in buffers),
        generators=tuple(value for call in reached for value in call.args if isinstance(value, torch.Generator)),
    )


def symbols_of(reached: Reached, buffers: Mapping[int, PaddedBuffer], padded: Mapping[str, int]) -> list[GraphSymbols]:
    """The symbols of each graph of a run; arguments as in :func:`learn_recipe`."""
    return _followed(reached, buffers, padded).symbols


def leaf_sources(leaves: Sequence[Any], reached: Reached, buffers: Mapping[int, PaddedBuffer]) -> LeafSources | str:
    """The source of each leaf of a result, or the reason why the graph's outputs do not determine the result."""
    if len(reached) > 1:
        return f"the model is {len(reached)} graphs, with Python between them"
    outputs = reached[0].outputs
    positions = {id(output): position for position, output in enumerate(outputs)}
    sources: list[int | PaddedBuffer | None] = []
    for leaf in leaves:
        if leaf is None:
            sources.append(None)
        elif id(leaf) in positions:
            sources.append(positions[id(leaf)])
        elif id(leaf) in buffers:
            sources.append(buffers[id(leaf)])
        else:
            return "its result contains more than the graph's outputs"
    if {source for source in sources if isinstance(source, int)} != set(range(len(outputs))):
        return "the graph has outputs that are not part of the result: the model stores state"
    return tuple(sources)


# -- symbols


@dataclass(frozen=True, slots=True)
class _Followed:
    """Key fields, followed by their symbols from the inputs through the graphs of a run.

    Attributes:
        dims: {id of a tensor: {dimension: key field}}.
        unclear: {id of an output that is not in ``dims``: the reason}.
        symbols: the symbols of each graph.
    """

    dims: dict[int, dict[int, str]]
    unclear: dict[int, str]
    symbols: list[GraphSymbols]


def _followed(reached: Reached, buffers: Mapping[int, PaddedBuffer], padded: Mapping[str, int]) -> _Followed:
    found = _Followed({key: dict(buffer.dims) for key, buffer in buffers.items()}, {}, [])
    for call in reached:
        callable_, args, outputs = call.callable, call.args, call.outputs
        # Parameters and buffers are never padded; a model may return them.
        found.dims.update({id(args[p]): {} for p in callable_.static if id(args[p]) not in found.dims})
        symbols = _symbols(callable_, args, found.dims, padded)
        found.symbols.append(symbols)
        shapes = callable_.partition.output_shapes if outputs else ()  # a call that has not returned has no outputs
        for output, shape in zip(outputs, shapes, strict=True):
            if isinstance(output, torch.Tensor) and id(output) not in found.dims:
                dims, problem = _dims_by_symbol(shape or (), symbols)
                if problem is None:
                    found.dims[id(output)] = dims
                else:
                    found.unclear[id(output)] = problem
    return found


def _symbols(
    callable_: ReachedCallable, args: Sequence[Any], known: Mapping[int, Mapping[int, str]], padded: Mapping[str, int]
) -> GraphSymbols:
    fields: dict[sympy.Symbol, str] = {}
    fixed: list[str] = []
    others: set[sympy.Symbol] = set()
    for graph_input, value in zip(callable_.partition.inputs, args, strict=True):
        for dim, field in known.get(id(value), {}).items():
            expression = symbolic.expression_of(graph_input.value.shape[dim])
            if isinstance(expression, sympy.Symbol) and fields.setdefault(expression, field) == field:
                continue
            if padded[field] > 1:
                fixed.append(field)
    for graph_input, value in zip(callable_.partition.inputs, args, strict=True):
        # If another size equals a key field by chance, torch gives both the same symbol, which is then ambiguous.
        for dim, size in enumerate(graph_input.value.shape if id(value) in known else ()):
            expression = symbolic.expression_of(size)
            if dim in known[id(value)]:
                continue
            if expression in fields:
                fixed.append(fields[expression])
            elif isinstance(expression, sympy.Symbol):
                others.add(expression)
    unknown = tuple(
        (graph_input.shown, value)
        for graph_input, value in zip(callable_.partition.inputs, args, strict=True)
        if isinstance(value, torch.Tensor) and id(value) not in known
    )
    return GraphSymbols(fields, tuple(sorted(set(fixed))), frozenset(others), unknown)


def _dims_by_symbol(shape: Sequence[Any], symbols: GraphSymbols) -> tuple[dict[int, str], str | None]:
    dims = {}
    for dim, size in enumerate(shape):
        if size in symbols.fields:
            dims[dim] = symbols.fields[size]
        elif isinstance(size, sympy.Expr) and size.free_symbols - symbols.others:
            return {}, f"dimension {dim} has size {size}, which is not the symbol of one key field"
    if symbols.fixed and shape:
        fixed = ", ".join(symbols.fixed)
        return {}, f"the model fixes {fixed}, so no symbol tells which dimension has this size"
    return dims, None


# -- refusals


def _unclear(index: int, leaf: torch.Tensor, problem: str) -> ShapeError:
    return ShapeError(
        f"output {index} cannot be cut to the real size",
        expected="a dimension whose size is the symbol of one key field",
        found=f"shape {tuple(leaf.shape)}: {problem}",
        remedy="return the tensor before it is reshaped, with a separate dimension for tokens or requests, or leave it "
        "out of the result",
    )


def _refuse_unknown_structure(index: int, leaf: Any) -> None:
    """Refuse an object that is not a pytree: it may contain padded tensors, which could not be cut."""
    if leaf is None or isinstance(leaf, _PLAIN):
        return
    raise ShapeError(
        f"output {index} is a {type(leaf).__name__}, which may contain tensors that cannot be cut to the real size",
        expected="tensors, numbers and strings in tuples, lists, dicts and classes that are registered as pytrees",
        found=repr(leaf)[:200],
        remedy="return a dict, register the class (torch.export.register_dataclass), or leave it out of the result "
        "(use_cache=False)",
    )


def _numbers_of_sizes(reached: Reached, padded: Mapping[str, int]) -> list[Any]:
    """The padded sizes, and the numbers that the graphs compute from them."""
    if all(size == 1 for size in padded.values()):  # no smaller batch could be padded to it
        return []
    computed = [call.outputs[p] for call in reached for p in call.callable.partition.symbolic_numbers]
    return [*computed, *(size for size in padded.values() if size > 1)]


def _refuse_padded_number(index: int, leaf: Any, numbers: Sequence[Any]) -> None:
    """Refuse a number that may depend on a padded size, since its value would be wrong for the real size."""
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and leaf in numbers:
        raise ShapeError(
            f"output {index} is a number that comes from the padded size, or equals it",
            expected="a result without sizes: the caller knows the real ones",
            found=repr(leaf),
            remedy="leave it out of the result",
        )


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
