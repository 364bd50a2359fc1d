"""The results of one graph by size: which memory each has, and how padded results are cut to the sizes of a call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch

from cgpass.namedsizes import Expression, InputLayout, Sizes, simplifier, symbols_in, value_at
from graphpass.capture.outputs import clone_pool_tensors, view_of
from graphpass.capture.pool import PoolLease
from graphpass.capture.replay import GraphEntry
from graphpass.capture.staging import WIDEST_ELEMENT_BYTES, extent, same_view
from graphpass.compat import memory, symbolic
from graphpass.compat.subclasses import is_made_of_tensors
from graphpass.paddedcalls import PaddedInput, dense_strides, prefix
from graphpass.regions.execute import storages_of, value_of
from graphpass.regions.split import Partition


@dataclass(frozen=True, slots=True)
class TensorCut:
    """One output tensor at its real size."""

    index: int  #: of the output
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements
    byte_offset: int  #: from a common start of the outputs in the same storage, or from the input's start
    viewed: int | None  #: position of the input that the output is, or is a view of; None for memory of the graph
    is_input: bool  #: whether the output is that input itself
    is_plain: bool  #: whether shape and strides are contiguous

    def new(self, like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Memory for a copy of the real part; ``like`` is the output, at padded or real sizes."""
        new = torch.empty_strided(self.shape, self.strides, dtype=like.dtype, device=device)
        return memory.with_bits_of(new, like)  # guard: lazy_cuts


@dataclass(frozen=True, slots=True)
class CallResults:
    """What becomes of the flat outputs of a graph at a padded size in calls of one real size.

    Real prefixes of tensors in the pool are copied, with the strides that the graph has at the real sizes and the
    storages that outputs share; views of inputs become views of the caller's tensors.
    """

    is_cut: bool = False  #: False if nothing is padded
    tensors: tuple[tuple[TensorCut, ...], ...] = ()  #: groups of outputs that share a storage of the graph
    views: tuple[TensorCut, ...] = ()  #: outputs that are inputs or views of inputs
    numbers: Mapping[int, int | float | bool] = field(default_factory=dict)  #: {index: value at the real sizes}
    whole: Collection[int] = ()  #: indices of the outputs that data decide; no padded size occurs in them
    written: tuple[PaddedInput, ...] = ()  #: the padded inputs that the graph writes to
    entry: GraphEntry | None = None  #: the graph, if it is known: its outputs are the same tensors in each replay
    clones: bool = False  #: whether outputs that are not cut are cloned
    #: (cut, view of the real part) of the outputs that are cut and share no storage, if the graph is known
    apart: Sequence[tuple[TensorCut, torch.Tensor]] | None = None

    def known(self, entry: GraphEntry, *, clones: bool) -> CallResults:
        """The same of the outputs of a known graph."""
        apart = self._apart(entry.outputs.build(())) if self.is_cut else None
        return replace(self, entry=entry, clones=clones, apart=apart)

    def hand_out(self, outputs: Sequence[Any], args: Sequence[Any], lease: PoolLease) -> Any:
        """The outputs for the caller; flat, unless the graph is known."""
        if self.is_cut:
            outputs = self._cut(outputs, args, lease.forward_storages)
        elif self.entry is not None:
            outputs = self.entry.outputs.for_caller(outputs, clone=self.clones)
        for padded in self.written:
            args[padded.position].copy_(padded.real)  # guard: padded_copy_back
        return outputs if self.entry is None else self.entry.build_result(list(outputs))

    def real_parts(self, outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        """{index: view of the real part} of every output tensor in the graph's memory."""
        cut = {cut.index: prefix(outputs[cut.index], cut.shape) for group in self.tensors for cut in group}
        return cut | {index: outputs[index] for index in self.whole if isinstance(outputs[index], torch.Tensor)}

    def _apart(self, outputs: Sequence[Any]) -> list[tuple[TensorCut, torch.Tensor]]:
        return [
            (group[0], prefix(outputs[group[0].index], group[0].shape)) for group in self.tensors if len(group) == 1
        ]

    def _cut(self, outputs: Sequence[Any], args: Sequence[Any], pool_storages: Collection[int]) -> list[Any]:
        cut_outputs = list(outputs)
        if self.whole:
            whole = clone_pool_tensors([outputs[index] for index in self.whole], pool_storages)
            for index, output in zip(self.whole, whole, strict=True):
                cut_outputs[index] = output
        apart = self._apart(outputs) if self.apart is None else self.apart
        copies = [cut.new(real, real.device) for cut, real in apart]
        if len(copies) > 1 and all(cut.is_plain for cut, _ in apart) and not any(map(memory.is_lazy, copies)):
            memory.foreach_copy_(copies, [real for _, real in apart])
        else:
            for copy, (_, real) in zip(copies, apart, strict=True):
                _fill_each_once(copy, real)
        for copy, (cut, _) in zip(copies, apart, strict=True):
            cut_outputs[cut.index] = copy
        for group in self.tensors:
            if len(group) > 1:
                for cut, tensor in zip(group, _copied_together(group, outputs), strict=True):
                    cut_outputs[cut.index] = tensor
        for view in self.views:
            of, like = args[view.viewed], view.new(outputs[view.index], "meta")  # type: ignore[index]
            rebuilt = of if view.is_input else view_of(of, like, view.byte_offset)
            cut_outputs[view.index] = rebuilt  # guard: views_of_the_callers_tensor
        for index, number in self.numbers.items():
            cut_outputs[index] = number  # guard: numbers_of_real_sizes
        return cut_outputs


def _copied_together(group: Sequence[TensorCut], outputs: Sequence[Any]) -> list[torch.Tensor]:
    layouts = [(cut.new(outputs[cut.index], "meta"), cut.byte_offset) for cut in group]
    num_bytes = max(start + extent(like)[1] for like, start in layouts)
    shared = torch.empty(num_bytes, dtype=torch.uint8, device=outputs[group[0].index].device)
    copies = [same_view(shared, like, byte_offset=start) for like, start in layouts]
    for cut, copy in zip(group, copies, strict=True):
        _fill_each_once(copy, prefix(outputs[cut.index], cut.shape))
    return copies


def _fill_each_once(copy: torch.Tensor, real: torch.Tensor) -> None:
    """Write ``real`` to ``copy``, each element once: along an expanded dimension all have one address."""
    for dim, (size, stride) in enumerate(zip(copy.shape, copy.stride(), strict=True)):
        if stride == 0 and size > 1:
            copy, real = copy.narrow(dim, 0, 1), real.narrow(dim, 0, 1)
    copy.copy_(real)


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]  #: in elements
    offset: Expression  #: storage offset, in elements
    element_bytes: int
    group: int  #: equal for outputs of the same storage
    viewed: int | None  #: position of the input whose storage the output uses; None for memory of the graph
    is_input: bool  #: whether the output is that input itself


_OutputNumber: TypeAlias = tuple[Expression, type]
"""A number and its type: int, float or bool."""
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

    def results(self, known: Sizes, written: tuple[PaddedInput, ...]) -> CallResults:
        """What becomes of the outputs in calls of these sizes and layout numbers, which write to these inputs."""

        def at(expression: Expression) -> int:
            return value_at(expression, known)

        groups: dict[tuple[int | None, int], list[tuple[int, _OutputTensor]]] = {}
        numbers = {}
        for index, output in enumerate(self.outputs):
            if index in self.by_data or output is None:
                continue
            if isinstance(output, tuple):
                numbers[index] = _number(*output, known)
            else:
                groups.setdefault((output.viewed, output.group), []).append((index, output))
        tensors: list[tuple[TensorCut, ...]] = []
        views: list[TensorCut] = []
        for (viewed, _), members in groups.items():
            starts = [at(o.offset) * o.element_bytes for _, o in members]
            if viewed is None:
                first = min(starts) // WIDEST_ELEMENT_BYTES * WIDEST_ELEMENT_BYTES
            else:
                first = at(self.layouts[viewed].offset) * self.layouts[viewed].element_bytes
            cuts = []
            for (index, o), start in zip(members, starts, strict=True):
                shape, strides = tuple(map(at, o.shape)), tuple(map(at, o.strides))
                dense = zip(shape, strides, dense_strides(shape), strict=True)
                is_plain = all(size == 1 or stride == of for size, stride, of in dense)
                cuts.append(TensorCut(index, shape, strides, start - first, viewed, o.is_input, is_plain))
            if viewed is None:
                tensors.append(tuple(cuts))
            else:
                views += cuts
        return CallResults(True, tuple(tensors), tuple(views), numbers, tuple(self.by_data), written)


def _number(expression: Expression, kind: type, known: Sizes) -> int | float | bool:
    value: Any = expression
    if symbols_in([expression]):
        value = value.xreplace({symbol: sympy.Integer(size) for symbol, size in known.items()})
    return kind(value)  # type: ignore[no-any-return]


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
        if isinstance(value, torch.Tensor) and not is_made_of_tensors(value):
            storage = memory.storage_id(value)
            viewed = _viewed(parts, inputs, name, homes.get(storage, []))
            found.append(
                _OutputTensor(
                    shape=tuple(map(simplified, value.shape)),
                    strides=tuple(map(simplified, value.stride())),
                    offset=simplified(value.storage_offset()),
                    element_bytes=value.element_size(),
                    group=groups.setdefault(storage, index),
                    viewed=viewed,
                    # What an operator returns after it wrote to an input is that input.
                    is_input=viewed is not None and parts.inputs[viewed].value is value,  # guard: written_inputs
                )
            )
        else:
            found.append((simplified(value), kinds[type(value)]) if type(value) in kinds else None)
    return tuple(found)


def _viewed(parts: Partition, inputs: Mapping[str, int], name: str, homes: Sequence[int]) -> int | None:
    """Position of the input that the output ``name`` is, or is a view of, which is followed back to its base.

    ``homes`` are the inputs with the output's storage in the traced call, which several may share by chance.
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
        if isinstance(output, tuple):
            groups[None, index] = [index], [output[0]]
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
