"""Makes padding neutral where no rule proves that it is: the interpreter repairs the graph as it walks.

Entries in the padding do not exist in the run at the real sizes, so a graph may set them, at any value, to what the
next operator takes for nothing. Three kinds of repair, by operator: an operand gets a selection, an index counts in the
real size, or the operator is rewritten. The rule of each operator decides whether a repair suffices: what it refuses is
taken back. See Note [Padding made].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.ledger import PaddingFinding
from graphpass.padding.indexing import ArgumentPath
from graphpass.padding.interpreter import Walk
from graphpass.padding.neutral import NEUTRAL, REAL_INDEX, REAL_SIZE, held_after
from graphpass.padding.opcall import OpCall, Unknown, tensors_of, words
from graphpass.padding.program import GETITEM, AtenGraph, AtenNode, Insertion, Ref, references
from graphpass.padding.sizes import Sizes, product
from graphpass.padding.table import FILLING, rule_for
from graphpass.padding.values import (
    ALL_FINITE,
    Approximate,
    PaddedValue,
    Place,
    ResultShape,
    Size,
    TensorShape,
    is_number,
)

_COMPUTED = words(
    "Symbol Dummy Integer Zero One NegativeOne Half Float Add Mul Max Min Abs FloorDiv Mod PythonMod",
    "ToFloat TruncToInt IntTrueDiv FloatTrueDiv",
)

Fill: TypeAlias = float | int | bool | sympy.Basic
"""What padding gets: a number, or the size of the dimension that an index is for."""

Repair: TypeAlias = "Callable[[Operands], Ref]"
"""Adds the nodes that stand for a node, its result last."""


class NotMade(Exception):  # noqa: N818 - control flow within the walk, never raised to a caller
    """Raised by a repair, or by the walk that it asks for something: the call is not repaired in this way."""


def need(condition: object) -> None:
    """Give the repair at hand up unless the condition holds."""
    if not condition:
        raise NotMade


@dataclass(frozen=True, slots=True)
class Made:
    """A graph whose padding is made."""

    graph: AtenGraph
    #: For each node of ``graph`` the position of the node of the original graph that it is; None for a new one.
    sources: tuple[int | None, ...]
    fields: tuple[str, ...]  #: the key fields that can be padded together


class Making(Walk):
    """A run that adds nodes to the graph: the first that a rule accepts of the ``repairs`` that an operator has."""

    def __init__(
        self,
        graph: AtenGraph,
        sizes: Sizes,
        can_change: Mapping[int, str],
        repairs: Callable[[str], Sequence[Repair]],
    ) -> None:
        super().__init__(graph, sizes, frozenset())
        self._repairs = repairs
        self.insertions: list[Insertion] = []
        self._can_change = can_change  # position -> the graph's operator there, or the one that it is a part of
        self._nodes: list[AtenNode] = []
        self._sources: list[int | None] = []
        self._at = [Ref(position) for position in range(len(graph.inputs))]  # of the original graph -> of the new one
        self._inserted: dict[tuple[Any, ...], Ref] = {}
        self._items = _items_read(graph)
        self._where = self._for = ""

    def result(self, fields: tuple[str, ...]) -> Made:
        """The graph that the run made for these key fields."""
        outputs = tuple(self._outputs())
        made = replace(self._graph, nodes=tuple(self._nodes), outputs=outputs, insertions=tuple(self.insertions))
        return Made(made, tuple(self._sources), fields)

    def _outputs(self) -> tuple[Ref | Size | None, ...]:
        return tuple(self._at[output.index] if isinstance(output, Ref) else output for output in self._graph.outputs)

    def _walk(self) -> None:
        for position, node in enumerate(self._graph.nodes):
            arguments = tuple((name, self._moved(argument)) for name, argument in node.arguments)
            moved = replace(node, arguments=arguments)
            self._at.append(self._repaired(position, moved))

    def _moved(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self._at[argument.index]
        return tuple(map(self._moved, argument)) if isinstance(argument, tuple) else argument

    # --- one node

    def _repaired(self, position: int, node: AtenNode) -> Ref:
        """Add a node, with repairs if its rule accepts them; returns its value."""
        if position not in self._can_change or node.writes or node.bases or node.op == GETITEM:
            return self._strict(node, position)
        self._where, self._for = node.where, self._can_change[position].replace("::", ".")
        read = self._items.get(len(self._at), frozenset())
        for repair in self._repairs(node.op):
            before = len(self._values), len(self._nodes), len(self.insertions)
            try:
                ref = repair(Operands(self, node, read))
                if not self._refused(range(before[0], ref.index + 1), read):
                    assert ref.index == len(self._values) - 1, "a repair ends with its result"
                    self._sources[-1] = position
                    return ref
            except NotMade:
                pass
            self._take_back(*before)  # guard: made_refusals_are_taken_back
        return self._strict(node, position)

    def _strict(self, node: AtenNode, source: int | None, *, is_repaired: bool = False) -> Ref:
        """Add a node; what its rule says of padding under assumptions is not relied on, unless it was repaired."""
        before, self._assumptions = self._assumptions, set()
        ref = self._add(node)
        new, self._assumptions = self._assumptions, before | self._assumptions
        value = self._values[ref.index]
        if isinstance(value, PaddedValue) and ALL_FINITE in new:
            known = value.pads if is_repaired else {}  # guard: made_without_assumptions
            # guard: made_rows_of_nan
            self._values[ref.index] = value.with_pads(known | dict.fromkeys(value.rows, Approximate.NOT_FINITE))
        self._nodes.append(node)
        self._sources.append(source)
        return ref

    def added(self, node: AtenNode, *, is_repaired: bool = True) -> Ref:
        """Add a node that a repair puts in the place of another."""
        return self._strict(node, None, is_repaired=is_repaired)

    def inserted(self, what: str, size: Size, shape: TensorShape) -> None:
        """Record a repair of the operator at hand, for a padded size, which makes a tensor of this shape."""
        self.insertions.append(Insertion(self._for, self._where, what, size, shape.sizes, shape.dtype.itemsize))

    def _take_back(self, values: int, nodes: int, insertions: int) -> None:
        """Remove all but so many."""
        del self._values[values:], self._depends[values:]
        del self._nodes[nodes:], self._sources[nodes:], self.insertions[insertions:]
        self._inserted = {key: ref for key, ref in self._inserted.items() if ref.index < values}

    def _refused(self, added: range, read: frozenset[int]) -> bool:
        """Whether one of these values has findings that its operands lack; results that nothing reads do not count."""
        for index in added:
            node, value = self._nodes[index - len(self._graph.inputs)], self._values[index]
            operands = tensors_of(self._values[at] for at in references(node.arguments))
            known = frozenset[PaddingFinding]().union(*(operand.findings for operand in operands))
            results = [value[at] for at in read] if isinstance(value, tuple) else [value]
            if any(not result.findings <= known for result in tensors_of(results)):
                return True
        return False

    # --- what repairs add

    def call_of(self, node: AtenNode) -> OpCall:
        """A call of a node's operator, for what repairs ask."""
        arguments = {name: self._of(argument) for name, argument in node.arguments}
        return self._call(node.op, arguments, self._renamed(node.result), node.where)

    def value(self, ref: Ref) -> Any:
        """The abstract value at ``ref``."""
        return self._values[ref.index]

    def emit(self, op: str, result: ResultShape, /, **arguments: Any) -> Ref:
        """Add a new node."""
        node = AtenNode(op, tuple(arguments.items()), result, self._where)
        return self._strict(node, None, is_repaired=op.startswith("graphpass::"))

    def cast(self, ref: Ref, dtype: torch.dtype) -> Ref:
        """The value in another type."""
        shape = self.shape_of(ref)
        if shape.dtype is dtype:
            return ref
        return self.emit("prims::convert_element_type", replace(shape, dtype=dtype), a=ref, dtype=dtype)

    def filled(self, ref: Ref, places: Sequence[Place], fill: Fill) -> Ref:
        """The value with ``fill`` in the padding at ``places``."""
        value = self._values[ref.index]
        held = held_after(fill, value.dtype)
        has_no_corners = len(places) < 2 or value.constant is not None
        for place in places:
            value = self._values[ref.index]
            if not _is_same(value.pad_at(place), held) or not (has_no_corners or place in value.whole):
                ref = self._filled(ref, place, fill)
        return ref

    def _filled(self, ref: Ref, place: Place, fill: Fill) -> Ref:
        key = (ref, place, type(fill), fill)
        if key in self._inserted:
            return self._inserted[key]
        value: PaddedValue = self._values[ref.index]
        (dim, at), shape = place, self.shape_of(ref)
        of_dim = value.factors[dim]
        need(is_computed(of_dim[at]) and is_computed(product(of_dim[at + 1 :])))
        made = self._before_expansion(ref, place, fill)
        if made is None:
            made = self.emit(
                NEUTRAL,
                shape,
                self=ref,
                dim=dim,
                size=of_dim[at],
                inner=product(of_dim[at + 1 :]),
                is_outermost=at == 0,
                fill=fill,
            )
            self.inserted(f"{fill} in the padding of dimension {dim}", of_dim[at], shape)
        self._inserted[key] = made
        return made

    def _before_expansion(self, ref: Ref, place: Place, fill: Fill) -> Ref | None:
        """The same, of a tensor before it is expanded along other dimensions; None if it is not expanded."""
        at = ref.index - len(self._graph.inputs)
        if at < 0 or self._nodes[at].op not in ("aten::expand", "aten::expand.default"):
            return None
        node, (dim, factor) = self._nodes[at], place
        source = dict(node.arguments)["self"]
        if not isinstance(source, Ref):
            return None
        value, expanded = self._values[source.index], self._values[ref.index]
        own = dim - (expanded.rank - value.rank)
        if own < 0 or value.factors[own] != expanded.factors[dim]:
            return None
        filled = self._filled(source, (own, factor), fill)
        arguments = tuple((name, filled if name == "self" else argument) for name, argument in node.arguments)
        return self._strict(replace(node, arguments=arguments), None, is_repaired=True)

    def places(self, ref: Ref, dims: Sequence[int] | None = None) -> list[Place]:
        """The places of the padded factors of a value, within ``dims``."""
        return self._sizes.places(self._values[ref.index], dims)

    def shape_of(self, ref: Ref) -> TensorShape:
        """The shape of a value, in the graph's own sizes."""
        value = self._values[ref.index]
        return TensorShape(tuple(product(of_dim) for of_dim in value.factors), value.dtype)

    def counted(self, ref: Ref, size: Size, *, wraps: bool, is_longer: bool = False) -> Ref:
        """An index as it counts in the real size of a dimension.

        In its padding it is 0, or with ``is_longer`` the index behind the last entry, for operators that write.
        ``wraps`` says whether negative indices count from the end; otherwise the operator refuses them.
        """
        value: PaddedValue = self._values[ref.index]
        need(is_computed(size) and value.dtype in (torch.int32, torch.int64))
        key = (ref, "counted", size, wraps, is_longer)
        if key not in self._inserted:
            shape = self.shape_of(ref)
            self._inserted[key] = self.emit(REAL_INDEX, shape, self=ref, size=size, wraps=wraps, is_longer=is_longer)
            self.inserted(f"indices that count in the real {size}", size, shape)
        made = self._inserted[key]
        fill = sympy.sympify(size) if is_longer else 0
        return self.filled(made, self._sizes.places(self._values[made.index]), fill)

    def real(self, size: Size, shape: TensorShape, counted: Size | None = None) -> Ref:
        """The real value of an expression over sizes, for each entry of a tensor.

        ``counted`` is the size of the dimension that the entries index, if they do; then padding is 0, which exists.
        """
        need(is_computed(size))
        key = ("real", size, shape, counted)
        if key not in self._inserted:
            self._inserted[key] = self.emit(REAL_SIZE, shape, size=size, counted=counted)
        made = self._inserted[key]
        places = self._sizes.places(self._values[made.index])
        return made if counted is None else self.filled(made, places, 0)  # guard: made_places_exist

    def picked(self, ref: Ref, dim: int, places: Sequence[Size], lengths: Sequence[Size]) -> Ref:
        """The entries at ``places`` in as many dimensions from ``dim`` on, which are now dimensions of ``lengths``.

        A place is an expression over real sizes and the indices in the new dimensions.
        """
        of_dims = self._values[ref.index].factors[dim : dim + len(places)]
        shape = TensorShape(tuple(lengths), torch.int64)
        need(all(is_computed(product(of_dim)) for of_dim in of_dims))
        indices = [self.real(place, shape, product(of)) for place, of in zip(places, of_dims, strict=True)]
        sizes, dtype = self.shape_of(ref).sizes, self.shape_of(ref).dtype
        result = TensorShape((*sizes[:dim], *lengths, *sizes[dim + len(places) :]), dtype)
        padded = next((size for of_dim in of_dims for size in of_dim if self._sizes.padded(size)), lengths[0])
        self.inserted(f"the real places in dimension {dim}", padded, replace(shape, sizes=tuple(lengths)))
        return self.emit("aten::index.Tensor", result, self=ref, indices=(*[None] * dim, *indices))


def is_computed(size: Size) -> bool:
    """Whether the real value of an expression can be computed from the real sizes of its symbols."""
    if isinstance(size, int):
        return True
    if isinstance(size, sympy.Pow):
        return is_computed(size.args[0]) and isinstance(size.args[1], sympy.Integer) and size.args[1] > 0
    return type(size).__name__ in _COMPUTED and all(map(is_computed, size.args))


def _is_same(pad: object, fill: object) -> bool:
    return is_number(pad) and is_number(fill) and pad == fill  # type: ignore[arg-type]


def base_name(op: str) -> str:
    """The name of an operator of torch or of ours without its overload; empty for any other."""
    return op.partition("::")[2].partition(".")[0] if op.startswith(("aten::", "prims::", "graphpass::")) else ""


def _items_read(graph: AtenGraph) -> dict[int, frozenset[int]]:
    """Which results of nodes with several results are read: {value: positions}."""
    read: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == GETITEM:
            of, at = node.arguments[0][1], node.arguments[1][1]
            read[of.index] = read.get(of.index, frozenset()) | {at}
    return read


class Operands:
    """The operands of one node, of which these results are read; repairs replace them."""

    def __init__(self, making: Making, node: AtenNode, read: frozenset[int]) -> None:
        self.making, self.node, self.read = making, node, read
        self.call = making.call_of(node)

    @property
    def shape(self) -> TensorShape:
        """The shape of the one result."""
        need(isinstance(self.node.result, TensorShape))
        return self.call.shape

    def ref(self, *path: Any) -> Ref:
        """The tensor at a path as it stands in the node."""
        found = dict(self.node.arguments).get(path[0])
        found = found[path[1]] if len(path) == 2 and isinstance(found, tuple) else found
        if not isinstance(found, Ref):
            raise NotMade
        return found

    def real_size(self, name: str, dtype: torch.dtype) -> Ref:
        """The real value of the argument that is a size."""
        number = self.call.argument(name)
        if not isinstance(number, sympy.Expr):
            raise NotMade
        shape = TensorShape((), dtype)
        made = self.making.real(number, shape)
        self.making.inserted("the real size as a number", number, shape)
        return made

    def replaced(self, path: ArgumentPath, ref: Ref) -> None:
        """Put a value in the place of an argument."""
        name, at = path[0], path[1] if len(path) == 2 else None
        arguments = dict(self.node.arguments)
        arguments[name] = (
            ref if at is None else tuple(ref if position == at else one for position, one in enumerate(arguments[name]))
        )
        self.node = replace(self.node, arguments=tuple(arguments.items()))
        self.call = self.making.call_of(self.node)

    def filled(self, path: ArgumentPath, places: Sequence[Place], fill: Fill) -> None:
        """Fill the padding of an operand at some places."""
        if places:
            self.replaced(path, self.making.filled(self.ref(*path), places, fill))

    def fill(self) -> None:
        """Fill the padding of operands as the operator's rule wants it."""
        rule = rule_for(self.node.op)
        if rule in FILLING:
            fills: Any = lambda name, places, fill: self.filled((name,), places, fill)  # noqa: E731
            with contextlib.suppress(Unknown):
                rule(replace(self.call, fills=fills, assumptions=set(), everywhere=set()))
