"""Writes the repairs of a graph into it, as operators of torch over the real sizes of the call."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from graphpass.compat import operators, symbolic
from graphpass.padding.combining import greatest, lowest
from graphpass.padding.indexing import WRITES
from graphpass.padding.making import Made, base_name
from graphpass.padding.neutral import INDEX, KEYS, NEUTRAL, REAL_INDEX, REAL_ORDER, REAL_SIZE
from graphpass.padding.program import GETITEM, RESULTS, AtenGraph, AtenNode, Ref, references
from graphpass.padding.values import Size, operator_named

aten, prims = torch.ops.aten, torch.ops.prims
_FLASH_ROWS, _EFFICIENT_ROWS = map(
    operator_named, ("aten::_flash_attention_forward", "aten::_efficient_attention_forward")
)
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def write(
    graph_module: fx.GraphModule,
    original: AtenGraph,
    recorded: Mapping[int, fx.Node],
    made: Made,
    real_sizes: tuple[fx.Node, Mapping[sympy.Symbol, int]],
) -> None:
    """Change a graph in place.

    Args:
        graph_module: the graph.
        original: its record.
        recorded: {position of a node in the record: the graph's node}.
        made: the record with repairs.
        real_sizes: the placeholder of the real sizes, int32, and {symbol: its entry}.
    """
    fake_mode: Any = symbolic.fake_mode_of([symbolic.example_value(node) for node in _placeholders(graph_module)])
    with symbolic.quiet_shapes(fake_mode), symbolic.python_dispatcher(), fake_mode, torch.no_grad():
        _Writer(graph_module, recorded, real_sizes).run(original, made)
    graph_module.graph.lint()
    graph_module.recompile()


def _placeholders(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.find_nodes(op="placeholder"))


def _dims_with_one_more(node: AtenNode, graph: AtenGraph) -> list[int]:
    """The dimensions along which a node writes by an index that names the entry behind the last."""
    if base_name(node.op) not in WRITES:
        return []
    arguments = dict(node.arguments)
    dim, listed = arguments.get("dim"), arguments.get("indices", (arguments.get("index"),))
    along = enumerate(listed) if dim is None else [(dim, listed[0])]
    return [at for at, index in along if isinstance(index, Ref) and _is_behind(graph, index)]


def _is_behind(graph: AtenGraph, index: Ref) -> bool:
    at = index.index - len(graph.inputs)
    return at >= 0 and isinstance(dict(graph.nodes[at].arguments).get("fill"), sympy.Basic)


def _parts(size: sympy.Basic) -> tuple[Any, Any, Sequence[Any]]:
    """How tensors and how numbers are combined in an expression, and its parts, those of a power one by one."""
    name = "Mul" if isinstance(size, sympy.Pow) else type(size).__name__
    parts = [size.args[0]] * int(size.args[1]) if isinstance(size, sympy.Pow) else size.args
    return *_ARITHMETIC[name], parts


_ARITHMETIC: Mapping[str, tuple[Any, Any]] = {
    "Add": (aten.add.Tensor, operator.add),
    "Mul": (aten.mul.Tensor, operator.mul),
    "Max": (aten.maximum.default, torch.sym_max),
    "Min": (aten.minimum.default, torch.sym_min),
    "Abs": (aten.abs.default, operator.abs),
    "FloorDiv": (aten.div.Tensor_mode, operator.floordiv),
    "ToFloat": (prims.convert_element_type.default, torch.sym_float),
    "TruncToInt": (aten.trunc.default, torch.sym_int),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), (aten.div.Tensor, operator.truediv)),
    **dict.fromkeys(("Mod", "PythonMod"), (aten.remainder.Tensor, operator.mod)),
}


_OWN = frozenset((NEUTRAL, REAL_SIZE, RESULTS, GETITEM, REAL_ORDER, REAL_INDEX, KEYS))


class _Writer:
    """The state of one run: the graph's nodes by the values of the record, and numbers that are computed once."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        recorded: Mapping[int, fx.Node],
        real_sizes: tuple[fx.Node, Mapping[sympy.Symbol, int]],
    ) -> None:
        self._graph = graph_module.graph
        self._recorded = recorded
        self._vector, self._entries = real_sizes
        self._device = self._vector.meta["val"].device
        self._values: list[Any] = list(_placeholders(graph_module))
        self._last = _placeholders(graph_module)[-1]  # of the placeholders and what is computed from them alone
        self._before = self._graph.output_node()
        self._real = functools.cache(self._real_value)
        self._along = functools.cache(self._index_along)
        self._padded = functools.cache(self._padded_value)
        self._is_real = functools.cache(self._is_real_index)
        self._starts = functools.cache(self._starts_of)
        self._used = functools.cache(self._real_lengths)
        self._filling = functools.lru_cache(typed=True)(self._number)
        self._where: Mapping[str, Any] = {}
        self._originals: list[fx.Node | None] = []

    def run(self, original: AtenGraph, made: Made) -> None:
        """Write all nodes in order."""
        fronts = self._fronts(made)
        last = {node: at for at, node in self._recorded.items()}
        in_parts = {
            node
            for at, node in self._recorded.items()
            if at != last[node]
            or (isinstance(node.target, operators.OpOverload) and node.target.name() != original.nodes[at].op)
        }
        kept = in_parts - self._changed_inside(original, made, last)  # guard: made_in_parts, made_in_whole
        stands_for = [node if at == last[node] else None for at, node in self._recorded.items()]
        self._originals = [*self._values, *stands_for]
        several = list[fx.Node]()
        for node, source, front in zip(made.graph.nodes, made.sources, fronts, strict=True):
            own = None if source is None else self._recorded[source]
            before = None if source is None or own in in_parts else original.nodes[source]
            if own is not None and (own in kept or (before is not None and self._is_unchanged(node, before))):
                self._values.append(own if source == last[own] else None)
                continue
            value = self._new(node, front, made.graph)
            self._values.append(value)
            if own is None or source is None or source != last[own]:
                continue
            if isinstance(value, fx.Node):
                own.replace_all_uses_with(value)
                self._originals[len(original.inputs) + source] = value
                self._graph.erase_node(own)
            else:
                several.append(own)
        for own in several:
            self._graph.erase_node(own)

    def _new(self, node: AtenNode, front: fx.Node, graph: AtenGraph) -> Any:
        self._before = front
        self._where = {key: one for key, one in front.meta.items() if key in ("stack_trace", "nn_module_stack")}
        return self._of_repair(node) if node.op in _OWN else self._operator(node, _dims_with_one_more(node, graph))

    def _changed_inside(self, original: AtenGraph, made: Made, last: Mapping[fx.Node, int]) -> set[fx.Node | None]:
        """The nodes recorded in parts of which a repair changed one, or reads one that is not the last."""
        first, changed = len(original.inputs), set[fx.Node | None]()
        for node, source in zip(made.graph.nodes, made.sources, strict=True):
            own = None if source is None else self._recorded[source]
            if source is not None and node.op != original.nodes[source].op:
                changed.add(own)
            for read in (made.sources[index - first] for index in references(node.arguments) if index >= first):
                of = None if read is None else self._recorded[read]
                changed.update([own] if of is None else [of] if of is not own and read != last[of] else ())
        return changed

    def _fronts(self, made: Made) -> list[fx.Node]:
        """For each node of the record the graph's node before which it is written."""
        fronts, front = [], self._graph.output_node()
        for source in reversed(made.sources):
            front = self._recorded.get(source, front) if source is not None else front
            fronts.append(front)
        return fronts[::-1]

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            node = self._values[argument.index]
            assert node is not None, "a repair reads what the graph has as a node"
            return node
        if isinstance(argument, tuple):
            return [self._value(part) for part in argument]
        return self._padded(argument) if isinstance(argument, sympy.Basic) else argument

    def _aligned(self, bias: Any) -> fx.Node:
        """A bias whose rows are a multiple of 8 entries apart, as ATen lays it out for its efficient kernel."""
        if bias.target is aten.expand.default:
            return self.call(aten.expand.default, self._aligned(bias.args[0]), bias.args[1])
        keys = self.call(aten.sym_size.int, bias, -1)
        behind = self.call(operator.mod, self.call(operator.neg, keys), 8)
        wide = self.call(aten.constant_pad_nd.default, bias, [0, behind])
        return self.call(aten.slice.Tensor, wide, -1, 0, keys)

    def _is_unchanged(self, node: AtenNode, before: AtenNode) -> bool:
        return node.op == before.op and self._is_same(
            tuple(one for _, one in node.arguments), tuple(one for _, one in before.arguments)
        )

    def _is_same(self, new: Any, old: Any) -> bool:
        """Whether an argument of the new record is what the old record's argument is."""
        if isinstance(new, Ref) and isinstance(old, Ref):
            return self._values[new.index] is self._originals[old.index]
        if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
            return all(map(self._is_same, new, old))
        return type(new) is type(old) and bool(new == old)

    # --- nodes

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write one call before the node at hand."""
        with self._graph.inserting_before(self._before):
            return self._valued(self._graph.call_function(op, args, kwargs))

    def _at_the_start(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call that reads placeholders only, for all users."""
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(op, args, kwargs)
        return self._valued(self._last)

    def _valued(self, node: fx.Node) -> fx.Node:
        plain_args, plain_kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        target: Any = node.target
        node.meta = {**self._where, "val": symbolic.extract_val(target(*plain_args, **plain_kwargs))}
        return node

    def _of_repair(self, node: AtenNode) -> Any:
        arguments = dict(node.arguments)
        if node.op == NEUTRAL:
            return self._neutral(arguments)
        if node.op == REAL_SIZE:
            return self._of_entries(arguments["size"], node.result)
        if node.op == RESULTS:
            return tuple(map(self._value, arguments["results"]))
        if node.op == GETITEM:
            of, at = self._values[arguments["of"].index], arguments["at"]
            return of[at] if isinstance(of, tuple) else self.call(operator.getitem, of, at)
        if node.op == REAL_ORDER:
            return self._sorted(arguments)
        if node.op == KEYS:
            return (self._attended(arguments, node.result[0].sizes),)  # type: ignore[index, union-attr]
        wraps, is_longer = arguments["wraps"], arguments["is_longer"]
        return self._index(self._value(arguments["self"]), arguments["size"], wraps=wraps, is_longer=is_longer)

    def _operator(self, node: AtenNode, longer: Sequence[int]) -> fx.Node:
        """A call; along dimensions ``longer`` the tensor that it writes to has one entry more, cut off afterwards."""
        op, arguments = operator_named(node.op), dict(node.arguments)
        assert op is not None, "repairs are made of operators that exist"
        args, kwargs = list[Any](), {}
        for argument in operators.schema_of(op).arguments:
            value = self._value(arguments.get(argument.name, argument.default_value))
            if argument.name == "device":
                value = self._device
            if not argument.kwarg_only:
                args.append(value)
            elif value is not None and value != argument.default_value:
                kwargs[argument.name] = value
        if op is self._before.target is _EFFICIENT and args[3] not in self._before.args:  # guard: made_bias_is_aligned
            args[3] = self._aligned(args[3])
        if longer:
            rank = args[0].meta["val"].dim()
            dims = {dim % rank for dim in longer}
            behind = [int(side and rank - 1 - turn in dims) for turn in range(rank) for side in (0, 1)]
            args[0] = self.call(aten.constant_pad_nd.default, args[0], behind)
        result = self.call(op, *args, **kwargs)
        for dim in longer:
            result = self.call(aten.slice.Tensor, result, dim, 0, -1)
        return result

    def _attended(self, arguments: Mapping[str, Any], sizes: Sequence[Size]) -> fx.Node:
        """Attention over sequences of any length, here all of the padded one, of which the real keys are in use."""
        query, key, value = (self._value(arguments[name]) for name in ("query", "key", "value"))
        batch, _, *lengths = map(self._padded, (*sizes[:3], arguments["size"]))
        starts = [self._starts(batch, length) for length in lengths]
        used, options = self._used(arguments["size"], batch), {}
        if arguments["scale"] is not None:
            options["scale"] = arguments["scale"]
        rows = [self._in_rows(one) for one in (query, key, value)]
        if query.meta["val"].dtype is torch.float32:
            rows = [self.call(aten.unsqueeze.default, one, 0) for one in rows]
            options["seqlen_k"] = used  # guard: made_count_in_float32
            found = self.call(_EFFICIENT_ROWS, *rows, None, *starts, *lengths, 0.0, 0, False, **options)
            found = self.call(aten.squeeze.dim, self.call(operator.getitem, found, 0), 0)
        else:
            options["seqused_k"] = used  # guard: made_count
            found = self.call(_FLASH_ROWS, *rows, *starts, *lengths, 0.0, False, False, **options)
            found = self.call(operator.getitem, found, 0)
        apart = self.call(aten.view.default, found, [batch, lengths[0], *query.meta["val"].shape[1::2]])
        return self.call(aten.permute.default, apart, [0, 2, 1, 3])

    def _in_rows(self, tensor: fx.Node) -> fx.Node:
        """[batch, heads, length, width] as [batch * length, heads, width]."""
        _, heads, _, width = tensor.meta["val"].shape
        by_row = self.call(aten.permute.default, tensor, [0, 2, 1, 3])
        return self.call(aten.reshape.default, by_row, [-1, heads, width])

    def _starts_of(self, batch: Any, length: Any) -> fx.Node:
        """Where each sequence begins, and the end of the last."""
        options = {"start": 0, "step": length, "dtype": torch.int32, "device": self._device, "requires_grad": False}
        return self._at_the_start(prims.iota.default, self._at_the_start(operator.add, batch, 1), **options)

    def _real_lengths(self, size: Size, batch: Any) -> fx.Node:
        """The real value of a size for each sequence."""
        number = self._at_the_start(prims.convert_element_type.default, self._real(size), torch.int32)
        wide = self._at_the_start(aten.expand.default, number, [batch])
        return self._at_the_start(aten.clone.default, wide, memory_format=torch.contiguous_format)

    def _sorted(self, arguments: Mapping[str, Any]) -> fx.Node:
        """NaN is the greatest, and a stable sort puts real entries that equal padding before it."""
        tensor, dim, descending = self._value(arguments["self"]), arguments["dim"], arguments["descending"]
        dtype = tensor.meta["val"].dtype
        fill: Any = math.nan if dtype.is_floating_point else greatest(dtype)
        last = self._filling(lowest(dtype) if descending else fill, dtype)  # guard: made_order_of_nan
        real = self._is_real(arguments["size"], tensor.meta["val"].dim() - dim - 1)
        filled = self.call(aten.where.self, real, tensor, last)
        return self.call(aten.sort.stable, filled, stable=True, dim=dim, descending=descending)

    def _neutral(self, arguments: Mapping[str, Any]) -> fx.Node:
        """``where(real, x, fill)``, where the entries of one factor of a dimension below its real size are real."""
        value, dim, fill = self._value(arguments["self"]), arguments["dim"], arguments["fill"]
        tensor = value.meta["val"]
        real = self._is_real(arguments["size"], tensor.dim() - dim - 1)
        if not arguments["is_outermost"] or arguments["inner"] != 1:
            real = self._spread(arguments["size"], arguments["inner"], value, dim)
        return self.call(
            aten.where.self,
            real,
            value,
            self._filling(self._padded(fill) if isinstance(fill, sympy.Basic) else fill, tensor.dtype),
        )

    def _is_real_index(self, size: Size, num_dims: int) -> fx.Node:
        """For each index of a padded ``size``, whether it is below the real one; with dimensions of 1 behind."""
        if num_dims:
            return self._at_the_start(aten.unsqueeze.default, self._is_real(size, num_dims - 1), -1)
        options = {"start": 0, "step": 1, "dtype": torch.int32, "device": self._device, "requires_grad": False}
        index = self._at_the_start(prims.iota.default, self._padded(size), **options)
        return self._at_the_start(aten.lt.Tensor, index, self._real(size))

    def _of_entries(self, size: Size, shape: Any) -> fx.Node:
        """The real value of an expression for each entry of a tensor."""
        number = self._real(size, shape.sizes)
        if number.meta["val"].dim() < len(shape.sizes) or len(self._indices_in(size)) < len(shape.sizes):
            number = self.call(aten.expand.default, number, list(map(self._padded, shape.sizes)))
        return self.call(prims.convert_element_type.default, number, shape.dtype)

    def _indices_in(self, size: Size) -> set[Any]:
        return set(INDEX) & size.free_symbols if isinstance(size, sympy.Basic) else set()

    def _index_along(self, length: Size, num_dims: int) -> fx.Node:
        """The index of each entry along a dimension; with dimensions of 1 behind."""
        if num_dims:
            return self._at_the_start(aten.unsqueeze.default, self._along(length, num_dims - 1), -1)
        options = {"start": 0, "step": 1, "dtype": torch.int64, "device": self._device, "requires_grad": False}
        return self._at_the_start(prims.iota.default, self._padded(length), **options)

    def _spread(self, size: Size, inner: Size, value: fx.Node, dim: int) -> fx.Node:
        """Whether the index along one factor is real, for the entries of a dimension; with dimensions of 1 behind."""
        length, within = self._padded(size), self._padded(inner)
        whole = self.call(aten.sym_size.int, value, dim)
        outer = self.call(operator.floordiv, whole, self.call(operator.mul, length, within))
        block = self.call(aten.unsqueeze.default, self._is_real(size, 1), 0)
        wide = self.call(aten.expand.default, block, [outer, length, within])
        dense = self.call(aten.clone.default, wide, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, dense, [whole, *[1] * (value.meta["val"].dim() - dim - 1)])

    def _index(self, index: fx.Node, size: Size, *, wraps: bool, is_longer: bool) -> fx.Node:
        """Indices of a longer dimension: those from the end, and those beyond it, move by the length of its padding."""
        length = self._real(size)
        padding = self.call(aten.sub.Tensor, self._number(self._padded(size + int(is_longer)), torch.int32), length)
        beyond = self.call(aten.add.Tensor, index, padding)
        from_start = self.call(aten.where.self, self.call(aten.lt.Tensor, index, length), index, beyond)
        if not wraps:  # guard: made_index_refuses_negatives
            return from_start
        start = self.call(aten.neg.default, length)
        from_end = self.call(
            aten.where.self,
            self.call(aten.lt.Tensor, index, start),
            self.call(aten.sub.Tensor, index, padding),
            self.call(aten.add.Tensor, index, length),
        )
        return self.call(aten.where.self, self.call(aten.lt.Scalar, index, 0), from_end, from_start)

    def _number(self, number: Any, dtype: torch.dtype) -> fx.Node:
        options = {"dtype": dtype, "device": self._device, "pin_memory": False}
        return self._at_the_start(aten.full.default, [], number, **options)

    # --- sizes

    def _real_value(self, size: Size, shape: tuple[Size, ...] = ()) -> Any:
        """The real value of an expression, as an int32 tensor without dimensions; int64 with those of the indices."""
        if isinstance(size, (int, sympy.Integer)):
            return self._number(int(size), torch.int32)
        if size in INDEX:
            return self._along(shape[INDEX.index(size)], len(shape) - 1 - INDEX.index(size))
        if isinstance(size, (sympy.Float, sympy.Rational)):
            return self._number(float(size), torch.float64)
        if isinstance(size, sympy.Symbol):
            return self._at_the_start(aten.select.int, self._vector, 0, self._entries[size])
        op, _, parts = _parts(size)
        values = [self._real(part, shape if self._indices_in(part) else ()) for part in parts]
        if op is aten.abs.default:
            return self._at_the_start(op, *values)
        if op is aten.trunc.default:
            return self._at_the_start(prims.convert_element_type.default, *values, torch.int64)
        if op in (prims.convert_element_type.default, aten.div.Tensor):
            wide = [self._at_the_start(prims.convert_element_type.default, value, torch.float64) for value in values]
            return wide[0] if len(wide) == 1 else self._at_the_start(aten.div.Tensor, *wide)
        if op in (aten.div.Tensor_mode, aten.remainder.Tensor):
            options = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
            divisor = self._at_the_start(aten.clamp_min.default, values[1], 1)
            return self._at_the_start(op, values[0], divisor, **options)
        return functools.reduce(lambda one, other: self._at_the_start(op, one, other), values)

    def _padded_value(self, size: Size) -> Any:
        """The value of an expression at the graph's own sizes: a number, or the node of one."""
        if isinstance(size, (int, sympy.Number)):
            return int(size) if isinstance(size, (int, sympy.Integer)) else float(size)
        if isinstance(size, sympy.Symbol):
            return self._symbol(size)
        _, op, parts = _parts(size)
        values = list(map(self._padded, parts))
        if len(values) == 1:
            return self._at_the_start(op, values[0])
        return functools.reduce(lambda one, other: self._at_the_start(op, one, other), values)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        """The input that is a size, or the dimension of an input that has it."""
        placeholders: list[fx.Node] = list(self._graph.find_nodes(op="placeholder"))
        for node in placeholders:
            if symbolic.expression_of(node.meta.get("val")) == symbol:
                return node
        for node in placeholders:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if symbolic.expression_of(size) == symbol:
                    return self._at_the_start(aten.sym_size.int, node, dim)
        raise AssertionError(f"no input has the size {symbol}")
