"""Shapes and writes of every node: one linear walk over the graph before it is split.

The walk uses the graph's own metadata (Dynamo's ``example_value``, make_fx's ``val``) and computes missing metadata on
fake tensors. An op that may write to its arguments runs once on fake tensors, which shows the storages it writes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, operators, symbolic
from graphpass.compat.nnmodules import where_of
from graphpass.compat.subclasses import is_made_of_tensors, is_wrapper, views_wrapper
from graphpass.errors import DeviceError, PartitionError
from graphpass.ledger import Reason
from graphpass.regions.execute import (
    argument_storages,
    execute,
    owner_of,
    storages_of,
    tensors_in,
    value_of,
)
from graphpass.regions.names import display_name, traits_of

FACTS = "graphpass_facts"
RECOMPUTED = "graphpass_recomputed"
REBUILT = "graphpass_rebuilt"
CALLS = ("call_function", "call_method", "call_module")

_CAPTURED_IN_A_WHOLE = frozenset({"splitting op", "nothing to capture", "reshaped in place", "beyond a region"})
_WRITE_INTO = "write into the tensors in it, or change it outside of the compiled model"
_NOT_PADDED = frozenset({"exchanged memory", "nested tensor"})


class SplitReason(Reason):
    """Why a node runs eagerly.

    Args:
        kind: short and stable: "splitting op", "unsafe tag", "host read", "control flow", "data-dependent shape",
            "host scalar", "beyond an input", "beyond a region", "reshaped in place", "exchanged memory",
            "nested tensor", "object with state", "cpu tensor", "second device", "mode pair", "nothing to capture", or
            a kind from a user's rule.
        detail: one sentence that names the op or the node.
        where: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown.
        remedy: a change of the model after which the node can be captured; empty if another node causes it, or the user
            asked for it.
    """

    __slots__ = ()

    def __init__(self, kind: str, detail: str, where: str = "", remedy: str = "") -> None:
        Reason.__init__(self, f"{kind}: {detail}", remedy, where)

    @property
    def kind(self) -> str:
        """The part of ``why`` before the colon."""
        return self.why.partition(": ")[0]

    @property
    def captures_whole(self) -> bool:
        """Whether a graph of the whole callable can hold the node: the cut serves the graphs of single regions."""
        return self.kind in _CAPTURED_IN_A_WHOLE

    @property
    def forbids_padding(self) -> bool:
        """Whether a caller sees memory of the node as it is: it could not be cut to the real sizes."""
        return self.kind in _NOT_PADDED

    def located(self, where: str) -> SplitReason:
        """This reason, at ``where`` unless it has a line."""
        return self if self.where else SplitReason(self.kind, self.why.partition(": ")[2], where, self.remedy)


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The result of the walk: facts about the whole graph, which stand in the metadata of its module for the rules."""

    main_device: torch.device | None = None  #: of inputs and parameters; the accelerator if some are on the CPU
    #: Unbacked symbol -> the node that produces its value at run time.
    readers: Mapping[sympy.Symbol, fx.Node] = field(default_factory=dict)
    #: Ids of the storages of inputs without a static address. See Note [Copied inputs].
    copied_storages: frozenset[int] = frozenset()
    #: Storage that outlives the call in another tensor than at its start -> what keeps it.
    kept: Mapping[int, SplitReason] = field(default_factory=dict)
    #: Call node -> ids of the storages that it writes, if any.
    writes: Mapping[fx.Node, frozenset[int]] = field(default_factory=dict)
    guarded: bool = False  #: every placeholder had metadata: Dynamo's guards ensure constant sizes in each call
    #: The placeholders whose tensor gets another storage, perhaps that of their metadata.
    exchanged: frozenset[fx.Node] = frozenset()


def facts_of(node: fx.Node) -> GraphFacts:
    """The facts of the graph that ``node`` is in; empty facts before :func:`annotate` has run."""
    facts = getattr(node.graph.owning_module, "meta", {}).get(FACTS)
    return facts if isinstance(facts, GraphFacts) else GraphFacts()


def free_symbols(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in a value: in sizes, strides and offsets of its tensors, and in its symbolic numbers."""
    symbols: set[sympy.Symbol] = set()
    for number in _numbers_in(value):
        if not isinstance(number, int):
            symbols |= symbolic.expression_of(number).free_symbols  # type: ignore[union-attr]
    return frozenset(symbols)


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield from value.shape
        if value.layout is torch.strided:
            yield from value.stride()
            yield value.storage_offset()
    elif isinstance(value, symbolic.NUMBERS):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers_in(item)


def symbol_placeholders(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """Symbol -> the first placeholder whose value is that symbol alone, in the order of the placeholders."""
    placeholders: dict[sympy.Symbol, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value_of(node), torch.SymInt):
            expression = symbolic.expression_of(value_of(node))
            if isinstance(expression, sympy.Symbol):
                placeholders.setdefault(expression, node)
    return placeholders


def is_recomputed(node: fx.Node) -> bool:
    """Whether every region that needs this node computes it again instead of receiving it from another region.

    True for arithmetic on input sizes, and for constants that Dynamo writes as calls
    (``_backend_from_string('MATH')``).
    """
    recomputed = node.meta.get(RECOMPUTED)
    if not isinstance(recomputed, bool):
        recomputed = _can_recompute(node)
        node.meta[RECOMPUTED] = recomputed
    return recomputed


def _can_recompute(node: fx.Node) -> bool:
    value = value_of(node)
    if node.op != "call_function" or value is None or any(True for _ in tensors_in(value)):
        return False
    if operators.is_higher_order(node.target) or any(symbolic.is_unbacked(symbol) for symbol in free_symbols(value)):
        return False
    return all(
        is_recomputed(argument)
        or (argument.op == "placeholder" and isinstance(value_of(argument), (int, torch.SymInt)))
        for argument in node.all_input_nodes
    )


def is_rebuilt_output(node: fx.Node) -> bool:
    """Whether a node only rebuilds a tuple class (``torch.Size``, the result of ``max``) for the graph's output."""
    return REBUILT in node.meta


def is_tuple(value: Any) -> bool:
    """Whether a value is a tuple or a list, but no ``torch.Size``."""
    return isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)


def unpacked_from(node: fx.Node) -> fx.Node | None:
    """The tuple, list or wrapper of which ``node`` is one item or part; None if ``node`` is no such getitem."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return None
    source, index = node.args[:2]
    if not isinstance(source, fx.Node) or isinstance(index, fx.Node) or source.op == "placeholder":
        return None
    is_unpacked = isinstance(value_of(source), (tuple, list)) or is_wrapper(value_of(source))
    return source if is_unpacked else None


def annotate(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> GraphFacts:
    """Fill in missing metadata, record which storages are written, and note the :class:`GraphFacts`."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    guarded = all(map(_has_value, placeholders))
    if not guarded:
        _examples_to_placeholders(placeholders, example_inputs)
    values = [value_of(node) for node in gm.graph.nodes]
    fake_mode = symbolic.fake_mode_of(values) or symbolic.new_fake_mode(values)
    for node in placeholders:
        node.meta["example_value"] = symbolic.fakify(fake_mode, value_of(node))
    walk = _Walk(fake_mode)
    try:
        for node in gm.graph.nodes:
            walk.visit(node)
    finally:
        walk.leave_autocast(*reversed(walk.autocasts))
    moving = [node for node in placeholders if not dynamo.is_static_address(node)]
    copied = frozenset[int]().union(*(storages_of(value_of(node)) for node in moving))
    kept = _kept_memory(gm.graph, walk.memory, fake_mode)
    values_exchanged = {id(value_of(node)) for node in walk.exchanged}
    exchanged = frozenset(node for node in placeholders if id(value_of(node)) in values_exchanged)
    facts = GraphFacts(main_device(gm.graph), walk.readers, copied, kept, walk.writes, guarded, exchanged)
    gm.meta[FACTS] = facts
    return facts


def _has_value(node: fx.Node) -> bool:
    return "example_value" in node.meta or "val" in node.meta


def _examples_to_placeholders(placeholders: Sequence[fx.Node], example_inputs: Sequence[Any] | None) -> None:
    examples = list(example_inputs or ())
    for position, node in enumerate(placeholders):
        if _has_value(node):
            continue
        if position < len(examples):
            node.meta["example_value"] = examples[position]
        elif node.args:
            node.meta["example_value"] = node.args[0]
        else:
            raise PartitionError(
                f"input {node.target!r} has no shape metadata",
                expected="an example for every input, or a graph that torch.compile made",
                found=f"{len(examples)} example inputs for {len(placeholders)} placeholders",
                remedy="pass example_inputs=(...), one for each input, to partition()",
            )


class _Walk:
    def __init__(self, fake_mode: Any) -> None:
        self.fake_mode = fake_mode
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.readers: dict[sympy.Symbol, fx.Node] = {}
        self.exchanged: list[fx.Node] = []
        self.memory: dict[int, SplitReason] = {}
        self.autocasts: dict[fx.Node, Any] = {}  # the node that entered autocast -> the mode, until it is left
        self._bound: set[sympy.Symbol] = set()

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._bound |= free_symbols(value_of(node))
        elif node.op == "get_attr":
            attribute = operator.attrgetter(str(node.target))(owner_of(node))
            if isinstance(attribute, torch.Tensor) and not _has_value(node):
                node.meta["example_value"] = symbolic.fakify(self.fake_mode, attribute)
        elif node.op in CALLS and not self._changes_mode(node):
            self._visit_call(node)

    def _changes_mode(self, node: fx.Node) -> bool:
        """Whether a node enters or leaves a mode: autocast, which decides dtypes, is applied here, others are not."""
        target: Any = node.target
        enter, leave = operators.autocast_pair()
        if target is enter:
            self.autocasts[node] = enter(*node.args)
        elif target is leave:
            self.leave_autocast(*node.args)
        return operators.is_mode_op(target)

    def leave_autocast(self, *entered: Any) -> None:
        _, leave = operators.autocast_pair()
        for node in entered:
            if (mode := self.autocasts.pop(node, None)) is not None:
                leave(mode)

    def _visit_call(self, node: fx.Node) -> None:
        known = _has_value(node)
        if operators.is_higher_order(node.target):
            if not known and node.users:
                raise _cannot_run(node, "its metadata is missing")
            written = frozenset[int]() if subgraphs_are_pure(node) else argument_storages(node)
        elif known and is_known_pure(node):
            written = frozenset()
        else:
            written = self._run(node, known)
        if written:
            self.writes[node] = written
        if views_wrapper(value_of(node)):
            node.meta["example_value"] = symbolic.without_base(value_of(node), self.fake_mode)
        # A number read from a tensor on the CPU may have a hint, as if it were a size; no input is its value either.
        fresh = free_symbols(value_of(node)) - self._bound  # guard: numbers_read_on_the_cpu
        self.readers.update(dict.fromkeys(fresh, node))
        self._bound |= fresh

    def _run(self, node: fx.Node, known: bool) -> frozenset[int]:
        try:
            execution = execute(node, self.fake_mode)
        except Exception as error:
            # Keep the graph's own metadata, and assume that the op writes to every argument.
            if known or not node.users:
                return argument_storages(node)
            raise _cannot_run(node, str(error)) from error
        if not known:
            node.meta["example_value"] = execution.value
        if execution.exchanged:
            for given in filter(lambda given: is_wrapper(value_of(given)), execution.exchanged):
                # guard: wrapper_parts
                raise refused_wrapper(given, f"gets another tensor from {display_name(node)}", _WRITE_INTO)
            self.exchanged.extend(execution.exchanged)
            self.memory.update(dict.fromkeys(execution.memory, _by_exchange(node)))
        return (execution.written | execution.memory) & argument_storages(node)


def refused_wrapper(node: fx.Node, why: str, remedy: str) -> PartitionError:
    """Why a graph with the wrapper that is the value of ``node`` cannot be split."""
    kind, where = type(value_of(node)).__name__, where_of(node.meta.get("stack_trace"))
    return PartitionError(f"a {kind} {why}", expected="no such use of it", found=where or node.name, remedy=remedy)


def _by_exchange(node: fx.Node) -> SplitReason:
    """Why the memory that a node gives to a tensor, or takes from it, must not be a graph's own."""
    return SplitReason(
        kind="exchanged memory",
        detail=f"{display_name(node)} gives a tensor other memory, as `tensor.data = new` does",
        where=where_of(node.meta.get("stack_trace")),
        remedy="write into the tensor instead, `tensor.copy_(new)` under torch.no_grad()",
    )


def _cannot_run(node: fx.Node, why: str) -> PartitionError:
    return PartitionError(
        f"node {node.name!r} cannot be run on fake tensors",
        expected=f"{display_name(node)} to have a fake implementation",
        found=why.splitlines()[0] if why else "an error without a message",
        remedy="register one (torch.library.register_fake), or pass example_inputs that fit the graph",
    )


def is_known_pure(node: fx.Node) -> bool:
    """Whether the name and flags of a node's op alone show that it writes to none of its arguments."""
    target: Any = node.target
    if target is operator.getitem or operators.is_mode_op(target) or operators.wraps_for_functorch(target):
        return True
    if node.op == "call_module" or "out" in node.kwargs or not _is_torch_function(node):
        return False
    overloads = traits_of(node, out=False)
    return bool(overloads) and not any(traits.writes for traits in overloads)


def _is_torch_function(node: fx.Node) -> bool:
    """Whether a node calls torch's own code, so that the schema of the operator with that name applies.

    Not for functions in Python with a flag that makes them write, such as ``inplace``.
    """
    target: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if not inspect.isfunction(target):
        return target is not None
    flagged = node.kwargs.get("inplace") or node.kwargs.get("max_norm") or True in node.args
    return target.__module__ in ("torch.nn.functional", "torch.functional", "torch._tensor") and not flagged


def subgraphs_are_pure(node: fx.Node) -> bool:
    """Whether a higher-order op has subgraphs and none of their ops writes to its arguments."""
    names = [str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"]
    bodies = [operator.attrgetter(name)(owner_of(node)) for name in names]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    return bool(graphs) and all(
        subgraphs_are_pure(inner) if operators.is_higher_order(inner.target) else is_known_pure(inner)
        for graph in graphs
        for inner in graph.nodes
        if inner.op in CALLS
    )


def main_device(graph: fx.Graph) -> torch.device | None:
    """The device of the graph's inputs and parameters; an accelerator takes precedence over the CPU."""
    homes: dict[torch.device, str] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            for tensor in tensors_in(value_of(node)):
                homes.setdefault(tensor.device, node.name)
    accelerators = [device for device in homes if device.type not in ("cpu", "meta")]
    if len(accelerators) > 1:
        raise DeviceError(
            "inputs and parameters lie on several devices",
            expected="one device index for one callable",
            found=", ".join(f"{homes[device]!r} on {device}" for device in accelerators),
            remedy="move the model and its inputs to one device, or compile each device's part by itself",
        )
    if accelerators:
        return accelerators[0]
    # A graph without tensor inputs runs on the device of its first accelerator tensor.
    devices = (tensor.device for node in graph.nodes for tensor in tensors_in(value_of(node)))
    return next((device for device in devices if device.type not in ("cpu", "meta")), next(iter(homes), None))


def _kept_memory(graph: fx.Graph, exchanged: Mapping[int, SplitReason], fake_mode: Any) -> dict[int, SplitReason]:
    """Storage -> what keeps it: ``exchanged``, and the memory that views of exchanged tensors read."""
    kept = {**_nested_results(graph), **exchanged}
    views: dict[fx.Node, bool] = {}
    grows = bool(exchanged)
    while grows:
        grows = False
        for node in graph.nodes:
            held, own = argument_storages(node) & kept.keys(), storages_of(value_of(node)) - kept.keys()
            if held and own and views.setdefault(node, _is_view(node, fake_mode)):
                kept.update(dict.fromkeys(own, kept[min(held)]))
                grows = True
    return kept


def _is_view(node: fx.Node, fake_mode: Any) -> bool:
    """Whether a result shares memory with an argument, by what the node does now: metadata may be older."""
    if not node.op.startswith("call"):
        return False
    try:
        shared = storages_of(execute(node, fake_mode).value)
    except Exception:
        return True
    return bool(shared & argument_storages(node))


def _nested_results(graph: fx.Graph) -> dict[int, SplitReason]:
    outputs: Any = graph.output_node()
    results = [value_of(node) for node in outputs.all_input_nodes]
    wrappers = [value for value in results if is_made_of_tensors(value) and value.is_nested]
    nested = SplitReason(
        kind="nested tensor",
        detail="a result consists of several tensors",
        where="",
        remedy="return its parts instead, values() and offsets()",
    )
    return dict.fromkeys(storages_of(wrappers), nested)
