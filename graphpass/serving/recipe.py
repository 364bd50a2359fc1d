"""The recipe of a model's result: how flat outputs at padded sizes become the result at real sizes.

The symbols of the graphs tell which dimension of a tensor has the size of which key field: they are followed from the
manager's inputs through every graph that a run entered. They tell also that the model mixes the tokens or requests of a
batch, which is refused, but for the ops that the attention declares: a batch packs the tokens of many requests into one
row, with padding behind them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from graphpass.capture.modelstate import PythonState
from graphpass.capture.scope import ReachedCall, ReachedCallable
from graphpass.capture.staging import copy_each
from graphpass.compat import symbolic, trees
from graphpass.compat.nnmodules import where_of
from graphpass.errors import CaptureError, ShapeError
from graphpass.ledger import Reason
from graphpass.padding import PaddingFinding
from graphpass.regions.partitionproof import mixing_of
from graphpass.regions.split import Partition
from graphpass.serving.buffers import PaddedInputs, RealInputs, Sizes, cut

Reached = Sequence[ReachedCall]
"""The calls of graphs in one run, in order: each with callable, flat arguments and flat outputs."""

Dims = Mapping[int, str]
LeafSources = tuple[int | str | None, ...]
"""The source of each leaf of a result: the index of a flat output of the graph, the name of an input that the model
returns unchanged, or None for a leaf that is None."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the outputs of a run become the model's result, and the buffers that every step writes the result to."""

    spec: Any  #: the pytree structure of the result
    build_result: Callable[[list[Any]], Any]  #: builds that structure from a list of leaves
    cuts: tuple[Dims, ...]  #: for each leaf, {dimension: key field} of the dimensions to cut to the real size
    buffers: tuple[Any, ...]  #: for each leaf, a tensor at the size of the largest batch; for other leaves, the value
    #: the source of each leaf, or the reason why the graph's outputs do not determine the result
    sources: LeafSources | str
    why_through_dynamo: Reason | None  #: why steps go through Dynamo, or None; see Note [Steps without Dynamo]
    mutated: frozenset[str] = frozenset()  #: names of the inputs that the model writes to
    state: tuple[torch.Tensor, ...] = ()  #: other tensors that the model may write to
    num_state: int = 0  #: how many of them, the first ones, the first run wrote to
    generators: tuple[torch.Generator, ...] = ()  #: random number generators that the model may draw from
    never_full: Reason | None = None  #: why the model cannot have FULL graphs, or None

    def leaves(self, flat: Sequence[Any], inputs: PaddedInputs) -> list[Any]:
        """The leaves of the result, from the flat outputs of a captured graph."""
        assert not isinstance(self.sources, str), "the outputs of the graph do not determine the result"
        return [
            flat[source] if isinstance(source, int) else source and inputs.arguments[source] for source in self.sources
        ]

    def keep(self, inputs: PaddedInputs, flat: list[Any]) -> list[Any]:
        """Copy the flat outputs of a graph into the buffers, as part of its capture; returns views of the buffers."""
        if len(flat) != len({source for source in self.sources if isinstance(source, int)}):
            raise self.other_structure(f"{len(flat)} tensors")
        self.store_leaves(self.leaves(flat, inputs), inputs.sizes)
        views = list(flat)
        for index, source in enumerate(self.sources):
            if isinstance(source, int):
                views[source] = self.cut(index, inputs.sizes)
        return views

    def store(self, result: Any, sizes: Sizes) -> list[Any]:
        """Copy a result of the model at these padded sizes into the buffers; returns its leaves."""
        leaves, spec = trees.flatten(result)
        kinds = [(isinstance(leaf, torch.Tensor), leaf is None) for leaf in (*leaves, *self.buffers)]
        if spec != self.spec or kinds[: len(leaves)] != kinds[len(leaves) :]:  # guard: manager_kinds_of_leaves
            raise self.other_structure(f"{spec} of {[type(leaf).__name__ for leaf in leaves]}")
        self.store_leaves(leaves, sizes)
        return leaves

    def store_leaves(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """Copy the leaves of a result into the buffers, in one fused copy."""
        targets, sources = [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                target = self.cut(index, sizes)
                if target.shape != leaf.shape or target.dtype != leaf.dtype:
                    raise ShapeError(
                        f"output {index} does not fit its buffer",
                        expected=f"{tuple(target.shape)} {target.dtype}",
                        found=f"{tuple(leaf.shape)} {leaf.dtype}",
                        remedy="return results of the same shape and dtype for every batch of a size",
                    )
                if target.data_ptr() != leaf.data_ptr():
                    targets.append(target)
                    sources.append(leaf)
        copy_each(targets, sources)

    def cut(self, index: int, sizes: Sizes) -> Any:
        """The first entries of the buffer of one leaf, as a new tensor object."""
        part = self.buffers[index]
        if self.cuts[index]:
            return cut(part, self.cuts[index], sizes)
        return part.detach() if isinstance(part, torch.Tensor) else part

    def views(self, sizes: Sizes) -> list[Any]:
        """The leaves of the result at these sizes, views of the buffers, for :meth:`result`."""
        with torch.inference_mode(False), torch.no_grad():
            return [self.cut(index, sizes) for index in range(len(self.buffers))]

    def result(self, views: Sequence[Any], leaves: Sequence[Any] | None = None) -> Any:
        """The model's result of these views, as new tensor objects: what is done to an object stays with it.

        Values that are no tensors are those of ``leaves``, if the model's Python code has run.
        """
        plain = views if leaves is None else leaves  # guard: manager_plain_values
        pairs = zip(views, plain, strict=True)
        # guard: result_objects
        return self.build_result([view.detach() if isinstance(view, torch.Tensor) else leaf for view, leaf in pairs])

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers if isinstance(buffer, torch.Tensor))

    def other_structure(self, found: str) -> ShapeError:
        """The error for a result whose structure differs from the first run."""
        return ShapeError(
            "the model returned another structure than in its first run",
            expected=str(self.spec),
            found=found,
            remedy="return the same structure for every batch",
        )


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of steps of one real size, in the buffers of a recipe."""

    recipe: Recipe
    inputs: RealInputs
    views: Sequence[Any]  #: the leaves of the result: views of the buffers at the real size
    flat_of: Callable[[Any], Sequence[Any]] | None = None  #: for PIECEWISE graphs, which do not write to the buffers

    @classmethod
    def of(
        cls, recipe: Recipe, inputs: RealInputs, flat_of: Callable[[Any], Sequence[Any]] | None = None
    ) -> StepResults:
        """The results of steps with these inputs."""
        return cls(recipe, inputs, recipe.views(inputs.sizes), flat_of)

    def hand_out(self, outputs: Any, given: Mapping[str, torch.Tensor] | None, _: object) -> Any:
        """The result of a replay that returned ``outputs``."""
        if self.flat_of is not None:
            padded = self.inputs.padded
            self.recipe.store_leaves(self.recipe.leaves(self.flat_of(outputs), padded), padded.sizes)
        return self.of_step(given)

    def of_step(self, given: Mapping[str, torch.Tensor] | None, leaves: Sequence[Any] | None = None) -> Any:
        """The result of a step whose results are in the buffers; ``leaves``: see :meth:`Recipe.result`."""
        self.inputs.copy_back(given, self.recipe.mutated, self.recipe.buffers)
        return self.recipe.result(self.views, leaves)


def result_buffers(leaves: Sequence[Any], cuts: Sequence[Dims], largest: Sizes) -> tuple[Any, ...]:
    """Buffers for the leaves of a result, with their dtypes and devices, at the sizes in ``largest``."""
    buffers = []
    for leaf, dims in zip(leaves, cuts, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = [largest[dims[dim]] if dim in dims else size for dim, size in enumerate(leaf.shape)]
            with torch.inference_mode(False):
                buffers.append(torch.zeros(shape, dtype=leaf.dtype, device=leaf.device))
        else:
            buffers.append(leaf)
    return tuple(buffers)


def leaf_sources(leaves: Sequence[Any], reached: Reached, inputs: PaddedInputs) -> LeafSources | str:
    """The source of each leaf of a result, or the reason why the graph's outputs do not determine the result."""
    if len(reached) > 1:
        return f"the model is {len(reached)} graphs, with Python between them"
    outputs = reached[0].outputs
    known: dict[int, int | str] = {id(tensor): name for name, tensor in inputs.arguments.items()}
    known |= {id(output): position for position, output in enumerate(outputs)}
    if any(leaf is not None and id(leaf) not in known for leaf in leaves):
        return "its result contains more than the graph's outputs"
    sources = tuple(None if leaf is None else known[id(leaf)] for leaf in leaves)
    if {source for source in sources if isinstance(source, int)} != set(range(len(outputs))):
        return "the graph has outputs that are not part of the result: the model stores state"
    return sources


# -- how a result is cut ----------------------------------------------------------------------------------------------


def cuts_of(leaves: Sequence[Any], reached: Reached, inputs: PaddedInputs) -> tuple[Dims, ...]:
    """For each leaf of the result of a run, {dimension: key field} of the dimensions to cut to the real size."""
    followed = FollowedSizes(inputs)
    for call in reached:
        followed.symbols_of(call)
    numbers: list[Any] = [size for size in inputs.sizes.values() if size > 1]
    if numbers:  # otherwise no smaller batch could be padded
        returned = (
            pair for call in reached for pair in zip(call.outputs, call.callable.partition.output_values, strict=True)
        )
        numbers += [output for output, (_, traced) in returned if isinstance(traced, symbolic.NUMBERS)]
    cuts: list[Dims] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            _check_plain(index, leaf, numbers)
            cuts.append({})
            continue
        dims = followed.dims.get(id(leaf), "it is computed outside of the captured graphs")
        if isinstance(dims, str):
            raise ShapeError(
                f"output {index} cannot be cut to the real size",
                expected="a dimension whose size is the symbol of one key field",
                found=f"shape {tuple(leaf.shape)}: {dims}",
                remedy="return the tensor before it is reshaped, with a separate dimension for tokens or requests, or "
                "leave it out of the result",
            )
        cuts.append(dims)
    return tuple(cuts)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


def _check_plain(index: int, leaf: Any, numbers: Sequence[Any]) -> None:
    if leaf is not None and not isinstance(leaf, _PLAIN):
        raise ShapeError(
            f"output {index} is a {type(leaf).__name__}, which may contain tensors that cannot be cut to the real size",
            expected="tensors, numbers and strings in tuples, lists, dicts and classes that are registered as pytrees",
            found=repr(leaf)[:200],
            remedy="return a dict, register the class (torch.export.register_dataclass), or leave it out of the result "
            "(use_cache=False)",
        )
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and leaf in numbers:
        raise ShapeError(
            f"output {index} is a number that comes from the padded size, or equals it",
            expected="a result without sizes: the caller knows the real ones",
            found=repr(leaf),
            remedy="leave it out of the result",
        )


@dataclass(frozen=True, slots=True)
class GraphSymbols:
    """The meaning of the symbols of one graph."""

    fields: Mapping[sympy.Symbol, str]  #: {symbol: key field}
    fixed: tuple[str, ...]  #: key fields without a symbol, because the model fixes their size
    others: frozenset[sympy.Symbol]  #: symbols that are not key fields
    #: (name, tensor) of each graph input that is neither an input of the model, nor a parameter, nor an output of an
    #: earlier graph of the same run
    unknown: tuple[tuple[str, torch.Tensor], ...]


class FollowedSizes:
    """Key fields, followed by their symbols from the inputs through the graphs of a run."""

    def __init__(self, inputs: PaddedInputs) -> None:
        self._padded = inputs.sizes
        #: {id of a tensor: {dimension: key field}, or why an output has dimensions of unknown meaning}
        self.dims: dict[int, Dims | str] = {id(view): inputs.dims[name] for name, view in inputs.arguments.items()}

    def symbols_of(self, call: ReachedCall) -> GraphSymbols:
        """The symbols of the next graph, which may not have returned; its outputs are known afterwards."""
        # Parameters and buffers are never padded; a model may return them.
        static = {id(call.args[position]) for position in call.callable.static}
        self.dims.update({key: {} for key in static - self.dims.keys()})
        symbols = self._symbols(call)
        # There are no outputs before the call has returned.
        for output, (_, traced) in zip(call.outputs, call.callable.partition.output_values, strict=bool(call.outputs)):
            if isinstance(output, torch.Tensor) and id(output) not in self.dims:
                self.dims[id(output)] = _dims_by_symbol(list(map(symbolic.expression_of, traced.shape)), symbols)
        return symbols

    def _symbols(self, call: ReachedCall) -> GraphSymbols:
        fields: dict[sympy.Symbol, str] = {}
        fixed: set[str] = set()
        others: set[sympy.Symbol] = set()
        known: list[tuple[Dims, Sequence[Any]]] = []
        unknown: list[tuple[str, torch.Tensor]] = []
        for graph_input, value in zip(call.callable.partition.inputs, call.args, strict=True):
            dims_of_value = self.dims.get(id(value), "")
            if not isinstance(dims_of_value, str):
                known.append((dims_of_value, list(map(symbolic.expression_of, graph_input.value.shape))))
            elif isinstance(value, torch.Tensor):
                unknown.append((graph_input.shown, value))
        for dims, shape in known:
            for dim, field in dims.items():
                is_symbol = isinstance(shape[dim], sympy.Symbol) and fields.setdefault(shape[dim], field) == field
                if not is_symbol and self._padded[field] > 1:
                    fixed.add(field)
        for dims, shape in known:
            # If another size equals a key field by chance, torch gives both the same symbol, which is then ambiguous.
            for dim, size in enumerate(shape):
                if dim not in dims and size in fields:
                    fixed.add(fields[size])
                elif dim not in dims and isinstance(size, sympy.Symbol):
                    others.add(size)
        return GraphSymbols(fields, tuple(sorted(fixed)), frozenset(others), tuple(unknown))


def _dims_by_symbol(shape: Sequence[Any], symbols: GraphSymbols) -> Dims | str:
    """{dimension: key field} of an output, or why a dimension may have the size of a key field."""
    dims = {}
    for dim, size in enumerate(shape):
        if size in symbols.fields:
            dims[dim] = symbols.fields[size]
        elif isinstance(size, sympy.Expr) and size.free_symbols - symbols.others:
            return f"dimension {dim} has size {size}, which is not the symbol of one key field"
    if symbols.fixed and shape:
        return f"the model fixes {', '.join(symbols.fixed)}, so no symbol tells which dimension has this size"
    return dims


# -- tokens and requests stay apart -----------------------------------------------------------------------------------


def refuse_mixing(
    callable_: ReachedCallable, symbols: GraphSymbols, declared: Collection[str], unpassed: Collection[str]
) -> None:
    """Refuse a graph in which tokens or requests depend on each other but by ``declared`` ops, or that fixes a size.

    ``unpassed`` are parameters of the model that no input has.
    """
    if symbols.fixed:  # guard: manager_mixing_fixed
        fixed = " and ".join(symbols.fixed)
        raise CaptureError(
            f"the model fixes {fixed}, so it cannot be proved that tokens and requests stay apart",
            expected="a graph that serves every size: its code neither loops over a size nor depends on its value",
            found=f"{callable_.name}, compiled for one {fixed}",
            remedy="do not branch or loop on sizes in Python, or move that code into an op with a padding rule "
            "(graphpass.regions.register_padding_rule)",
        )
    for field in dict.fromkeys(symbols.fields.values()):  # guard: manager_mixing_of_requests
        of_field = {symbol: name for symbol, name in symbols.fields.items() if name == field}
        findings = mixing_of(callable_.partition, callable_.traces, of_field, declared)
        if findings:  # guard: manager_mixing
            raise _mixes(callable_.partition, _WHAT[field], findings, unpassed)


def refuse_tensors_between(callable_: ReachedCallable, symbols: GraphSymbols, state: PythonState) -> None:
    """Refuse a later graph of a run that reads tensors which Python has computed between graphs and ``state`` lacks."""
    names = [name for name, tensor in symbols.unknown if not state.holds_tensor(tensor)]
    if names:
        raise CaptureError(
            f"{callable_.name} reads a tensor that Python computes between the graphs of the model",
            expected="inputs, weights, or results of an earlier graph: only for code inside graphs can it be proved "
            "that tokens and requests stay apart",
            found=", ".join(names),
            remedy="remove the graph break (TORCH_LOGS=graph_breaks names it), or move that code into an op with a "
            "padding rule (graphpass.regions.register_padding_rule)",
        )


_WHAT = {"num_tokens": "tokens", "num_reqs": "requests"}
_SHOWN = 4
_NAME = re.compile(r"[^\W\d]\w*")


def _mixes(parts: Partition, what: str, findings: Sequence[PaddingFinding], unpassed: Collection[str]) -> CaptureError:
    lines = [f"{finding.op} ({finding.why}) {_place_of(parts, finding)}" for finding in findings]
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    first = findings[0]
    read = dict.fromkeys(name for found in findings for name in _NAME.findall(found.where.partition(": ")[2]))
    made = ", ".join(name for name in read if name in unpassed)
    pass_them = f"pass {made} as an input (an InputSpec), which the model makes itself otherwise; or " if made else ""
    return CaptureError(
        f"the model mixes the {what} of a batch through {first.op} {_place_of(parts, first)}",
        expected=f"only the ops that the attention declares combine {what}: a batch packs the {what} of many requests, "
        "with padding behind them",
        found="; ".join(lines[:_SHOWN]) + more,
        remedy=f"{pass_them}use attention that knows the requests (attn_implementation='graphpass_paged', or your own "
        f"op in splitting_ops of the AttentionMetadataBuilder); for another op of yours that keeps {what} apart "
        "register a padding rule (graphpass.regions.register_padding_rule); or take the op out of the model",
    )


def _place_of(parts: Partition, finding: PaddingFinding) -> str:
    """Module and line of a finding: ``in layers.3.mixer at model.py:12: `x.mean(0)` ``."""
    line, _, source = finding.where.partition(": ")
    module = _module_at(parts, line)
    place = f"at {line}: `{source}`" if source else f"at {line}" if line else "in an unknown line"
    return f"in {module} {place}" if module else place


def _module_at(parts: Partition, line: str) -> str:
    """Path and class of the module whose forward contains this line; empty if no node of the graph has the line."""
    for region in parts.regions:
        for node in region.graph_module.graph.nodes:
            if line and where_of(node.meta.get("stack_trace")).partition(": ")[0] == line:
                stack = node.meta.get("nn_module_stack") or {}
                for path, kind in reversed(stack.values()):
                    name = kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
                    return f"{path.partition('].')[2] or 'the model'} ({name})"  # behind L['model'].
    return ""
