"""Lists of tensors among the inputs of a graph, as compiled autograd passes them: each entry is an input of its own.

Compiled autograd gives a graph the list itself, which the callee empties so that an entry can be freed while the graph
runs. Regions and compilers take tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import fx

from graphpass.compat import dynamo
from graphpass.regions.execute import value_of

ListEntries: TypeAlias = Mapping[int, tuple[int, ...]]
"""{position of an input that is a list: the entries that the graph reads, in order}."""


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
