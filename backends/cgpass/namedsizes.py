"""The symbolic sizes of one graph: where a call has them, their key fields and ladders, and which are admitted."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from graphpass.compat import nnmodules, symbolic
from graphpass.compile import SizeRanges
from graphpass.dispatch.grid import SizeGrid, named_values
from graphpass.dispatch.recurring import KeyField
from graphpass.errors import DispatchError, ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.paddedcalls import dense_strides
from graphpass.regions.split import Partition
from graphpass.regions.symbols import GraphInput, GuardedSymbols, graph_inputs, key_symbols

Expression: TypeAlias = sympy.Expr | int
Sizes: TypeAlias = Mapping[sympy.Symbol, int]

_NAME_DIMENSION = (
    "compile with dynamic=True, and name the dimension in dynamic_dims: {{input: {{dimension: {field!r}}}}}"
)


def value_at(expression: Expression, sizes: Sizes) -> int:
    """The value of an expression whose symbols are all among ``sizes``."""
    if isinstance(expression, int):
        return expression
    return int(expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}))


def symbols_in(expressions: Iterable[Expression]) -> frozenset[sympy.Symbol]:
    """The free symbols of several expressions."""
    return frozenset[sympy.Symbol]().union(*(getattr(e, "free_symbols", frozenset()) for e in expressions))


def simplifier(env: Any) -> Callable[[Any], Expression]:
    """A function that returns a size as an expression, with the equalities that a shape environment knows."""

    def simplified(size: Any) -> Expression:
        expression = symbolic.expression_of(size)
        assert expression is not None, "sizes are ints or symbolic"
        return env.replace(expression) if env is not None and isinstance(expression, sympy.Expr) else expression

    return simplified


_HINT_OF_UNBACKED = 8192


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout of one tensor input."""

    name: str  #: its name for users
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]  #: in elements
    offset: Expression  #: storage offset, in elements
    element_bytes: int
    order: tuple[int, ...]  #: the dimensions, sorted by ascending stride in the traced call


@dataclass(frozen=True, slots=True)
class Size(KeyField):
    """One symbolic size that distinguishes the calls of a graph, and the key field that it has."""

    symbol: sympy.Symbol
    place: tuple[int, int | None]  #: (position of an argument, dimension) where a call has it; None for an int argument
    is_declared: bool  #: whether ``dynamic_dims`` or ``padding`` name it
    is_of_calls: bool  #: whether only call arguments have it, no parameter or buffer; only such a size may be padded


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of one graph, without references to fake tensors."""

    sizes: tuple[Size, ...]  #: the sizes that distinguish calls, in order of their symbols
    fixed: Mapping[str, int]  #: {key field: size} of the declared sizes that the graph has specialized to a constant
    numbers: Mapping[int, Expression]  #: {position: expression} of the ints among the inputs
    layout_numbers: tuple[int, ...]  #: positions of the ints that no size is read from, such as strides
    layouts: Mapping[int, InputLayout]  #: of the tensor inputs whose memory the graph does not exchange, by position
    guards: GuardedSymbols  #: which sizes the graph serves
    unread: frozenset[sympy.Symbol]  #: symbols in shapes that cannot be read from an input
    hints: Sizes  #: the size of each symbol in the traced call
    symbols: Mapping[str, Any]  #: key field -> its size, a symbol, an expression or an int, for keys of a context
    grid: SizeGrid | None  #: the fields of such keys; None if no option names them
    #: (position, dimension, key field) of the sizes that such a key counts: those that ``dynamic_dims`` declares
    counted: tuple[tuple[int, int, str], ...]
    #: (position, dimensions) of the inputs whose sizes depend on the graph's only symbol, or on its only marked symbol.
    #: Empty if dimensions are declared, or if several symbols make it ambiguous which one the key counts.
    products: tuple[tuple[int, tuple[int, ...]], ...]
    _fitting: dict[BatchDescriptor, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Partition, settings: Settings, *, is_first: bool = True) -> GraphSizes:
        """Read the sizes off the inputs of a partitioned graph, and name them after the options.

        After a graph break no input has a declared name; in the first graph that is a mistake in the names.
        """
        values = [graph_input.value for graph_input in parts.inputs]
        env = symbolic.shape_env_of(values)
        simplified = simplifier(env)
        hints = _hints(
            env, [simplified(n) for v in values if isinstance(v, torch.Tensor) for n in (*v.shape, *v.stride())]
        )
        layouts = {
            position: _layout(graph_input, simplified, hints)
            for position, graph_input in enumerate(parts.inputs)
            if isinstance(graph_input.value, torch.Tensor) and not graph_input.is_exchanged
        }
        numbers = {p: simplified(value) for p, value in enumerate(values) if isinstance(value, torch.SymInt)}
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        in_shapes = symbols_in(simplified(size) for shape in shapes for size in shape)
        read_from = layouts.keys() | (numbers.keys() - set(parts.layout_inputs if in_shapes else ()))
        places = symbolic.places_of([v if p in read_from else None for p, v in enumerate(values)], simplified)
        declared = _declared_dims(parts.inputs, settings)
        products = () if declared or (settings.dynamic_dims and not is_first) else _products_counted(parts.inputs)
        names = _FieldNames.of(parts.inputs, {p: layout.shape for p, layout in layouts.items()}, hints, settings)
        read = {position for position, dim in places.values() if dim is None}
        return cls(
            sizes=_named_sizes(parts, settings, layouts, places, names),
            fixed={name: size for size, name in names.declared if isinstance(size, int)},
            numbers=numbers,
            layout_numbers=tuple(position for position in numbers if position not in read),
            layouts=layouts,
            guards=GuardedSymbols.from_values(values),
            unread=in_shapes - places.keys(),
            hints=hints,
            symbols=key_symbols(parts.inputs, settings.dynamic_dims),
            grid=SizeGrid.of(settings.capture_sizes) if settings.capture_sizes else None,
            counted=declared or tuple((position, dims[0], "num_tokens") for position, dims in products[:1]),
            products=products,
        )

    def named(self, sizes: Sequence[int]) -> dict[sympy.Symbol, int]:
        """{symbol: size}, from the sizes of a call or a key in the order of :attr:`sizes`."""
        return {size.symbol: value for size, value in zip(self.sizes, sizes, strict=True)}

    def admits(self, sizes: Sequence[int]) -> bool:
        """Whether the guards admit these sizes."""
        return self.guards.excluded_by(self.named(sizes)) is None

    def numbers_at(self, sizes: Sizes) -> dict[int, int]:
        """{position: value} of the ints among the inputs that depend on ``sizes`` alone."""
        of_sizes = ((p, e) for p, e in self.numbers.items() if symbols_in([e]) <= sizes.keys())
        return {position: value_at(expression, sizes) for position, expression in of_sizes}

    def dense_numbers(self, positions: Iterable[int], sizes: Sizes) -> dict[int, int] | InputLayout:
        """{position: value} of the layout numbers if the inputs at ``positions`` have dense buffers of these sizes.

        Else the layout of an input whose traced strides no dense buffer has.
        """
        values: dict[Any, int] = {}
        for position in positions:
            layout = self.layouts[position]
            shape = [value_at(size, sizes) for size in layout.shape]
            strides = dense_strides(shape, layout.order)
            # The graph reads no offset of an input that is copied: only a symbol of its own needs a value.
            offset = [(layout.offset, 0, 2)] if symbols_in([layout.offset]) - sizes.keys() else []
            for traced, actual, size in [*zip(layout.strides, strides, shape, strict=True), *offset]:
                unknown = symbols_in([traced]) - sizes.keys() - values.keys()
                if size <= 1:
                    continue
                if unknown and traced not in unknown:
                    return layout
                if unknown:
                    values[traced] = actual
                elif value_at(traced, {**sizes, **values}) != actual:
                    return layout
        return {position: values[expression] for position, expression in self.numbers.items() if expression in values}

    # -- keys of a context --------------------------------------------------------------------------------------------

    def admits_key(self, descriptor: BatchDescriptor) -> bool:
        """Whether the graph's guards admit the sizes that ``descriptor`` names."""
        try:
            fields = self._padded(descriptor)
        except DispatchError:  # a key that does not name the fields
            return False
        pairs = [(symbol, fields[name]) for name, symbol in self.symbols.items() if name in fields]
        return bool(pairs) and all(self.guards.excludes(symbol, size) is None for symbol, size in pairs)

    def _padded(self, descriptor: BatchDescriptor) -> dict[str, int]:
        return _numbers_of(descriptor) if self.grid is None else self.grid.fields(descriptor)

    def check(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Compare the arguments' sizes with the key's: a graph of other sizes would later refuse those of its key."""
        found = [args[position].shape[dim] for position, dim, _ in self.counted]
        if self._fitting.get(descriptor) != found:  # guard: key_fits_the_symbol
            if self.products:
                self._check_products(descriptor, args)
            else:
                self._check_declared(descriptor, found)
            self._fitting[descriptor] = found

    def _check_declared(self, descriptor: BatchDescriptor, sizes: Sequence[int]) -> None:
        padded = self._padded(descriptor)
        for (position, dim, name), found in zip(self.counted, sizes, strict=True):
            expected = padded.get(name)
            if expected is not None and expected != found:  # guard: key_names_the_shape
                raise ShapeError(
                    f"input {self.layouts[position].name!r} does not have the size its key names",
                    expected=f"{name}={expected} in dimension {dim} (key {descriptor})",
                    found=str(found),
                    remedy="pad the input to the descriptor's size",
                )

    def _check_products(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Without declared dimensions, the key may count a dimension, or a product of dimensions of one input."""
        counts = {*_numbers_of(descriptor).values()}
        for position, dims in self.products:
            if not counts.isdisjoint(_products(args[position].shape, dims)):
                return
        position, dims = self.products[0]
        name, found = self.layouts[position].name, tuple(args[position].shape)
        raise ShapeError(
            f"input {name!r} does not have a size that its key names",
            expected=f"{' or '.join(map(str, sorted(counts)))} in dimension {dims[0]}, or as a product of dimensions "
            f"(key {descriptor})",
            found=f"{found[dims[0]]}, in shape {found}",
            remedy="pad the input to the descriptor's size; if the key counts something else, declare the dimension "
            f"with a field of another name: dynamic_dims={{{name!r}: {{{dims[0]}: 'rows'}}}}",
        )

    # -- options ------------------------------------------------------------------------------------------------------

    def compiled_apart(self, settings: Settings) -> SizeRanges | Reason | None:
        """The symbol by whose size regions are compiled separately, and its ranges; or why none is, if options ask."""
        wanted = settings.size_ranges()
        if wanted is None:
            return None
        name, ranges = wanted
        symbol = self.symbols.get(name, "no symbol that can be read from an input")
        if not isinstance(symbol, sympy.Symbol):
            return Reason(f"nothing is compiled by size: {name} is {symbol}", _NAME_DIMENSION.format(field=name))
        return symbol, tuple(pair for pair in ranges if any(self.guards.excludes(symbol, end) is None for end in pair))

    def excluded(self, settings: Settings) -> Iterator[str]:
        """Which named sizes the graph does not serve, and why. Dynamo compiles another graph for each of them."""
        for name, sizes in settings.capture_sizes.items():
            symbol = self.symbols.get(name)
            if symbol is not None and not getattr(symbol, "free_symbols", None):
                yield f"{name} is fixed at {symbol}: other sizes are compiled again"
                continue
            for size in sizes if symbol is not None else ():
                constraint = self.guards.excludes(symbol, size)
                if constraint is not None:
                    yield f"{name}={size} is outside this graph's guards ({constraint})"


def _hints(env: Any, numbers: Iterable[Expression]) -> dict[sympy.Symbol, int]:
    """The value of each symbol in the traced call; for sizes marked as unbacked, which have none, different numbers."""
    hints = {symbol: int(hint) for symbol, hint in symbolic.hints_of(env).items()}
    unbacked = sorted(symbols_in(numbers) - hints.keys(), key=str)
    return hints | {symbol: _HINT_OF_UNBACKED + number for number, symbol in enumerate(unbacked)}


def _layout(graph_input: GraphInput, simplified: Callable[[Any], Expression], hints: Sizes) -> InputLayout:
    tensor = graph_input.value
    strides = tuple(map(simplified, tensor.stride()))
    traced = [value_at(stride, hints) for stride in strides]
    order = sorted(range(tensor.dim()), key=lambda dim: (traced[dim], -dim))
    shape, offset = tuple(map(simplified, tensor.shape)), simplified(tensor.storage_offset())
    return InputLayout(graph_input.shown, shape, strides, offset, tensor.element_size(), tuple(order))


def _declared_dims(inputs: Sequence[GraphInput], settings: Settings) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (position, dim, name)
        for position, given in enumerate(inputs)
        if isinstance(given.value, torch.Tensor) and not given.is_exchanged
        for dim, name in settings.dynamic_dims.get(given.source_name or "", {}).items()
        if dim < given.value.dim()
    )


def _named_sizes(
    parts: Partition,
    settings: Settings,
    layouts: Mapping[int, InputLayout],
    places: Mapping[sympy.Symbol, tuple[int, int | None]],
    names: _FieldNames,
) -> tuple[Size, ...]:
    # With dynamic_dims, only those dimensions are declared. Else a padding rule declares all sizes of its input.
    padded = [
        layouts[p].shape
        for p in layouts
        if parts.inputs[p].source_name in settings.padding and not settings.dynamic_dims
    ]
    declared = {size for size, _ in names.declared} | symbols_in(size for shape in padded for size in shape)
    fields = {
        symbol: names.fields.get(symbol) or parts.inputs[places[symbol][0]].shown for symbol in sorted(places, key=str)
    }
    declared_fields = {fields[symbol] for symbol in declared if symbol in fields}
    sizes = []
    for symbol, name in fields.items():
        (position, dim), is_of_calls = places[symbol], symbol in names.of_calls
        sizes.append(
            Size(
                name=name,
                ladder=_ladder(name, names.homes.get(symbol), settings, knows_names=bool(declared_fields)),
                is_padded=False,
                is_number=not is_of_calls and dim is None and not parts.inputs[position].is_of_tensor,
                symbol=symbol,
                place=(position, dim),
                is_declared=name in declared_fields,
                is_of_calls=is_of_calls,
            )
        )
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class _FieldNames:
    declared: tuple[tuple[Expression, str], ...]  #: (size, key field) of each dimension that ``dynamic_dims`` declares
    #: symbol -> (position, dimension) of the first call argument, no parameter or buffer, that has it
    homes: Mapping[sympy.Symbol, tuple[int, int]]
    fields: Mapping[sympy.Symbol, str]
    of_calls: frozenset[sympy.Symbol]  #: the symbols that only call arguments have; only such sizes may be padded

    @classmethod
    def of(
        cls,
        inputs: Sequence[GraphInput],
        shapes: Mapping[int, tuple[Expression, ...]],
        hints: Sizes,
        settings: Settings,
    ) -> _FieldNames:
        """Name the symbols in ``shapes``, by position, of the inputs whose memory the graph does not exchange.

        Dynamo may give the batch of each input its own symbol: equal sizes of one dimension share a key field.
        """
        declared = tuple((shapes[position][dim], name) for position, dim, name in _declared_dims(inputs, settings))
        given = {position: shape for position, shape in shapes.items() if not inputs[position].is_static}
        homes = {
            size: (position, shape.index(size))
            for position, shape in reversed(given.items())
            for size in shape
            if isinstance(size, sympy.Symbol)
        }
        fields = {size: name for size, name in declared if isinstance(size, sympy.Symbol)}
        shared = {(homes[symbol][1], hints[symbol]): name for symbol, name in fields.items() if symbol in homes}
        for symbol in sorted(homes.keys() - fields.keys(), key=str):
            home, dim = homes[symbol]
            fields[symbol] = shared.setdefault((dim, hints[symbol]), f"{inputs[home].shown}[{dim}]")
        of_static = symbols_in(size for position in shapes.keys() - given.keys() for size in shapes[position])
        of_calls = symbols_in(size for shape in given.values() for size in shape) - of_static
        return cls(declared, homes, fields, frozenset(s for s in of_calls if not symbolic.is_unbacked(s)))


def unify_sizes(graph: fx.Graph, settings: Settings) -> None:
    """Guard on the equality of sizes that share a key field, as Dynamo does where it traces a function first.

    Padding is made from one real size of a field. Features of a layer that torch runs as one operator have the width of
    its weights, which Dynamo does not learn.
    """
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [given for given, node in zip(graph_inputs(graph), placeholders, strict=True) if node.users]
    env = symbolic.shape_env_of([given.value for given in inputs])
    if env is None or not settings.makes_padding():
        return
    for features, width in nnmodules.features_of_layers(graph):  # guard: made_features_are_fixed
        symbolic.guard_on(env, [sympy.Eq(simplifier(env)(features), width)])
    shapes = {
        position: tuple(map(simplifier(env), given.value.shape))
        for position, given in enumerate(inputs)
        if isinstance(given.value, torch.Tensor)
    }
    names = _FieldNames.of(inputs, shapes, _hints(env, [size for shape in shapes.values() for size in shape]), settings)
    first: dict[str, sympy.Symbol] = {}
    for symbol in sorted(names.of_calls & names.homes.keys(), key=str):
        one = first.setdefault(names.fields[symbol], symbol)
        symbolic.guard_on(env, [sympy.Eq(one, symbol)])  # guard: made_sizes_are_unified


def _ladder(
    name: str, home: tuple[int, int] | None, settings: Settings, *, knows_names: bool
) -> tuple[int, ...] | None:
    """The capture sizes of a key field; None if no option names them.

    After a graph break, where no input has a declared name, the dimension of the only field with sizes identifies it.
    """
    sizes = settings.capture_sizes.get(name)
    if sizes is not None or knows_names or len(settings.capture_sizes) != 1:
        return sizes
    ((field_name, sizes),) = settings.capture_sizes.items()
    dims = {
        dim for of_input in settings.dynamic_dims.values() for dim, known in of_input.items() if known == field_name
    }
    return sizes if home is not None and home[1] in (dims or {0}) else None


def unmatched_names(
    inputs: Sequence[GraphInput], fields: Collection[str], settings: Settings, *, is_first: bool
) -> Iterator[str]:
    """A sentence for each option that names inputs which the graph lacks, perhaps by a slip.

    The name resembles another input's; or it is the first graph of a model, of which some name should match.
    """
    named: Mapping[str, Collection[str]] = {
        "dynamic_dims": settings.dynamic_dims,
        "padding": settings.padding,
        "capture_sizes": [name.rpartition("[")[0] for name in settings.capture_sizes if "[" in name],
    }
    tensors = [given for given in inputs if isinstance(given.value, torch.Tensor)]
    arguments = [given.source_name for given in tensors if given.source_name]
    said = f"the graph's inputs are {', '.join(arguments)}"
    for option, names in named.items():
        unknown = [name for name in names if name not in arguments]
        others = [name for name in arguments if name not in names]
        knows_none = is_first and len(unknown) == len(names) > 0 and bool(arguments)
        if knows_none or any(difflib.get_close_matches(name, others, cutoff=0.7) for name in unknown):
            yield f"{option} names {', '.join(unknown)}, and {said}"
    unknown = [name for name in settings.capture_sizes if "[" not in name and name not in fields]
    if is_first and len(settings.capture_sizes) > 1 and not settings.dynamic_dims and unknown:
        yield f"capture_sizes names {', '.join(unknown)}, and {said}"


def _numbers_of(descriptor: BatchDescriptor) -> dict[str, int]:
    named = named_values(descriptor.extra, descriptor.num_tokens, descriptor.num_reqs)
    return {name: value for name, value in named.items() if type(value) is int}


def _products(shape: Sequence[int], dims: Sequence[int]) -> Iterator[int]:
    """All products with a factor that is in ``dims`` or before ``dims[0]``, where a fixed dimension may be counted."""
    for count in range(1, len(shape) + 1):
        for chosen in itertools.combinations(range(len(shape)), count):
            if chosen[0] < dims[0] or not set(chosen).isdisjoint(dims):
                yield math.prod(shape[dim] for dim in chosen)


def _products_counted(inputs: Sequence[GraphInput]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    counted = symbols_in(key_symbols(inputs, {}).values())
    found = (
        (
            position,
            [
                dim
                for dim, size in enumerate(given.value.shape)
                if counted & symbols_in([symbolic.expression_of(size) or 0])
            ],
        )
        for position, given in enumerate(inputs)
        if isinstance(given.value, torch.Tensor) and not (given.is_static or given.is_exchanged)
    )
    return tuple((position, tuple(dims)) for position, dims in found if dims)
