"""An aten graph as a plain record: proofs need no graph module, and equal regions share one record.

The interpreter reads :class:`AtenNode` alone. This file makes them from a graph of AOTAutograd: operators without a
rule are recorded as the operators they consist of, and a few that a compiler decomposed are recognised.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import fx

from graphpass.compat import operators, symbolic, trees
from graphpass.compat.nnmodules import where_of
from graphpass.padding.fused import PARTS, REPAIRED, bags_of_rows
from graphpass.padding.indexing import BAGS, checks_numbers
from graphpass.padding.sizes import as_size, is_zero_size, product, quotient
from graphpass.padding.table import rule_for
from graphpass.padding.values import ResultShape, Size, TensorShape

GETITEM = "getitem"
NUMBER = "number"
CONSTANT = "constant"
RESULTS = "results"
"""The results of an operator that has several, each by itself; None for one that is not read."""

_PERMUTE, _VIEW = torch.ops.aten.permute.default, torch.ops.aten.view.default


@dataclass(frozen=True, slots=True)
class Ref:
    """An earlier value of the graph by its index: the inputs come first, then the nodes in order."""

    index: int


@dataclass(frozen=True, slots=True)
class AtenNode:
    """One operator of the graph."""

    op: str  #: the qualified name, ``aten::add.Tensor``; or ``getitem``, ``results``, ``number`` or ``constant``
    #: (schema name, argument) pairs, defaults included; tensors are :class:`Ref`, symbolic sizes are expressions.
    arguments: tuple[tuple[str, Any], ...]
    result: ResultShape  #: the shape of the result
    where: str = ""  #: the line of the user's code
    writes: tuple[str, ...] = ()  #: schema names of the arguments that the operator writes to
    has_token: bool = False  #: the operator is ordered with other effects, and its first result is a token
    #: For an op inside ``auto_functionalized``, the schema names of the written tensors, in the order in which their
    #: new values follow the results.
    bases: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Insertion:
    """One repair, for reports."""

    op: str  #: the operator that needed it
    where: str  #: the line of the user's code
    what: str  #: ``0 in dimension 1``
    size: Size  #: the padded size
    sizes: tuple[Size, ...]  #: of the tensor that it makes
    itemsize: int  #: bytes of an entry


@dataclass(frozen=True, slots=True)
class AtenGraph:
    """A graph of aten operators with symbolic sizes."""

    #: For each placeholder the shape of a tensor, the expression of a number, else None.
    inputs: tuple[TensorShape | Size | None, ...]
    input_names: tuple[str, ...]  #: the names of the placeholders
    nodes: tuple[AtenNode, ...]  #: the operators, in order
    outputs: tuple[Ref | Size | None, ...]  #: for each flat output a :class:`Ref`, a number, or None
    symbols: tuple[sympy.Symbol, ...]  #: the symbols of the inputs in order of first occurrence
    insertions: tuple[Insertion, ...] = ()  #: the repairs in it, where its padding is made
    #: (input, number): what fills the padding of inputs, where that makes repairs unnecessary
    fills: tuple[tuple[int, float | int | bool], ...] = ()

    @staticmethod
    def of(graph_module: fx.GraphModule) -> AtenGraph:
        """The record of a graph from AOTAutograd, whose nodes have their fake values in ``meta["val"]``."""
        return _Reader(graph_module).read()

    @staticmethod
    def as_decomposed(
        graph_module: fx.GraphModule, decompositions: Mapping[Any, Callable[..., Any]]
    ) -> tuple[AtenGraph, dict[int, fx.Node]]:
        """The record without whole softmaxes in place of their parts; {position of a node in it: what it records}.

        Several positions of one node are its parts. The last of them stands for it. ``decompositions`` are those of the
        graph's compiler, by which parts are divided, too.
        """
        reader = _Reader(graph_module, decompositions)
        return reader.read(), reader.recorded


def references(argument: Any) -> Iterator[int]:
    """The indices of the earlier values in ``argument``, also those nested in tuples."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)


_PLAIN = (Ref, bool, int, float, complex, str, sympy.Basic, torch.dtype, torch.layout, torch.memory_format)


class _Reader:
    """Reads one graph module, node by node."""

    def __init__(
        self, graph_module: fx.GraphModule, decompositions: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        self._module, self._decompositions = graph_module, decompositions or {}
        self._composed = PARTS if decompositions is None else {**PARTS, **REPAIRED}
        always = (_cut_padding, _comparison)
        self._patterns = (_softmax, *always) if decompositions is None else always
        self.recorded: dict[int, fx.Node] = {}
        self._at: dict[fx.Node, Any] = {}
        self._nodes: list[AtenNode] = []
        self._inputs: tuple[Any, ...] = ()
        # Sizes of the padded run satisfy the guards, too. Two symbols stay two: calls where they differ are possible.
        env: Any = symbolic.shape_env_of(node.meta["val"] for node in graph_module.graph.nodes if "val" in node.meta)
        self._bounds = functools.cache(functools.partial(symbolic.bounds_of, env))
        # A guard may name a symbol that a later one replaced, of which no input and no key field knows.
        # A fact may name a symbol that another has replaced since, which no size of the graph has.
        facts = [_by_length(env.replace(fact)) for fact in symbolic.facts_of(env)]  # guard: proof_symbols_of_facts
        self._equal = {large: small for large, small in facts if isinstance(large, sympy.Expr) and large.args}
        self._taped: dict[int, Any] = {}  # id of a fake tensor -> its Ref
        self._tapes = list[symbolic.DecompositionTape]()  # keeps them alive

    def read(self) -> AtenGraph:
        nodes = list(self._module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for position, node in enumerate(placeholders):
            self._at[node] = Ref(position)
        self._inputs = tuple(self._shape_of(node.meta.get("val")) for node in placeholders)
        outputs: tuple[Any, ...] = ()
        for node in nodes:
            if node.op == "output":
                outputs = tuple(self._plain(output) for output in node.args[0])
            elif node.op != "placeholder":
                before = len(self._nodes)
                self._at[node] = self._decomposed(node) or self._added(self._node(node))
                self.recorded.update(dict.fromkeys(range(before, len(self._nodes)), node))
        shapes = tuple(s if isinstance(s, (TensorShape, int, sympy.Basic)) else None for s in self._inputs)
        names = tuple(str(node.name) for node in placeholders)
        sizes = [size for shape in shapes for size in (shape.sizes if isinstance(shape, TensorShape) else (shape,))]
        known = [sorted(size.free_symbols, key=str) for size in sizes if isinstance(size, sympy.Basic)]
        symbols: Any = tuple(dict.fromkeys(itertools.chain.from_iterable(known)))
        return AtenGraph(shapes, names, tuple(self._nodes), outputs, symbols)

    def _added(self, node: AtenNode) -> Ref:
        self._nodes.extend(next(filter(None, (pattern(node, self) for pattern in self._patterns)), (node,)))
        return Ref(self.next.index - 1)

    @property
    def next(self) -> Ref:
        """The value of the node that will be recorded next."""
        return Ref(len(self._inputs) + len(self._nodes))

    def arguments_of(self, value: Any, op: str) -> dict[str, Any]:
        """The arguments of the node that computed ``value``; none if its operator is not ``op``."""
        at = value.index - len(self._inputs) if isinstance(value, Ref) else -1
        return dict(self._nodes[at].arguments) if at >= 0 and self._nodes[at].op == op else {}

    def number(self, value: Any) -> Any:
        """A number, or what an earlier value is: the shape of a tensor, a size."""
        if not isinstance(value, Ref):
            return value
        at = value.index - len(self._inputs)
        return self._nodes[at].result if at >= 0 else self._inputs[value.index]

    def shape_at(self, value: Any) -> TensorShape | None:
        """The shape of an earlier value; None if it is no tensor."""
        shape = self.number(value)
        return shape if isinstance(shape, TensorShape) else None

    def _decomposed(self, node: fx.Node) -> Ref | None:
        """The result of an operator of the graph recorded as the operators that it consists of; None if it is not."""
        function = self._parts_of(node.target) if isinstance(node.target, operators.OpOverload) else None
        function = bags_of_rows if self._has_bags_of_rows(node) else function
        if function is None:
            return None
        self._taped.update({id(one.meta.get("val")): self._at[one] for one in node.all_input_nodes})
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
        return self._of_parts(function, args, kwargs, node.meta.get("val"), where_of(node.meta.get("stack_trace")))

    def _has_bags_of_rows(self, node: fx.Node) -> bool:
        """Whether bags begin at 0, L, 2 * L, ... of their ids, so that each is a row of [bags, L]."""
        if not isinstance(node.target, operators.OpOverload) or node.target.name().removeprefix("aten::") not in BAGS:
            return False
        arguments = dict(self._of_operator(node.target, node.args, node.kwargs, None, "").arguments)
        counted = self.arguments_of(arguments["offsets"], "aten::arange.start_step")
        counted = counted or self.arguments_of(arguments["offsets"], "prims::iota")
        ids, offsets = (self.shape_at(arguments[name]) for name in ("indices", "offsets"))
        if not counted or counted["start"] != 0 or arguments["include_last_offset"] or not ids or not offsets:
            return False
        step = quotient(product(ids.sizes), offsets.sizes[0])
        return step == self.number(counted["step"]) and all(user.args[1:] == (0,) for user in node.users)

    def _parts_of(self, op: operators.OpOverload) -> Callable[..., Any] | None:
        """What an operator consists of; None if it stays whole."""
        return self._composed.get(op.name()) or (symbolic.decomposition_of(op) if _is_composed(op) else None)

    def _of_parts(self, function: Any, args: Any, kwargs: Any, result: Any, where: str) -> Ref | None:
        """The result of a call with fake tensors, recorded in parts; None if it has none, or if one writes."""
        tape = symbolic.decomposition_tape(function, args, kwargs) if function and trees.tensors(result) else None
        given = trees.tensors((args, kwargs))
        if tape is None or not tape.read() <= set(map(id, (*given, *trees.tensors([call[-1] for call in tape.calls])))):
            return None
        self._tapes.append(tape)
        before, read = len(self._nodes), tape.read()
        for called, args, kwargs, part in tape.calls:
            function = self._decompositions.get(called) or self._parts_of(called)
            ref = self._of_parts(function, args, kwargs, part, where)
            if ref is None and operators.schema_of(called).is_mutable:
                del self._nodes[before:]
                return None
            ref = ref or self._called(called, args, kwargs, part, where)
            self._taped[id(part)] = ref
            for at, one in enumerate(part if isinstance(part, (list, tuple)) else ()):
                if id(one) in read:
                    item = AtenNode(GETITEM, (("of", ref), ("at", at)), self._shape_of(one), where)
                    self._taped[id(one)] = self._added(item)
        found, shape = self._plain(tape.result), self._shape_of(result)
        if isinstance(found, Ref):
            is_last = found.index == self.next.index - 1
            return found if is_last else self._added(AtenNode("aten::alias", (("self", found),), shape, where))
        return self._added(AtenNode(RESULTS, (("results", found),), shape, where))

    def _called(self, op: Any, args: Any, kwargs: Any, result: Any, where: str) -> Ref:
        if op is torch.ops.aten.as_strided.default and (view := self._restrided(args, result, where)) is not None:
            return self._added(view)
        return self._added(self._of_operator(op, args, kwargs, self._shape_of(result), where))

    def _plain(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._at[argument]
        if isinstance(argument, torch.Tensor):
            return self._taped[id(argument)]
        if isinstance(argument, (list, tuple)):
            return tuple(self._plain(part) for part in argument)
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(argument)
        return argument if argument is None or isinstance(argument, _PLAIN) else str(argument)

    def _node(self, node: fx.Node) -> AtenNode:
        where = where_of(node.meta.get("stack_trace"))
        result = self._shape_of(node.meta.get("val"))
        target = node.target
        if node.op == "get_attr":
            value = operator.attrgetter(str(target))(self._module)
            return AtenNode(CONSTANT, (), self._shape_of(value), where)
        if target is operator.getitem:
            return AtenNode(GETITEM, (("of", self._plain(node.args[0])), ("at", node.args[1])), result, where)
        if target is torch.ops.aten.as_strided.default:
            source: Any = node.args[0]
            self._taped[id(source.meta["val"])] = self._at[source]
            restrided = self._restrided((source.meta["val"], node.args[1]), node.meta["val"], where)
            if restrided is not None:
                return restrided
        if isinstance(target, operators.OpOverload):
            return self._of_operator(target, node.args, node.kwargs, result, where)
        if operators.is_higher_order(target):
            return self._of_higher_order(node, result, where)
        is_number = isinstance(result, (int, sympy.Expr, sympy.Basic, float))
        return AtenNode(NUMBER if is_number else str(target), self._positional(node), result, where)

    def _restrided(self, args: Sequence[Any], result: torch.Tensor, where: str) -> AtenNode | None:
        """An ``as_strided`` as a view, if its entries are those of the whole tensor in the order of memory."""
        tensor: torch.Tensor = args[0]
        if self._size(tensor.storage_offset()) != self._size(result.storage_offset()):
            return None
        value, before, after = self._plain(tensor), self._strided(tensor), self._strided(result)

        def moved(op: Any, value: Ref, argument: Sequence[Any], sizes: Iterable[Size]) -> Ref:
            shape = TensorShape(tuple(sizes), tensor.dtype)
            return self._added(self._of_operator(op, (value, argument), {}, shape, where))

        if list(before.values()) != list(after.values()):
            of_tensor, of_result = _memory_order(before), _memory_order(after)
            whole, parts = ([size for size, _ in layout.values()] for layout in (of_tensor, of_result))
            if len(whole) != len(before) or len(parts) != len(after) or quotient(_count(whole), _count(parts)) != 1:
                return None
            ones = [dim for dim in range(tensor.dim()) if dim not in before]
            value = moved(_PERMUTE, value, [*of_tensor, *ones], [*whole, *(1 for _ in ones)])
            value = moved(_VIEW, value, parts, parts)
            value = moved(_PERMUTE, value, [[*of_result].index(dim) for dim in after], (s for s, _ in after.values()))
        return self._of_operator(_VIEW, (value, args[1]), {}, self._shape_of(result), where)

    def _strided(self, tensor: torch.Tensor) -> dict[int, tuple[Size, Size]]:
        """{dimension: (size, stride)} of the dimensions of other sizes than 1."""
        layout = zip(map(self._size, tensor.shape), map(self._size, tensor.stride()), strict=True)
        return {dim: of_dim for dim, of_dim in enumerate(layout) if of_dim[0] != 1}

    def _size(self, value: Any) -> Size:
        """A symbolic number as a size, with each size that the guards know in two forms in its shorter one."""
        size = as_size(symbolic.expression_of(value))
        size = as_size(size.xreplace(self._equal)) if isinstance(size, sympy.Basic) and self._equal else size
        return self._signed(size) if isinstance(size, sympy.Basic) and size.atoms(Application) else size

    def _signed(self, size: sympy.Basic) -> Size:
        """``size`` as it is where the symbols that the guards bound by 1 or more are positive."""
        size = size.replace(_is_largest, self._large)
        bounds = ((symbol, self._bounds(symbol)[0]) for symbol in size.free_symbols)
        return _where_positive(size, frozenset(symbol for symbol, least in bounds if least and least > 0))

    def _large(self, largest: Any) -> Any:
        """``Max(1, a)`` is ``a`` where the guards bound that by 1 or more."""
        parts = [part for part in largest.args if part != 1]
        least = self._bounds(parts[0])[0] if len(parts) == 1 else None
        return parts[0] if least is not None and least >= 1 else largest  # guard: made_largest

    def _shape_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorShape(tuple(map(self._size, value.shape)), value.dtype)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._shape_of, value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        return value if isinstance(value, (int, float)) else None

    def _positional(self, node: fx.Node) -> tuple[tuple[str, Any], ...]:
        named = [(str(position), self._plain(argument)) for position, argument in enumerate(node.args)]
        return (*named, *((name, self._plain(argument)) for name, argument in node.kwargs.items()))

    def _of_operator(
        self, op: operators.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, where: str
    ) -> AtenNode:
        schema = operators.schema_of(op)
        bound = []
        for position, argument in enumerate(schema.arguments):
            if position < len(args) and not argument.kwarg_only:
                value = args[position]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                value = argument.default_value
            bound.append((argument.name, self._plain(value)))
        return AtenNode(op.name(), tuple(bound), result, where, _written_by(schema))

    def _of_higher_order(self, node: fx.Node, result: Any, where: str) -> AtenNode:
        name = str(getattr(node.target, "__name__", node.target))
        inner = next((argument for argument in node.args if isinstance(argument, operators.OpOverload)), None)
        if name == "with_effects" and inner is not None and isinstance(result, tuple):
            rest = result[1:] if len(result) != 2 else result[1]
            return replace(self._of_operator(inner, node.args[2:], node.kwargs, rest, where), has_token=True)
        # guard: proof_out_dtype
        if name == "out_dtype" and inner is not None and torch.Tag.pointwise not in inner.tags:
            return self._of_operator(inner, node.args[2:], node.kwargs, result, where)
        if name.startswith("auto_functionalized") and inner is not None:
            functional = self._functionalized(inner, node, result, where)
            if functional is not None:
                return functional
        arguments = self._positional(node)
        if name == "flex_attention":
            mask: Any = node.args[4]
            reads_batch = self._reads_batch(node.args[3], 1) or self._reads_batch(mask[-1], 0)
            arguments = (*arguments, ("reads_batch", reads_batch))
        return AtenNode(f"higher_order::{name}", arguments, result, where)

    def _reads_batch(self, function: Any, position: int) -> bool:
        """Whether a function of ``flex_attention`` reads the number of the batch, which it gets at ``position``."""
        inner = operator.attrgetter(str(function.target))(self._module)
        batch = [node for node in inner.graph.nodes if node.op == "placeholder"][position]
        return any(user.target not in ("new_ones", torch.ops.aten.new_ones.default) for user in batch.users)

    def _functionalized(self, op: operators.OpOverload, node: fx.Node, result: Any, where: str) -> AtenNode | None:
        """The custom op inside ``auto_functionalized``; None if it writes to a view instead of a whole tensor."""
        kwargs: dict[str, Any] = dict(node.kwargs)
        bases: list[str | None]
        every: Any = kwargs.pop("_all_bases", None)
        written = _written_by(operators.schema_of(op))
        if every is None:
            bases = list(written)
        else:
            bases = [None] * len(every)
            for name in written:
                position = kwargs.pop(f"_{name}_base_index", None)
                if not isinstance(position, int) or any(key.startswith(f"_{name}_") for key in kwargs):
                    return None
                bases[position], kwargs[name] = name, every[position]
        return replace(self._of_operator(op, (), kwargs, result, where), bases=tuple(bases))


def _is_composed(op: operators.OpOverload) -> bool:
    """Whether the record of an operator without a rule should be that of its parts."""
    return rule_for(op.name()) is None and not checks_numbers(op.name().partition("::")[2].partition(".")[0])


def _memory_order(layout: Mapping[int, tuple[Size, Size]]) -> dict[int, tuple[Size, Size]]:
    """The dimensions from the outermost in memory to the innermost; not all, if entries lie apart or are shared."""
    left, order, stride = dict(layout), list[int](), as_size(1)
    while dim := [dim for dim, (_, of_dim) in left.items() if quotient(of_dim, stride) == 1][:1]:
        order += dim
        stride = product((stride, left.pop(dim[0])[0]))
    return {dim: layout[dim] for dim in reversed(order)}


def _count(sizes: Sequence[Size]) -> Size:
    return product(tuple(sizes))


@functools.lru_cache(maxsize=8192)  # the layers of a model have the same sizes
def _where_positive(size: sympy.Basic, symbols: frozenset[sympy.Symbol]) -> Size:
    positive = {symbol: sympy.Dummy(positive=True, integer=True) for symbol in symbols}
    known = size.xreplace(positive).replace(_is_rounded, _unrounded)
    known = known.replace(_is_sum, _in_steps).replace(_is_quotient, _whole)
    return as_size(sympy.sympify(known).xreplace({dummy: symbol for symbol, dummy in positive.items()}))


def size_of(value: Any) -> Size | None:
    """A number of a fake tensor's as a size, written as in the record of a graph; None if it is no number."""
    size = symbolic.expression_of(value)
    symbols = frozenset(symbol for symbol in getattr(size, "free_symbols", ()) if symbol.is_positive)
    # guard: proof_sizes_of_inputs
    return _where_positive(size, symbols) if isinstance(size, sympy.Basic) else size


def _is_quotient(size: Any) -> bool:
    return type(size).__name__ == "FloorDiv"


def _is_largest(size: Any) -> bool:
    return type(size).__name__ == "Max"


def _is_sum(size: Any) -> bool:
    return isinstance(size, sympy.Add)


def _is_rounded(size: Any) -> bool:
    return type(size).__name__ in ("CeilToInt", "FloorToInt", "TruncToInt")


def _unrounded(rounded: Any) -> Any:
    """The number of steps of one, which torch 2.15 counts in floats: exact for sizes."""

    def exact(number: Any) -> Any:
        name, parts = type(number).__name__, number.args
        if name == "ToFloat" or number.is_Integer:
            return parts[0] if parts else number
        if name in ("Add", "Mul"):
            return number.func(*map(exact, parts))
        if name == "FloatTrueDiv" and parts[1].is_number and abs(float(parts[1])) == 1:
            return exact(parts[0]) * int(parts[1])  # guard: made_steps_in_floats
        return sympy.nan

    found = exact(rounded.args[0])
    return rounded if found.has(sympy.nan) else found


def _in_steps(total: Any) -> Any:
    """``n + (-n) % k`` is the least multiple of k that is not less than n."""
    for part in total.args:
        _, step = part.args if type(part).__name__ in ("Mod", "PythonMod") else (0, sympy.S.Zero)
        # guard: made_multiples
        if step.is_positive and is_zero_size(total - part + part.args[0]):
            return step * symbolic.floor_div(total - part + step - 1, step)
    return total


def _whole(floored: Any) -> Any:
    """``(a * b) // b`` is ``a``, and so is ``(a * b + b - 1) // b``, the number of steps of b below a * b.

    Others get a rest from 0 to b - 1, so that ``(a - 1) // 2 + 1`` and ``(a + 1) // 2`` are one size.
    """
    total, divisor = floored.args
    rest = total.as_coeff_Add()[0]
    if rest.is_Integer and divisor.is_Integer and divisor > 0 and not 0 <= rest < divisor:
        # guard: made_quotients
        return _whole(symbolic.floor_div(total - rest + rest % divisor, divisor)) + rest // divisor
    found = [(quotient(as_size(total + rest), as_size(divisor)), rest) for rest in (0, 1) if divisor.is_positive]
    return next((steps - rest for steps, rest in found if steps is not None), floored)


def _written_by(schema: Any) -> tuple[str, ...]:
    return tuple(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _by_length(fact: sympy.Basic) -> tuple[Any, Any]:
    """The two sides of an equation of sizes, the longer one first; (fact, fact) for any other fact."""
    sides = fact.args if isinstance(fact, sympy.Eq) else (fact, fact)
    first, second = sorted(sides, key=lambda side: (-sympy.count_ops(side), str(side)))
    return first, second


# --- operators that a compiler decomposed, where padding can be proved for the whole operator only


# Each pattern returns the nodes to record for ``node``, which follows ``earlier`` ones; none if it does not apply.


def _softmax(node: AtenNode, earlier: _Reader) -> tuple[AtenNode, ...]:
    """``e / e.sum(dim)`` for ``e = exp(x - x.amax(dim))``, or the logarithm of it as a difference."""
    if node.op not in ("aten::div.Tensor", "aten::sub.Tensor"):
        return ()
    arguments, is_log = dict(node.arguments), node.op == "aten::sub.Tensor"
    total = arguments["other"]
    if is_log:
        total = earlier.arguments_of(total, "aten::log").get("self") if arguments["alpha"] == 1 else None
    summed = earlier.arguments_of(total, "aten::sum.dim_IntList")
    powers = earlier.arguments_of(summed.get("self"), "aten::exp")
    shifted = earlier.arguments_of(powers.get("self"), "aten::sub.Tensor")
    greatest = earlier.arguments_of(shifted.get("other"), "aten::amax")
    if not greatest or arguments["self"] != (powers if is_log else summed)["self"]:
        return ()
    same = greatest["self"] == shifted["self"] and shifted["alpha"] == 1 and greatest["dim"] == summed["dim"]
    if not same or len(summed["dim"]) != 1 or not (greatest["keepdim"] is summed["keepdim"] is True):
        return ()
    op = "aten::_log_softmax" if is_log else "aten::_softmax"
    scores = (("self", shifted["self"]), ("dim", summed["dim"][0]), ("half_to_float", False))
    return (replace(node, op=op, arguments=scores),)


def _cut_padding(node: AtenNode, earlier: _Reader) -> tuple[AtenNode, ...]:
    """A tensor extended at its end and cut to its old size, as for the alignment of an attention mask, is unchanged."""
    if node.op != "aten::slice.Tensor" or not isinstance(node.result, TensorShape):
        return ()
    arguments = dict(node.arguments)
    extended = earlier.arguments_of(arguments["self"], "aten::constant_pad_nd")
    before = earlier.shape_at(extended.get("self"))
    if before is None or arguments["start"] not in (0, None) or arguments["step"] != 1:
        return ()
    at_front = extended["pad"][::2]
    if any(amount != 0 for amount in at_front) or before.sizes != node.result.sizes:
        return ()
    dim = arguments["dim"] % len(before.sizes)
    others = (right for turn, right in enumerate(extended["pad"][1::2]) if len(before.sizes) - 1 - turn != dim)
    unchanged = replace(node, op="aten::alias", arguments=(("self", extended["self"]),))
    return (unchanged,) if all(right == 0 for right in others) else ()


def _comparison(node: AtenNode, earlier: _Reader) -> tuple[AtenNode, ...]:
    """``i - j <= k`` over integers becomes ``i <= j + k``: a comparison of indices, as in a decomposed triangle."""
    if node.op not in _COMPARISONS:
        return ()
    arguments = dict(node.arguments)
    difference, number = earlier.arguments_of(arguments["self"], "aten::sub.Tensor"), arguments["other"]
    if difference.get("alpha") != 1 or type(number) is not int:
        return ()
    sides = earlier.shape_at(difference["self"]), earlier.shape_at(difference["other"])
    if any(side is None or side.dtype not in (torch.int32, torch.int64) for side in sides):
        return ()
    raised = AtenNode(
        "aten::add.Tensor", (("self", difference["other"]), ("other", number), ("alpha", 1)), sides[1], node.where
    )
    compared = (("self", difference["self"]), ("other", earlier.next))
    return raised, replace(node, op=node.op.replace("Scalar", "Tensor"), arguments=compared)


_COMPARISONS = frozenset(f"aten::{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
