"""``partition``: prepares a graph, splits it into regions and generates the code that runs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, operators, symbolic, trees
from graphpass.errors import PartitionError
from graphpass.ledger import Reason
from graphpass.regions.analysis import (
    FACTS,
    REBUILT,
    SplitReason,
    annotate,
    free_symbols,
    is_rebuilt_output,
    is_tuple,
    symbol_placeholders,
    unpacked_from,
)
from graphpass.regions.assign import Region, assign, build_regions, written_positions
from graphpass.regions.eagerrules import DEFAULT_RULES, SplitRule, splits_at
from graphpass.regions.execute import call_for, value_of
from graphpass.regions.stitch import Stitching, dump_partition
from graphpass.regions.symbols import GraphInput, graph_inputs, layout_inputs


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A graph split into regions."""

    regions: tuple[Region, ...]  #: in program order
    #: Runs the regions' graph modules; same arguments and results as the partitioned graph module.
    stitched: Callable[..., Any]
    inputs: tuple[GraphInput, ...]  #: the graph's inputs, in the order of the arguments
    mutated_inputs: tuple[int, ...]  #: positions in ``inputs`` of the tensors whose storage the graph writes to
    layout_inputs: tuple[int, ...]  #: positions in ``inputs`` of numbers that are only strides and offsets of others
    #: (name, metadata) of each output leaf in pytree order; the name is "" for a constant
    output_values: tuple[tuple[str, Any], ...]
    _stitching: Stitching
    _outputs: Any

    def bind(
        self, callees: Mapping[str, Callable[..., Any]], fixed: Mapping[str, Sequence[Any]] | None = None
    ) -> Callable[..., Any]:
        """The stitched function with other callables in place of the regions: ``callee(*inputs) -> tuple of outputs``.

        The regions in ``fixed`` return the given outputs, the same objects, in every call; they are called without
        arguments. Code is generated once for each set of such regions.

        Raises:
            PartitionError: the keys of ``callees`` are not exactly the regions' names.
        """
        return self._stitching.bind(callees, fixed)

    def never_full(self) -> Reason | None:
        """The first region that cannot be captured, with its reason: the graph cannot be captured as a whole.

        None if there is none. A region that is eager only because of ``splitting_ops`` can be captured.
        """
        return self._first(lambda reason: not reason.captures_whole)

    def never_padded(self) -> Reason | None:
        """The first region whose memory a caller sees as it is, so that nothing may be padded; None without one."""
        return self._first(lambda reason: reason.forbids_padding)

    def _first(self, applies: Callable[[SplitReason], bool]) -> Reason | None:
        found = ((region, reason) for region in self.regions for reason in region.reasons if applies(reason))
        return next((Reason(f"{region.name}: {reason.why}", reason.remedy) for region, reason in found), None)

    def has_symbols(self) -> bool:
        """Whether some size or number among the inputs is symbolic."""
        values = (graph_input.value for graph_input in self.inputs)
        return any(free_symbols(value.shape if isinstance(value, torch.Tensor) else value) for value in values)

    def dump(self) -> str:
        """Canonical text: equal for equal graphs in any process, independent of value names."""
        return dump_partition(self.inputs, self.mutated_inputs, self.regions, self._outputs)


def partition(
    gm: fx.GraphModule,
    splitting_ops: Iterable[object] = (),
    *,
    rules: Sequence[SplitRule] = DEFAULT_RULES,
    example_inputs: Sequence[Any] | None = None,
) -> Partition:
    """Split ``gm`` into captured and eager regions. ``gm`` does not change; the regions share its parameters.

    Args:
        gm: a graph from torch.compile, ``symbolic_trace`` or ``make_fx``.
        splitting_ops: ops that run eagerly: ``aten::add``, ``aten::add.Tensor``, ``mylib::attention``, op objects,
            Python callables or their dotted names. A name matches all forms of its op (see ``names``).
        rules: further rules; each returns the reason why a node runs eagerly, or None.
        example_inputs: one example for each placeholder, for a graph without shape metadata.

    Raises:
        PartitionError: an op is unknown, or the graph has neither shape metadata nor examples.
        DeviceError: inputs or parameters are on two devices.
    """
    rules = (splits_at(splitting_ops), *rules)
    whole = uncompiled_copy(gm)
    facts = annotate(whole, example_inputs)
    sizes_as_symbols(whole.graph, facts.guarded)
    tuples_unpacked(whole.graph)
    tuples_stay_home(whole.graph)
    whole.graph.lint()
    inputs = graph_inputs(whole.graph, facts.exchanged)
    dynamo.forget_arguments(whole.graph)
    groups = assign(whole, rules, facts)
    del whole.meta[FACTS]  # for the rules alone: modules of regions copy the metadata, and would keep the graph
    regions = build_regions(whole, groups, facts)
    stitching = Stitching(whole, regions)
    placeholders = [node for node in whole.graph.nodes if node.op == "placeholder"]
    written = frozenset[int]().union(*facts.writes.values())
    outputs = whole.graph.output_node().args[0]
    return Partition(
        regions=regions,
        stitched=stitching.bind({region.name: region.graph_module for region in regions}),
        inputs=inputs,
        mutated_inputs=written_positions(placeholders, written),
        layout_inputs=layout_inputs(whole.graph),
        output_values=tuple(
            (leaf.name if isinstance(leaf, fx.Node) else "", value_of(leaf)) for leaf in trees.flatten(outputs)[0]
        ),
        _stitching=stitching,
        _outputs=outputs,
    )


def uncompiled_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module to edit, over the same parameters, buffers and submodules. It never runs: it has no Python."""
    if not isinstance(gm, fx.GraphModule):
        raise PartitionError(
            "partition() splits FX graphs",
            expected="a torch.fx.GraphModule",
            found=type(gm).__name__,
            remedy="trace the module first: torch.fx.symbolic_trace(module)",
        )
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    _subgraphs_inlined(gm, graph)
    return _Uncompiled(gm, graph)


def _subgraphs_inlined(owner: fx.GraphModule, graph: fx.Graph) -> None:
    """Put in the nodes of each subgraph that Dynamo shares between calls and gives no value (graph deduplication)."""
    shared = operators.higher_order_operator("invoke_subgraph")
    for node in graph.nodes:  # those put in are visited, too
        if node.target is not shared or value_of(node) is not None:
            continue
        read, _, *operands = cast("tuple[Any, ...]", node.args)
        inner: Any = owner.get_submodule(read.target).graph
        copies = dict(zip(inner.find_nodes(op="placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(inner, copies)
        for copied in (copy for original, copy in copies.items() if original.op != "placeholder"):
            copied.meta.pop("example_value", None)  # that of one call
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not read.users:
            graph.erase_node(read)


class _Uncompiled(fx.GraphModule):
    """A graph module that never runs, so ``recompile`` generates no Python."""

    def recompile(self) -> Any:
        return None


def sizes_as_symbols(graph: fx.Graph, fixed: bool) -> None:
    """Replace every use of a ``torch.Size`` value by a tuple with one number per dimension."""
    symbols = symbol_placeholders(graph)
    done: dict[fx.Node, tuple[Any, ...]] = {}
    for node in [node for node in graph.nodes if isinstance(value_of(node), torch.Size)]:
        if node.op != "placeholder" and node not in done:
            _replace_size(node, _dimensions(node, symbols, fixed), done)


def _dimensions(size: fx.Node, symbols: Mapping[sympy.Symbol, fx.Node], fixed: bool) -> tuple[Any, ...]:
    """One number for each dimension of a ``torch.Size`` value: an int, a placeholder, or a new node after ``size``."""
    of_tensor = size.target == "size" or (size.target is getattr and size.args[1:2] == ("shape",))
    source, target = (size.args[0], torch.ops.aten.sym_size.int) if of_tensor else (size, operator.getitem)
    dimensions: list[Any] = []
    with size.graph.inserting_before(size.next):
        for position, length in enumerate(value_of(size)):
            expression = symbolic.expression_of(length)
            if fixed and (isinstance(length, int) or getattr(expression, "is_Integer", False)):
                dimensions.append(int(length))
            elif expression in symbols:
                dimensions.append(symbols[expression])
            else:
                dimensions.append(call_for(size, target, (source, position), length))
    return tuple(dimensions)


def _replace_size(size: fx.Node, dimensions: tuple[Any, ...], done: dict[fx.Node, tuple[Any, ...]]) -> None:
    done[size] = dimensions
    for user in [user for user in size.users if user not in dimensions]:
        if user.target is operator.getitem and user.args[0] is size and not isinstance(user.args[1], fx.Node):
            item = dimensions[user.args[1]]  # type: ignore[index]
            if isinstance(item, tuple):
                _replace_size(user, item, done)
            else:
                for reader in list(user.users):
                    _substitute(reader, user, item)
                user.graph.erase_node(user)
        elif user.target == "numel" and user.args == (size,):
            user.replace_all_uses_with(_product(user, dimensions))
            size.graph.erase_node(user)
        elif user.op == "output":
            _rebuild_for_output(user, size, torch.Size, dimensions)
        elif user.args[:1] != (size,) or user.target is not operator.getitem:
            _substitute(user, size, dimensions)
    if not size.users:
        size.graph.erase_node(size)


def _product(before: fx.Node, factors: tuple[Any, ...]) -> Any:
    product: Any = 1
    with before.graph.inserting_before(before):
        for factor in factors:
            if isinstance(product, int) and (product == 1 or isinstance(factor, int)):
                product = factor if product == 1 else product * factor
                continue
            product = call_for(before, operator.mul, (product, factor), value_of(product) * value_of(factor))
    return product


def _substitute(user: fx.Node, old: fx.Node, new: Any) -> None:
    def swap(argument: fx.Node) -> Any:
        return new if argument is old else argument

    user.args = fx.map_arg(user.args, swap)
    user.kwargs = fx.map_arg(user.kwargs, swap)


def _rebuild_for_output(output: fx.Node, old: fx.Node, kind: type, items: Any) -> None:
    """Replace ``old`` in the output by a call of ``kind`` on its items, which the stitched code makes."""
    with output.graph.inserting_before(output):
        rebuilt = call_for(old, kind, tuple(items) if hasattr(kind, "_fields") else (items,), value_of(old))
    rebuilt.meta[REBUILT] = True
    _substitute(output, old, rebuilt)


def tuples_unpacked(graph: fx.Graph) -> None:
    """Replace each use of a whole tuple by uses of its items, so that a region's outputs are flat."""
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr") or not is_tuple(value_of(node)) or is_rebuilt_output(node):
            continue
        users = [user for user in node.users if user.target not in (operator.getitem, getattr)]
        items, kind = _items(node, value_of(node)) if users else (), type(value_of(node))
        for user in users:
            if user.op == "output" and kind not in (tuple, list):
                _rebuild_for_output(user, node, kind, items)
            else:
                _substitute(user, node, items)


def _items(source: fx.Node, value: Any) -> Any:
    with source.graph.inserting_before(source.next):
        nodes = [call_for(source, operator.getitem, (source, at), item) for at, item in enumerate(value)]
    items = [_items(node, item) if is_tuple(item) else node for node, item in zip(nodes, value, strict=True)]
    return tuple(items) if isinstance(value, tuple) else items


def tuples_stay_home(graph: fx.Graph) -> None:
    """Move every getitem on a tuple or list directly after the node that produced it; tensor indexing does not move."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        source = unpacked_from(node)
        if source is None:
            continue
        anchor = last.get(source, source)
        if node.prev is not anchor:
            anchor.append(node)
        while source is not None:
            last[source] = node
            source = unpacked_from(source)
