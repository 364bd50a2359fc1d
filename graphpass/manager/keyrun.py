"""What the first graphed call of a key teaches: how to cut its result, and whether Dynamo can be passed by."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass import compat
from graphpass.capture.layout import storage_id
from graphpass.errors import CaptureError, ShapeError
from graphpass.manager.effects import Effect, python_effects
from graphpass.manager.guards import CallGuards, DynamoGuards, OwnedTensors, local_values
from graphpass.manager.padding import InputBuffer

__all__ = ["DirectCall", "KeyRun", "LeafSources", "leaf_sources", "learn_key", "nothing_reached"]

Reached = Sequence[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]
Dims = Mapping[int, str]
LeafSources = tuple[int | InputBuffer | None, ...]
"""For each leaf of a result: the graph's flat output that it is, or the buffer of the argument that is returned as it
is; None for None."""


@dataclass(frozen=True, slots=True)
class DirectCall:
    """A captured call past Dynamo.

    Attributes:
        callable: the callable that the compiled model reached.
        args: its arguments at this key: buffers, sizes, parameters.
        guards: compared before it.
        leaf_sources: where the result's leaves come from.
    """

    callable: Any
    args: tuple[Any, ...]
    guards: CallGuards
    leaf_sources: LeafSources

    def run(self) -> list[Any]:
        """Call it under the forward context that is set; the leaves of the result."""
        returned = self.callable.call(self.args)
        outputs = returned if self.callable.returns_flat else compat.tree_flatten(returned)[0]
        return [
            outputs[source] if isinstance(source, int) else None if source is None else source.tensor
            for source in self.leaf_sources
        ]


@dataclass(frozen=True, slots=True)
class KeyRun:
    """How to turn one key's outputs into the model's result.

    Attributes:
        cuts: for each leaf of the result, {dimension: key field} to cut to the real size.
        declared: the leaves whose cut the user declared.
        owners: for each leaf, the input buffer that it lies in, None elsewhere.
        spec: the result's structure.
        build_result: makes leaves into that structure.
        mutated: names of the arguments that the model writes to.
        direct: the call past Dynamo, None where one is not safe.
        why_not_direct: why, where ``direct`` is None.
        why_not_repeated: why calling it twice is not like calling it once, were its tensors put back; else None.
        state: tensors of the model, or reached by it, that it writes to.
        static_memory: storages of all tensors that are no arguments.
        generators: random number generators that it draws from.
    """

    cuts: tuple[Dims, ...]
    declared: frozenset[int]
    owners: tuple[InputBuffer | None, ...]
    spec: Any
    build_result: Callable[[list[Any]], Any]
    mutated: frozenset[str]
    direct: DirectCall | None
    why_not_direct: str | None
    why_not_repeated: str | None
    state: tuple[torch.Tensor, ...]
    static_memory: frozenset[int]
    generators: tuple[torch.Generator, ...]

    def refuse_shared_memory(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that share memory with what the model writes to: the buffer of each is memory of its own.

        Raises:
            ShapeError: naming them.
        """
        if not (self.mutated or self.state):
            return
        written = {storage_id(tensor): "a tensor of the model, which writes to it" for tensor in self.state}
        owners: dict[int, str] = {}
        for name, value in given.items():
            memory = storage_id(value) if isinstance(value, torch.Tensor) else 0
            if not memory:
                continue
            other = owners.setdefault(memory, name)
            if other != name and not self.mutated.isdisjoint((name, other)):
                raise _shared(name, f"{other!r}, and the model writes to it")
            if memory in written or (name in self.mutated and memory in self.static_memory):
                raise _shared(name, written.get(memory, "a tensor of the model, and the model writes to it"))

    def cut(self, leaves: Sequence[Any], given: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Any]:
        """Outputs cut to the real sizes; where an argument came back, the caller's own tensor."""
        cut = []
        for leaf, dims, owner in zip(leaves, self.cuts, self.owners, strict=True):
            if owner is not None and _is_whole(leaf, owner.tensor):
                cut.append(given[owner.name])
                continue
            part = leaf
            for dim, field in dims.items():
                if part.shape[dim] != sizes[field]:
                    part = part.narrow(dim, 0, sizes[field])
            # The buffer is filled anew by the next call, so a view of it cannot leave.
            cut.append(part.clone() if owner is not None else part)
        return cut


def _is_whole(leaf: torch.Tensor, buffer: torch.Tensor) -> bool:
    return leaf is buffer or (
        leaf.data_ptr() == buffer.data_ptr()
        and leaf.shape == buffer.shape
        and leaf.stride() == buffer.stride()
        and leaf.dtype == buffer.dtype
    )


def _shared(name: str, other: str) -> ShapeError:
    return ShapeError(
        f"argument {name!r} shares memory with {other}",
        expected="memory of its own for every argument, where the model writes to it",
        found="two views of one storage",
        remedy=f"pass {name}.clone(), or call the model itself",
    )


def learn_key(
    result: Any,
    reached: Reached,
    buffers: Mapping[int, InputBuffer],
    *,
    padded: Mapping[str, int],
    declared_cuts: Mapping[int | str, Dims],
    entry: Callable[..., Any],
    arguments: Mapping[str, Any],
    written: Collection[str],
    modules: Sequence[torch.nn.Module],
) -> KeyRun:
    """Learn from one graphed call.

    Args:
        result: what the compiled model returned.
        reached: the callables it reached, with their flat arguments and outputs.
        buffers: id of an input tensor -> its buffer.
        padded: padded size of each key field.
        declared_cuts: what the user said about cutting outputs.
        entry: the function that was compiled.
        arguments: what it was called with, by name.
        written: names of the arguments that the call wrote to, between graphs too.
        modules: all modules of the model.

    Raises:
        ShapeError: nothing says how to cut an output.
    """
    leaves, spec = compat.tree_flatten(result)
    dims_of, unclear = _trace_dims(reached, buffers, padded)
    by_user = _declared_by_leaf(result, declared_cuts)
    numbers = _numbers_of_sizes(reached, padded)
    cuts = []
    for index, leaf in enumerate(leaves):
        if index in by_user:
            cuts.append(dict(by_user[index]))
        elif not isinstance(leaf, torch.Tensor):
            _refuse_unknown_structure(index, leaf)
            _refuse_padded_number(index, leaf, numbers)
            cuts.append({})
        elif id(leaf) in dims_of:
            cuts.append(dims_of[id(leaf)])
        else:
            raise _unclear(index, leaf, unclear.get(id(leaf), "it is made outside of the captured graphs"))
    mutated = frozenset(written) | {
        buffers[id(args[position])].name
        for callable_, args, _ in reached
        for position in callable_.partition.mutated_inputs
        if id(args[position]) in buffers
    }
    effects = python_effects(entry)
    direct, why_not = _direct(leaves, reached, buffers, entry, arguments, modules, effects)
    memory = {storage_id(buffer.tensor): buffer for buffer in buffers.values() if storage_id(buffer.tensor)}
    owners = tuple(memory.get(storage_id(leaf)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    flat = [value for _, args, _ in reached for value in args]
    return KeyRun(
        cuts=tuple(cuts),
        declared=frozenset(by_user),
        owners=owners,
        spec=spec,
        build_result=compat.builder_of(spec),
        mutated=mutated,
        direct=direct,
        why_not_direct=why_not,
        why_not_repeated=_several_graphs(reached) or _not_like_once(effects, entry, arguments),
        state=tuple(
            args[position]
            for callable_, args, _ in reached
            for position in callable_.partition.mutated_inputs
            if id(args[position]) not in buffers
        ),
        static_memory=frozenset(
            storage_id(value) for value in flat if isinstance(value, torch.Tensor) and id(value) not in buffers
        )
        - {0},
        generators=tuple(value for value in flat if isinstance(value, torch.Generator)),
    )


def _not_like_once(effects: Sequence[Effect], entry: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """The side effect for which a second call is not like the first.

    One that writes a constant is none, if Dynamo would run the same code again: then what it found was the constant.
    """
    varying = next((effect.text for effect in effects if not effect.is_constant), None)
    if varying is None and effects and not compat.has_code_for(entry, local_values(entry, arguments)):
        return effects[0].text
    return varying


def _several_graphs(reached: Reached) -> str | None:
    return None if len(reached) == 1 else f"the model is {len(reached)} graphs, with Python between them"


def _trace_dims(
    reached: Reached, buffers: Mapping[int, InputBuffer], padded: Mapping[str, int]
) -> tuple[dict[int, dict[int, str]], dict[int, str]]:
    """Id of a tensor -> {dimension: key field}, followed through the graphs by symbol; and why not, where not."""
    known: dict[int, dict[int, str]] = {key: dict(buffer.dims) for key, buffer in buffers.items()}
    unclear: dict[int, str] = {}
    for callable_, args, outputs in reached:
        # Parameters and buffers have the sizes they have; a model may return them.
        known.update({id(args[p]): {} for p in callable_.static if id(args[p]) not in known})
        symbols, fixed, unpadded = _symbols(callable_, args, known, padded)
        for output, shape in zip(outputs, callable_.partition.output_shapes, strict=True):
            if not isinstance(output, torch.Tensor) or id(output) in known:
                continue
            dims, problem = _dims_by_symbol(shape or (), symbols, fixed, unpadded)
            if problem is None:
                known[id(output)] = dims
            else:
                unclear[id(output)] = problem
    return known, unclear


def _symbols(
    callable_: Any, args: Sequence[Any], known: Mapping[int, Mapping[int, str]], padded: Mapping[str, int]
) -> tuple[dict[sympy.Symbol, str], list[str], set[sympy.Symbol]]:
    """Symbol -> key field in one graph; the fields that no symbol tells, as it fixes them; symbols of no field."""
    symbols: dict[sympy.Symbol, str] = {}
    fixed = []
    unpadded: set[sympy.Symbol] = set()
    for given, value in zip(callable_.partition.inputs, args, strict=True):
        for dim, field in known.get(id(value), {}).items():
            expression = compat.expression_of(given.value.shape[dim])
            if isinstance(expression, sympy.Symbol) and symbols.setdefault(expression, field) == field:
                continue
            if padded[field] > 1:
                fixed.append(field)
    for given, value in zip(callable_.partition.inputs, args, strict=True):
        # Sizes that are equal by chance can be one symbol, which then tells nothing.
        for dim, size in enumerate(given.value.shape if id(value) in known else ()):
            expression = compat.expression_of(size)
            if dim in known[id(value)]:
                continue
            if expression in symbols:
                fixed.append(symbols[expression])
            elif isinstance(expression, sympy.Symbol):
                unpadded.add(expression)
    return symbols, fixed, unpadded


def _dims_by_symbol(
    shape: Sequence[Any], symbols: Mapping[sympy.Symbol, str], fixed: Sequence[str], unpadded: Set[sympy.Symbol]
) -> tuple[dict[int, str], str | None]:
    dims = {}
    for dim, size in enumerate(shape):
        if size in symbols:
            dims[dim] = symbols[size]
        elif isinstance(size, sympy.Expr) and size.free_symbols - unpadded:
            return {}, f"dimension {dim} has size {size}, which mixes real and padded rows or is no key field"
    if fixed and shape:
        return (
            {},
            f"the model fixes {', '.join(sorted(set(fixed)))}, so that no symbol tells which dimension carries it",
        )
    return dims, None


def _declared_by_leaf(result: Any, declared: Mapping[int | str, Dims]) -> dict[int, Dims]:
    """The user's cuts by flat index; a name stands for the leaf under that key of a dict-like result."""
    by_leaf = {index: dims for index, dims in declared.items() if isinstance(index, int)}
    if isinstance(result, Mapping):
        offset = 0
        for name, value in result.items():
            if name in declared:
                by_leaf[offset] = declared[name]
            offset += len(compat.tree_flatten(value)[0])
    return by_leaf


def _unclear(index: int, leaf: torch.Tensor, problem: str) -> ShapeError:
    return ShapeError(
        f"nothing says how to cut output {index} to the real size",
        expected="a dimension whose size is the symbol of one key field, or a cut that says it",
        found=f"shape {tuple(leaf.shape)}: {problem}",
        remedy=f"say it: cut={{{index}: {{dimension: key field}}}}, or cut={{{index}: {{}}}} if it is never padded",
    )


def _refuse_unknown_structure(index: int, leaf: Any) -> None:
    """An object that torch's pytrees do not look into may hold padded tensors, which nothing would cut."""
    if leaf is None or isinstance(leaf, _PLAIN):
        return
    raise ShapeError(
        f"output {index} is a {type(leaf).__name__}, whose tensors cannot be seen",
        expected="tensors, numbers and text in tuples, lists, dicts and classes that torch's pytrees know",
        found=repr(leaf)[:200],
        remedy=f"return a dict, register the class (torch.export.register_dataclass), leave it out of the result "
        f"(use_cache=False), or pass cut={{{index}: {{}}}} if it holds nothing padded",
    )


def _numbers_of_sizes(reached: Reached, padded: Mapping[str, int]) -> list[Any]:
    """Values of this key's padded sizes, and of the numbers that the graphs compute from them."""
    if all(size == 1 for size in padded.values()):  # nothing smaller could be padded to it
        return []
    computed = [outputs[p] for callable_, _, outputs in reached for p in callable_.partition.symbolic_numbers]
    return [*computed, *(size for size in padded.values() if size > 1)]


def _refuse_padded_number(index: int, leaf: Any, numbers: Sequence[Any]) -> None:
    """A number that may come from a padded size would be another one without padding."""
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and leaf in numbers:
        raise ShapeError(
            f"output {index} is a number that comes from the padded size, or equals it",
            expected="sizes left to the caller, who knows the real ones",
            found=repr(leaf),
            remedy=f"leave it out of the result, or pass cut={{{index}: {{}}}} if it is the same for every size",
        )


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


def _direct(
    leaves: Sequence[Any],
    reached: Reached,
    buffers: Mapping[int, InputBuffer],
    entry: Callable[..., Any],
    arguments: Mapping[str, Any],
    modules: Sequence[torch.nn.Module],
    effects: Sequence[Effect],
) -> tuple[DirectCall | None, str | None]:
    """The call past Dynamo, or why there is none."""
    sources = leaf_sources(leaves, reached, buffers)
    if isinstance(sources, str):
        return None, sources
    callable_, args, _ = reached[0]
    kept = [value for value in args if isinstance(value, torch.Tensor) and id(value) not in buffers]
    owned = OwnedTensors.locate(modules, kept)
    if owned is None:
        return None, "it reads tensors that are neither arguments, parameters nor buffers"
    if effects:
        return None, effects[0].text
    dynamo = DynamoGuards.of(entry, arguments)
    if dynamo is None:
        return None, "Dynamo's code for it is more than one graph, or its guards hold for one call only"
    return DirectCall(callable_, tuple(args), CallGuards.of(modules, owned, kept, dynamo), sources), None


def leaf_sources(leaves: Sequence[Any], reached: Reached, buffers: Mapping[int, InputBuffer]) -> LeafSources | str:
    """Where the leaves of a result come from; or why the graph alone does not tell."""
    several = _several_graphs(reached)
    if several is not None:
        return several
    outputs = reached[0][2]
    positions = {id(output): position for position, output in enumerate(outputs)}
    sources: list[int | InputBuffer | None] = []
    for leaf in leaves:
        if leaf is None:
            sources.append(None)
        elif id(leaf) in positions:
            sources.append(positions[id(leaf)])
        elif id(leaf) in buffers:
            sources.append(buffers[id(leaf)])
        else:
            return "its result holds more than the graph's outputs"
    if {source for source in sources if isinstance(source, int)} != set(range(len(outputs))):
        return "the graph has outputs that are no part of the result: the model keeps state"
    return tuple(sources)


def nothing_reached(key: str) -> CaptureError:
    """The error for a call in a capture scope that entered no compiled graph."""
    return CaptureError(
        f"nothing was captured for {key}",
        expected="a call that enters a compiled graph",
        found="Dynamo ran the model without one: its recompile limit is reached, or it skips the model",
        remedy="give dynamic_dims every dimension that varies, or raise torch._dynamo.config.recompile_limit",
    )
