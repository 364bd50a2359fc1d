"""``partition``: splits a graph module into regions and generates the code that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, symbolic, trees
from graphpass.errors import PartitionError
from graphpass.ledger import Reason
from graphpass.regions.analysis import annotate
from graphpass.regions.assign import assign
from graphpass.regions.dump import dump_partition
from graphpass.regions.execute import value_of
from graphpass.regions.passes import run_passes, sizes_as_symbols, tuples_stay_home, tuples_unpacked
from graphpass.regions.regions import Region, build_regions, written_positions
from graphpass.regions.splitrules import DEFAULT_RULES, SplitReason, SplitRule, splits_at
from graphpass.regions.stitch import Stitching, stitch
from graphpass.regions.symbols import GraphInput, graph_inputs, layout_inputs

__all__ = ["Partition", "partition"]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A graph split into regions.

    Attributes:
        regions: in program order.
        stitched: runs the regions' graph modules; same arguments and results as the partitioned graph module.
        inputs: the graph's inputs, in the order of the arguments.
        mutated_inputs: positions in ``inputs`` of the tensors whose storage the graph writes to.
        layout_inputs: positions in ``inputs`` of the numbers that are only strides and offsets of other inputs.
        source: the Python source of ``stitched``.
        output_shapes: symbolic shape of each output leaf in pytree order; None for leaves that are no tensors.
        symbolic_numbers: positions of the output leaves that are numbers computed from symbolic sizes.
    """

    regions: tuple[Region, ...]
    stitched: Callable[..., Any]
    inputs: tuple[GraphInput, ...]
    mutated_inputs: tuple[int, ...]
    layout_inputs: tuple[int, ...]
    source: str
    output_shapes: tuple[tuple[sympy.Expr | int, ...] | None, ...]
    symbolic_numbers: tuple[int, ...]
    _stitching: Stitching
    _outputs: Any

    def bind(self, callees: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The stitched function with other callables in place of the regions: ``callee(*inputs) -> tuple of outputs``.

        The code object is shared; no code is generated again.

        Raises:
            PartitionError: the keys of ``callees`` are not exactly the regions' names.
        """
        return self._stitching.bind(callees)

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
        return next((Reason(f"{region.name}: {reason}", reason.remedy) for region, reason in found), None)

    def has_symbols(self) -> bool:
        """Whether some size or number among the inputs is symbolic."""
        values = [graph_input.value for graph_input in self.inputs]
        return symbolic.shape_env_of(values) is not None and any(
            getattr(symbolic.expression_of(size), "free_symbols", None)
            for value in values
            for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        )

    def output_values(self) -> tuple[tuple[str, Any], ...]:
        """(name, metadata) of each output leaf in pytree order; the name is "" for a constant."""
        named: Any = fx.map_arg(self._outputs, _named_value)
        leaves = trees.flatten(named)[0]
        return tuple((leaf.name, leaf.value) if isinstance(leaf, _NamedValue) else ("", leaf) for leaf in leaves)

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
            Python callables or their dotted names. A name matches all forms of its op (see ``opnames``).
        rules: further rules; each returns the reason why a node runs eagerly, or None.
        example_inputs: one example for each placeholder, for a graph without shape metadata.

    Raises:
        PartitionError: an op is unknown, or the graph has neither shape metadata nor examples.
        DeviceError: inputs or parameters are on two devices.
    """
    rules = (splits_at(splitting_ops), *rules)
    whole = _copy(gm)
    analysis = annotate(whole, example_inputs)
    run_passes(whole, [sizes_as_symbols(analysis.guarded), tuples_unpacked, tuples_stay_home])
    inputs = graph_inputs(whole.graph, analysis.exchanged)
    dynamo.forget_arguments(whole.graph)
    regions = build_regions(whole, assign(whole, rules, analysis), analysis)
    stitching = stitch(whole, regions)
    placeholders = [node for node in whole.graph.nodes if node.op == "placeholder"]
    written = frozenset[int]().union(*analysis.writes.values())
    outputs = next(node for node in reversed(whole.graph.nodes) if node.op == "output").args[0]
    return Partition(
        regions=regions,
        stitched=stitching.bind({region.name: region.graph_module for region in regions}),
        inputs=inputs,
        mutated_inputs=written_positions(placeholders, written),
        layout_inputs=layout_inputs(whole.graph),
        source=stitching.source,
        output_shapes=_output_shapes(outputs),
        symbolic_numbers=_symbolic_numbers(outputs),
        _stitching=stitching,
        _outputs=outputs,
    )


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a copy of the graph and the same parameters, buffers and submodules."""
    if not isinstance(gm, fx.GraphModule):
        raise PartitionError(
            "partition() splits FX graphs",
            expected="a torch.fx.GraphModule",
            found=type(gm).__name__,
            remedy="trace the module first: torch.fx.symbolic_trace(module)",
        )
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    return _Uncompiled(gm, graph)


@dataclass(frozen=True, slots=True)
class _NamedValue:
    name: str
    value: Any


def _named_value(node: fx.Node) -> Any:
    return _NamedValue(node.name, value_of(node))


class _Uncompiled(fx.GraphModule):
    """A graph module that never runs, so ``recompile`` generates no Python."""

    def recompile(self) -> Any:
        return None


def _output_shapes(outputs: Any) -> tuple[tuple[sympy.Expr | int, ...] | None, ...]:
    return tuple(_shape(leaf) for leaf in trees.flatten(_values(outputs))[0])


def _symbolic_numbers(outputs: Any) -> tuple[int, ...]:
    leaves = trees.flatten(_values(outputs))[0]
    return tuple(p for p, leaf in enumerate(leaves) if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)))


def _values(outputs: Any) -> Any:
    return fx.map_arg(outputs, value_of)


def _shape(value: Any) -> tuple[sympy.Expr | int, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(expression for size in value.shape if (expression := symbolic.expression_of(size)) is not None)
