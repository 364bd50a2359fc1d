"""Passes that prepare a graph for splitting. A pass is a function that returns whether it changed the graph.

They run on the copy that ``partition`` makes, after :mod:`graphpass.regions.analysis` has filled in the metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import symbolic
from graphpass.regions.analysis import FACTS, facts_of, symbol_placeholders
from graphpass.regions.execute import value_of

__all__ = ["Pass", "is_rebuilt_output", "run_passes", "sizes_as_symbols", "tuples_stay_home", "tuples_unpacked"]

Pass = Callable[[fx.GraphModule], bool]


def run_passes(gm: fx.GraphModule, passes: Iterable[Pass]) -> None:
    """Run the passes in order; lint and recompile ``gm`` if one of them changed the graph."""
    changed = [run(gm) for run in passes]
    if any(changed):
        gm.graph.lint()
        gm.recompile()


def is_rebuilt_output(node: fx.Node) -> bool:
    """Whether a node only rebuilds a tuple class (``torch.Size``, the result of ``max``) for the graph's output."""
    return REBUILT in node.meta


REBUILT = "graphpass_rebuilt"


def sizes_as_symbols(fixed: bool) -> Pass:
    """A pass that replaces every use of a ``torch.Size`` value by a tuple with one number per dimension.

    Args:
        fixed: Dynamo's guards ensure that sizes which are plain ints in the metadata are the same in every call.
    """

    def replace_sizes(gm: fx.GraphModule) -> bool:
        symbols = symbol_placeholders(gm.graph)
        sizes = [node for node in gm.graph.nodes if isinstance(value_of(node), torch.Size)]
        done: dict[fx.Node, tuple[Any, ...]] = {}
        for node in sizes:
            if node.op != "placeholder" and node not in done:
                _replace_size(node, _dimensions(node, symbols, fixed), done)
        return bool(sizes)

    return replace_sizes


def _dimensions(size: fx.Node, symbols: Mapping[sympy.Symbol, fx.Node], fixed: bool) -> tuple[Any, ...]:
    """One number for each dimension of a ``torch.Size`` value: an int, a placeholder, or a new node after ``size``."""
    of_tensor = size.target == "size" or (size.target is getattr and size.args[1:2] == ("shape",))
    source, target = (size.args[0], torch.ops.aten.sym_size.int) if of_tensor else (size, operator.getitem)
    dimensions: list[Any] = []
    cursor = size
    for position, length in enumerate(value_of(size)):
        expression = symbolic.expression_of(length)
        if fixed and (isinstance(length, int) or getattr(expression, "is_Integer", False)):
            dimensions.append(int(length))
        elif expression in symbols:
            dimensions.append(symbols[expression])
        else:
            with size.graph.inserting_after(cursor):
                cursor = size.graph.call_function(target, (source, position))
            cursor.meta["example_value"] = length
            _share_facts(cursor, size)
            dimensions.append(cursor)
    return tuple(dimensions)


def _share_facts(node: fx.Node, model: fx.Node) -> None:
    node.meta[FACTS] = facts_of(model)
    for key in ("stack_trace", "nn_module_stack"):
        if key in model.meta:
            node.meta[key] = model.meta[key]


def _replace_size(size: fx.Node, dimensions: tuple[Any, ...], done: dict[fx.Node, tuple[Any, ...]]) -> None:
    """Replace ``size`` by ``dimensions`` in all its users; erase the node if no user is left."""
    done[size] = dimensions
    for user in [user for user in size.users if user not in dimensions]:
        if user.target is operator.getitem and user.args[0] is size and not isinstance(user.args[1], fx.Node):
            _replace_item(user, dimensions[user.args[1]], done)  # type: ignore[index]
        elif user.target == "numel" and user.args == (size,):
            user.replace_all_uses_with(_product(user, dimensions))
            size.graph.erase_node(user)
        elif user.op == "output":
            _rebuild_for_output(user, size, torch.Size, dimensions)
        elif user.args[:1] != (size,) or user.target is not operator.getitem:
            _substitute(user, size, dimensions)
    if not size.users:
        size.graph.erase_node(size)


def _replace_item(item: fx.Node, dimensions: Any, done: dict[fx.Node, tuple[Any, ...]]) -> None:
    if isinstance(dimensions, tuple):
        _replace_size(item, dimensions, done)
        return
    for user in list(item.users):
        _substitute(user, item, dimensions)
    item.graph.erase_node(item)


def _product(before: fx.Node, factors: tuple[Any, ...]) -> Any:
    product: Any = 1
    with before.graph.inserting_before(before):
        for factor in factors:
            if isinstance(product, int) and (product == 1 or isinstance(factor, int)):
                product = factor if product == 1 else product * factor
                continue
            node = before.graph.call_function(operator.mul, (product, factor))
            node.meta["example_value"] = _number(product) * _number(factor)
            _share_facts(node, before)
            product = node
    return product


def _number(value: Any) -> Any:
    return value_of(value) if isinstance(value, fx.Node) else value


def _substitute(user: fx.Node, old: fx.Node, new: Any) -> None:
    """Replace ``old`` by ``new`` (a node, a constant or a tuple of these) in the arguments of ``user``."""

    def swap(argument: fx.Node) -> Any:
        return new if argument is old else argument

    user.args = fx.map_arg(user.args, swap)
    user.kwargs = fx.map_arg(user.kwargs, swap)


def _rebuild_for_output(output: fx.Node, old: fx.Node, kind: type, items: Any) -> None:
    """Replace ``old`` in the output by a call of ``kind`` on its items, which the stitched code makes."""
    with output.graph.inserting_before(output):
        rebuilt = output.graph.call_function(kind, tuple(items) if hasattr(kind, "_fields") else (items,))
    rebuilt.meta.update({"example_value": value_of(old), REBUILT: True})
    _share_facts(rebuilt, old)
    _substitute(output, old, rebuilt)


def tuples_unpacked(gm: fx.GraphModule) -> bool:
    """Replace each use of a whole tuple by uses of its items, so that a region's outputs are flat."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output", "get_attr") or not _is_tuple(value_of(node)) or is_rebuilt_output(node):
            continue
        users = [user for user in node.users if user.target not in (operator.getitem, getattr)]
        if users:
            items = _items(node, value_of(node))
            for user in users:
                _use_items(user, node, items)
            changed = True
    return changed


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)


def _items(source: fx.Node, value: Any) -> Any:
    """New getitem nodes after ``source`` for the items of its tuple; nested for a nested tuple."""
    items: list[Any] = []
    cursor = source
    for position, item in enumerate(value):
        with source.graph.inserting_after(cursor):
            cursor = source.graph.call_function(operator.getitem, (source, position))
        cursor.meta["example_value"] = item
        _share_facts(cursor, source)
        items.append(_items(cursor, item) if _is_tuple(item) else cursor)
    return tuple(items) if isinstance(value, tuple) else items


def _use_items(user: fx.Node, source: fx.Node, items: Any) -> None:
    kind = type(value_of(source))
    if user.op == "output" and kind not in (tuple, list):
        _rebuild_for_output(user, source, kind, items)
    else:
        _substitute(user, source, items)


def tuples_stay_home(gm: fx.GraphModule) -> bool:
    """Move every getitem on a tuple or list directly after the node that produced it; tensor indexing does not move."""
    last: dict[fx.Node, fx.Node] = {}
    changed = False
    for node in list(gm.graph.nodes):
        source = unpacked_from(node)
        if source is None:
            continue
        anchor = last.get(source, source)
        if node.prev is not anchor:
            anchor.append(node)
            changed = True
        while source is not None:
            last[source] = node
            source = unpacked_from(source)
    return changed


def unpacked_from(node: fx.Node) -> fx.Node | None:
    """The tuple- or list-valued node of which ``node`` is one item; None if ``node`` is no such getitem."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return None
    source, index = node.args[:2]
    if not isinstance(source, fx.Node) or isinstance(index, fx.Node) or source.op == "placeholder":
        return None
    return source if _is_tuple(value_of(source)) or isinstance(value_of(source), torch.Size) else None
