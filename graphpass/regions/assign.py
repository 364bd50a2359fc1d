"""Group nodes into regions: first the reasons to run eagerly, then uncuttable spans, then runs of one kind in order.

Each group becomes a graph module with flat inputs and outputs.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy
from torch import fx

from graphpass.compat import memory, operators
from graphpass.compat.nnmodules import where_of
from graphpass.regions.analysis import (
    CALLS,
    RECOMPUTED,
    GraphFacts,
    SplitReason,
    free_symbols,
    is_rebuilt_output,
    is_recomputed,
    symbol_placeholders,
    unpacked_from,
)
from graphpass.regions.eagerrules import SplitRule, read_by_storage, reshapes_in_place
from graphpass.regions.execute import argument_storages, storages_of, tensors_in, value_of, values_at
from graphpass.regions.names import CALLED, display_name, names_of
from graphpass.regions.symbols import REAL_SIZES
from graphpass.report.drawing import listed

_OUTSIDE = "enter the mode around the call of the compiled model, not inside the model"

_MADE = "empty empty_like new_empty empty_permuted empty_strided new_empty_strided full full_like new_full"
_MADE_OF_ONE_NUMBER = "ones ones_like new_ones zeros zeros_like new_zeros"
ALLOCATIONS = frozenset(f"aten::{name}" for name in f"{_MADE} {_MADE_OF_ONE_NUMBER}".split())

Kind = Literal["captured", "eager"]


NodeGroup: TypeAlias = tuple[Kind, tuple[fx.Node, ...], tuple[SplitReason, ...]]
"""A run of call nodes in program order that becomes one region, and why it is eager."""


def assign(gm: fx.GraphModule, rules: Sequence[SplitRule], facts: GraphFacts) -> tuple[NodeGroup, ...]:
    """Group the call nodes of a prepared graph into regions. May move allocations within ``gm``, nothing else."""
    calls = (node for node in gm.graph.nodes if node.op in CALLS and not is_rebuilt_output(node))
    # Each region that uses a recomputed number or constant computes it.
    body = [node for node in calls if not is_recomputed(node) or any(user.op == "output" for user in node.users)]
    reasons = _reasons(body, rules)
    _spread_over_spans(body, reasons)
    runs = _runs(body, reasons)
    while torn := _torn_from_other_runs(runs):
        reasons.update(torn)
        runs = _runs(body, reasons)
    trivial = [kind == "captured" and all(_is_trivial(n, facts) for n in nodes) for kind, nodes in runs]
    runs = _fold_allocations(runs, trivial)
    located = {
        node: tuple(reason.located(where_of(node.meta.get("stack_trace"))) for reason in found)
        for node, found in reasons.items()
    }
    for (_, nodes), is_trivial in zip(runs, trivial, strict=True):
        if is_trivial and nodes:
            located.update(dict.fromkeys(nodes, ()))
            located[nodes[0]] = (SplitReason("nothing to capture", ", ".join(dict.fromkeys(map(display_name, nodes)))),)
    ordered = [node for _, nodes in runs for node in nodes]
    return tuple(
        (kind, tuple(nodes), tuple(dict.fromkeys(reason for node in nodes for reason in located.get(node, ()))))
        for kind, nodes in _runs(ordered, located)
    )


def _reasons(body: Sequence[fx.Node], rules: Sequence[SplitRule]) -> dict[fx.Node, tuple[SplitReason, ...]]:
    """Eager node -> its reasons. An item of an eager op's tuple is eager too, with an empty tuple of reasons."""
    reasons_of: dict[fx.Node, tuple[SplitReason, ...]] = {}
    for node in body:
        source = unpacked_from(node)
        if source is not None:
            if source in reasons_of:
                reasons_of[node] = ()
            continue
        reasons = tuple(dict.fromkeys(reason for rule in rules if (reason := rule(node)) is not None))
        if reasons:
            reasons_of[node] = reasons
    return reasons_of


def _spread_over_spans(body: Sequence[fx.Node], reasons: dict[fx.Node, tuple[SplitReason, ...]]) -> None:
    for first, last in _spans(body):
        span = body[first : last + 1]
        inside = [node for node in span if reasons.get(node)]
        if not any(node in reasons for node in span):
            continue
        names = dict.fromkeys(display_name(node) for node in inside)
        why = f"{listed(names)} inside {display_name(span[0])} ... {display_name(span[-1])}"
        for node in span:
            reasons.setdefault(node, ())
        reasons[span[0]] = (*reasons[span[0]], SplitReason("mode pair", why, remedy=_OUTSIDE))


def _spans(body: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """(first, last) positions of the outermost enter/exit spans; overlapping spans are merged."""
    spans = sorted(_paired_spans(body) + _switched_spans(body))
    merged: list[tuple[int, int]] = []
    for first, last in spans:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _paired_spans(body: Sequence[fx.Node]) -> list[tuple[int, int]]:
    pairs = operators.mode_pairs()
    spans: list[tuple[int, int]] = []
    open_at: list[list[int]] = [[] for _ in pairs]
    for position, node in enumerate(body):
        for (enter, leave), opened in zip(pairs, open_at, strict=True):
            if node.target is enter:
                opened.append(position)
            elif node.target is leave and opened:
                spans.append((opened.pop(), position))
    spans.extend((position, len(body) - 1) for opened in open_at for position in opened)
    return spans


def _switched_spans(body: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Spans in which a mode that is switched by value (grad mode, say) differs from its value outside.

    The last value set is the outer one. A mode that is set an odd number of times is never restored: its span extends
    to the last node.
    """
    spans: list[tuple[int, int]] = []
    for switch in operators.mode_switches():
        sets = [(position, node.args[:1]) for position, node in enumerate(body) if node.target is switch]
        if len(sets) % 2:
            spans.append((sets[0][0], len(body) - 1))
            continue
        opened: int | None = None
        for position, value in sets:
            outside = value == sets[-1][1]
            if opened is None:
                opened = position
            if outside:
                spans.append((opened, position))
                opened = None
    return spans


Runs = list[tuple[Kind, deque[fx.Node]]]


def _runs(body: Sequence[fx.Node], reasons: Mapping[fx.Node, tuple[SplitReason, ...]]) -> Runs:
    runs: Runs = []
    for node in body:
        kind: Kind = "eager" if node in reasons else "captured"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, deque()))
        runs[-1][1].append(node)
    return runs


def _torn_from_other_runs(runs: Runs) -> dict[fx.Node, tuple[SplitReason, ...]]:
    """Captured nodes that must not share their tensor with another run, with the reason to run them eagerly.

    A replay does not repeat an in-place change of shape, and a tensor from an earlier run may have another offset. See
    Note [Copied inputs].
    """
    shared: dict[int, set[int]] = {}
    for position, (_, nodes) in enumerate(runs):
        for node in nodes:
            for storage in storages_of(values_at(node)):
                shared.setdefault(storage, set()).add(position)
    torn: dict[fx.Node, tuple[SplitReason, ...]] = {}
    for position, (kind, nodes) in enumerate(runs):
        for node in nodes if kind == "captured" else ():
            turned = storages_of(value_of(node)) if reshapes_in_place(node) else frozenset[int]()
            if any(len(shared[storage]) > 1 for storage in turned):
                why = f"{display_name(node)} of a tensor that another region has too"
                torn[node] = (SplitReason("reshaped in place", why),)
            elif any(min(shared[storage]) < position for storage in read_by_storage(node)):
                why = f"{display_name(node)} of a tensor that an earlier region hands over"
                torn[node] = (SplitReason("beyond a region", why),)
    return torn


def _is_trivial(node: fx.Node, facts: GraphFacts) -> bool:
    """Whether a node launches no kernel: an allocation, a view, a number, a mode switch."""
    if node in facts.writes or operators.is_higher_order(node.target):
        return False
    if operators.is_mode_op(node.target) or _is_allocation(node):
        return True
    value = value_of(node)
    result_storages = [memory.storage_id(tensor) for tensor in tensors_in(value)]
    if result_storages:
        return argument_storages(node).issuperset(result_storages)
    return value is not None or not any(True for _ in tensors_in([value_of(a) for a in node.all_input_nodes]))


def _is_allocation(node: fx.Node) -> bool:
    return node.op != "call_module" and bool(ALLOCATIONS & names_of(node)) and "out" not in node.kwargs


def _fold_allocations(runs: Runs, trivial: Sequence[bool]) -> Runs:
    """Move allocations from runs that will not be captured into the captured run before or after.

    They read no contents, so no write in between can change them.
    """
    run_of = {node: position for position, (_, nodes) in enumerate(runs) for node in nodes}
    captured = [position for position, (kind, _) in enumerate(runs) if kind == "captured" and not trivial[position]]
    for position, (_, nodes) in enumerate(runs):
        if not trivial[position]:
            continue
        at = bisect(captured, position)
        before, after = (captured[at - 1] if at else None), (captured[at] if at < len(captured) else None)
        waiting = tuple(nodes)
        nodes.clear()
        for node in waiting:
            target = _joined_run(node, before, after, run_of) if _is_allocation(node) else None
            if target is None:
                nodes.append(node)
                continue
            joined = runs[target][1]
            if target < position:
                joined[-1].append(node)
                joined.append(node)
            else:
                joined[0].prepend(node)
                joined.appendleft(node)
            run_of[node] = target
    return runs


def _joined_run(node: fx.Node, before: int | None, after: int | None, run_of: Mapping[fx.Node, int]) -> int | None:
    """``before`` if all inputs of an allocation exist there, else ``after`` if no user comes earlier, else None."""
    if before is not None and all(run_of.get(argument, -1) <= before for argument in node.all_input_nodes):
        return before
    if after is not None and all(run_of.get(user, after) >= after for user in node.users):
        return after
    return None


@dataclass(frozen=True, slots=True)
class Region:
    """A run of nodes, in program order, that is captured or stays eager."""

    name: str  #: ``r0``, ``r1``, ... in program order, over both kinds
    kind: Kind
    #: Placeholders in the order of ``inputs``; returns a flat tuple in the order of ``outputs``. Parameters, buffers
    #: and subgraphs are shared with the graph module that was partitioned.
    graph_module: fx.GraphModule
    reasons: tuple[SplitReason, ...]  #: why the region is eager; empty if it is captured
    inputs: tuple[str, ...]  #: names of the input values, the symbolic sizes of its tensors first
    outputs: tuple[str, ...]  #: names of the values that later regions or the caller use
    mutated_inputs: tuple[int, ...]  #: positions in ``inputs`` of tensors that it writes to, also through views

    @property
    def why(self) -> str | None:
        """The reasons as one line, for dumps and reports; None for captured regions."""
        return "; ".join(dict.fromkeys(reason.why for reason in self.reasons)) if self.kind == "eager" else None


def build_regions(gm: fx.GraphModule, groups: Sequence[NodeGroup], facts: GraphFacts) -> tuple[Region, ...]:
    """One region for each group, in order, in time linear in the graph."""
    symbols = symbol_placeholders(gm.graph)
    order = {node: position for position, node in enumerate(symbols.values())}
    real_sizes = [node for node in gm.graph.find_nodes(op="placeholder") if REAL_SIZES in node.meta]
    return tuple(_region(f"r{i}", gm, group, facts, symbols, order, real_sizes) for i, group in enumerate(groups))


def _region(
    name: str,
    gm: fx.GraphModule,
    group: NodeGroup,
    facts: GraphFacts,
    symbols: Mapping[sympy.Symbol, fx.Node],
    order: Mapping[fx.Node, int],
    real_sizes: Sequence[fx.Node],
) -> Region:
    (kind, nodes, reasons), inside = group, set(group[1])
    made_here = _with_recomputed(nodes, inside)
    own = set(made_here)
    outer = dict.fromkeys(argument for node in made_here for argument in node.all_input_nodes if argument not in own)
    used = free_symbols([value_of(node) for node in (*outer, *made_here)])
    sizes = {symbols[symbol] for symbol in used if symbol in symbols} | (outer.keys() & order.keys())
    last = real_sizes if kind == "captured" and used else []
    inputs = list(dict.fromkeys((*sorted(sizes, key=order.__getitem__), *outer, *last)))
    outputs = [node for node in nodes if any(_takes_over(user, inside, node) for user in node.users)]
    written = frozenset[int]().union(*(facts.writes.get(node, frozenset()) for node in nodes))
    return Region(
        name=name,
        kind=kind,
        graph_module=_graph_module(name, gm, made_here, inputs, outputs),
        reasons=reasons,
        inputs=tuple(node.name for node in inputs),
        outputs=tuple(node.name for node in outputs),
        mutated_inputs=written_positions(inputs, written),
    )


def _takes_over(user: fx.Node, inside: set[fx.Node], node: fx.Node) -> bool:
    """Whether ``user`` needs ``node`` as an output of the region. Other regions compute recomputed numbers again."""
    if not is_recomputed(node) and is_recomputed(user):  # each region that needs it computes it
        return any(_takes_over(reader, inside, node) for reader in user.users)
    return user.op == "output" or is_rebuilt_output(user) or (user not in inside and not is_recomputed(node))


def _with_recomputed(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    placed: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if (
                argument not in placed
                and argument not in inside
                and (argument.op == "get_attr" or is_recomputed(argument))
            ):
                place(argument)
        placed[node] = None

    for node in nodes:
        place(node)
    return list(placed)


def written_positions(inputs: Iterable[fx.Node], written: frozenset[int]) -> tuple[int, ...]:
    """Positions of the inputs whose storage is among ``written``."""
    return tuple(i for i, node in enumerate(inputs) if storages_of(value_of(node)) & written)


def _graph_module(
    name: str, gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    for node, copy in copies.items():
        copy.meta = {key: value for key, value in node.meta.items() if key not in (RECOMPUTED, CALLED)}
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(gm, graph, class_name=name)
