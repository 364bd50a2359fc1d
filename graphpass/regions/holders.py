"""Inputs that hold tensors, as plain inputs: lists, and tensors that wrap tensors (a quantised weight, a DTensor).

Each entry of a list becomes an input. Compiled autograd passes the list itself, which the callee empties so that an
entry can be freed while the graph runs.

Each wrapper becomes the tensors in it, named by their path (``layers.0.weight.qdata``), and one call that makes it
again in each region that uses it: none passes from region to region. Nested tensors (``torch.jagged``) stay: Python
code chooses what is done to each of theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from graphpass.compat import dynamo, symbolic
from graphpass.compat.subclasses import Path, Rebuild, holds_state, is_wrapper, plain_tensors, rebuild_of
from graphpass.regions.analysis import CALLS, RECOMPUTED, refused_wrapper, symbol_placeholders
from graphpass.regions.execute import call_for, value_of

ListEntries: TypeAlias = Mapping[int, tuple[int, ...]]
"""{position of an input that is a list: the entries that the graph reads, in order}."""
Getter: TypeAlias = Callable[[Any], Any]
_SIZES = ((torch.ops.aten.sym_size.int, torch.Tensor.size), (torch.ops.aten.sym_stride.int, torch.Tensor.stride))


def emptied_before(entries: ListEntries, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` for the arguments that Dynamo passes; each list is empty before ``run`` begins."""
    if not entries:
        return run

    def with_entries(*given: Any) -> Any:
        flat: list[Any] = []
        for position, value in enumerate(given):
            if position in entries:
                flat += [value[entry] for entry in entries[position]]
                value.clear()
            else:
                flat.append(value)
        return run(*flat)

    return with_entries


def lists_as_entries(graph: fx.Graph) -> ListEntries:
    """Replace each input that is a list by the entries that the graph reads."""
    entries = {}
    for position, given in enumerate(graph.find_nodes(op="placeholder")):
        if not isinstance(value_of(given), list) or any(user.target is not operator.getitem for user in given.users):
            continue
        reads: dict[int, fx.Node] = {}
        for user in list(given.users):
            entry = int(user.args[1])
            if entry not in reads:
                with graph.inserting_before(given):
                    reads[entry] = graph.placeholder(f"{given.name}_{entry}")
                reads[entry].meta = dynamo.entry_meta(user, given, entry)
            user.replace_all_uses_with(reads[entry])
            graph.erase_node(user)
        graph.erase_node(given)
        entries[position] = tuple(reads)
    return entries


@dataclass(frozen=True, slots=True)
class Arguments:
    """Where the arguments of a graph are among those of the graph that Dynamo traced, and what its results make."""

    reads: tuple[tuple[int, Getter | None], ...]  #: of each argument, Dynamo's position and what reads it
    #: Of each of Dynamo's results, (what makes it, the number of results that it takes); empty if all are plain.
    makes: tuple[tuple[Rebuild | None, int], ...]

    def read(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the graph, for those of Dynamo."""
        return tuple([given[at] if get is None else get(given[at]) for at, get in self.reads])

    def made(self, returned: Any) -> Any:
        """What Dynamo expects, from what the graph returned."""
        parts = iter(returned)
        groups = [(make, [next(parts) for _ in range(count)]) for make, count in self.makes]
        return type(returned)([group[0] if make is None else make(*group) for make, group in groups])


def unwrapped(graph: fx.Graph, getters: Mapping[int, Getter | None]) -> Arguments:
    """Replace each wrapper in a graph that Dynamo traced by the tensors in it; ``getters`` read its other inputs."""
    reads: list[tuple[int, Getter | None]] = []
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        is_under_way = hasattr(value_of(node), "trigger_wait")  # the result of a collective
        paths = as_parts(node) if is_wrapper(value_of(node)) else [()]
        parts = [operator.attrgetter(".".join(path)) if path else getters.get(position) for path in paths]
        # guard: collectives_waited_for
        reads += [(position, operator.methodcaller("trigger_wait") if is_under_way else get) for get in parts]
    for node in [node for node in graph.nodes if node.op in CALLS and is_wrapper(value_of(node))]:
        if holds_state(value_of(node)) and graph.output_node() not in node.users:  # guard: wrapper_state
            node.meta[RECOMPUTED] = True
        elif not isinstance(node.target, Rebuild):
            _follow(node)
    return Arguments(tuple(reads), _plain_results(graph))


def as_parts(node: fx.Node) -> list[Path]:
    """Replace the placeholder of a wrapper by one for each plain tensor in it; returns their paths.

    Its metadata goes: ``torch.utils.swap_tensors`` rejects weak references.
    """
    graph, found = node.graph, list(plain_tensors(value_of(node)))
    plain = []
    for path, tensor in found:
        with graph.inserting_before(node):
            plain.append(graph.placeholder(f"{node.name}_{'_'.join(path)}"))
        plain[-1].meta = dynamo.part_meta(node, tensor, path)
    with graph.inserting_before(next(other for other in graph.nodes if other.op != "placeholder")):
        _rebuild(node, plain, list(node.users))
    node.meta = {}  # guard: wrapper_forgotten
    graph.erase_node(node)
    return [path for path, _ in found]


def _follow(node: fx.Node) -> None:
    """Take the parts of a wrapper where it is made, and make the wrapper of them in each region that uses it."""
    users, plain = list(node.users), []
    with node.graph.inserting_before(node.next):
        for path, _ in plain_tensors(value_of(node)):
            part = node
            for name in path:
                part = _made(part, getattr, (part, name), getattr(value_of(part), name), repeated=False)
            plain.append(part)
        _rebuild(node, plain, users)


def _rebuild(node: fx.Node, plain: Sequence[fx.Node], users: Sequence[fx.Node]) -> None:
    """Give ``users`` a call that makes the wrapper of ``node`` again, of nodes for the plain tensors in it."""
    for user in users:
        if user.target == "to_local" and user.args == (node,) and not user.kwargs:  # of a DTensor, which has one
            user.replace_all_uses_with(plain[0])
            node.graph.erase_node(user)
    users = [user for user in users if user in node.users]
    if not users:
        return
    given: list[Any] = []
    recipe, tensors = rebuild_of(value_of(node), given), iter(plain)
    args = [next(tensors) if isinstance(one, torch.Tensor) else _size(node, plain, one) for one in given]
    built = _made(node, recipe, tuple(args), value_of(node), repeated=True)
    for user in users:
        user.replace_input_with(node, built)


def _size(node: fx.Node, plain: Sequence[fx.Node], size: torch.SymInt) -> fx.Node:
    """A node for a size: an input, or a multiple of a size or stride of a plain tensor, of which a rank has a part."""
    expression: Any = symbolic.expression_of(size)
    known = symbol_placeholders(node.graph).get(expression)
    if known is not None:
        return known
    for part in plain:
        for op, numbers in _SIZES:
            for dim, number in enumerate(numbers(value_of(part))):
                times = sympy.sympify(expression) / symbolic.expression_of(number)
                if times.is_Integer:  # guard: wrapper_sharded_sizes
                    read = _made(node, op, (part, dim), number, repeated=True)
                    return read if times == 1 else _made(node, operator.mul, (read, int(times)), size, repeated=True)
    raise refused_wrapper(node, f"has the size {size}, which no tensor in it has", "compile with dynamic=False")


def _made(source: fx.Node, target: Any, args: tuple[Any, ...], value: Any, *, repeated: bool) -> fx.Node:
    """A call for the line of ``source``; a repeated one is made by each region that uses it."""
    node = call_for(source, target, args, value)
    node.meta[RECOMPUTED] = repeated
    return node


def _plain_results(graph: fx.Graph) -> tuple[tuple[Rebuild | None, int], ...]:
    """Return the parts of each wrapper among the results, and how Dynamo's results are made of them."""
    output: Any = graph.output_node()
    wrappers = [node for node in output.all_input_nodes if is_wrapper(value_of(node))]
    if not wrappers:
        return ()
    results: Any = output.args[0]
    if not isinstance(results, (tuple, list)) or any(node not in results for node in wrappers):
        raise refused_wrapper(wrappers[0], "is returned in a container", "return the tensors in it")
    groups: list[Any] = [(node.target, node.args) if node in wrappers else (None, (node,)) for node in results]
    output.args = (type(results)(part for _, parts in groups for part in parts),)
    return tuple((make, len(parts)) for make, parts in groups)
