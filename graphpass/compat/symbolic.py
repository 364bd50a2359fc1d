"""Fake tensors, symbolic sizes and the shape environment behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from graphpass.compat import trees
from graphpass.compat.operators import OpOverload, TorchDispatchMode

_TRACED_SIZE = 7
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The FakeTensorMode of the first fake tensor in ``values``, or None.

    It reads the tensors, because the tracing context has another mode while a backend runs.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def new_fake_mode(values: Iterable[Any] = ()) -> Any:
    """A new FakeTensorMode with the shape environment of ``values``, or a new one if they have none.

    A new environment represents host reads and data-dependent shapes by symbols. The mode computes no real values.
    """
    from torch._functorch import config as aot_config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = shape_env_of(values) or ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with aot_config.patch(fake_tensor_propagate_real_tensors=False):
        return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def fakify(fake_mode: Any, value: Any) -> Any:
    """A real tensor as a fake tensor of ``fake_mode`` with the same, static shape; any other value unchanged."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return fake_mode.from_tensor(value, static_shapes=True)
    return value


def without_base(view: torch.Tensor, fake_mode: Any) -> torch.Tensor:
    """A fake tensor with the layout and the storage of ``view``, which is a view of nothing.

    Compilers cannot copy the metadata of a view of a nested tensor.
    """
    with fake_mode, torch.no_grad():
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        return empty.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@contextlib.contextmanager
def quiet_shapes(fake_mode: Any) -> Iterator[None]:
    """Within the body, ``fake_mode`` records no guards, and new unbacked symbols need no binding."""
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        yield
        return
    with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols():
        yield


def extract_val(value: Any) -> Any:
    """A result as the metadata of a node has it: no view of another value, so that it can be pickled."""
    from torch.fx.experimental.proxy_tensor import extract_val as extracted

    return extracted(value)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Within the body no dispatch mode is active: a compiler traces under a fake mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


class DecompositionTape(TorchDispatchMode):
    """The operators that torch's decomposition of an operator calls, over fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: (operator, arguments, keyword arguments, result) of each call that returns tensors, in order.
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], Any]] = []
        self.result: Any = None  #: what the decomposition returns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if trees.tensors(result):  # else a size, a device
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def read(self) -> set[int]:
        """The ids of the tensors that a call reads, or the decomposition returns."""
        return set(map(id, trees.tensors((self.result, [(args, kwargs) for _, args, kwargs, _ in self.calls]))))


def decomposition_of(op: OpOverload) -> Callable[..., Any]:
    """Torch's decomposition of an operator; it may return NotImplemented."""
    from torch._decomp import decomposition_table

    function: Callable[..., Any] = decomposition_table.get(op, op.decompose)
    return function


def decomposition_tape(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DecompositionTape | None:
    """What a decomposition calls for fake tensors; None if it has no answer, or if it fails. It adds no guards."""
    fake_mode = fake_mode_of(trees.flatten((args, kwargs))[0])
    if fake_mode is None:
        return None
    tape = DecompositionTape()
    try:
        with torch.no_grad(), quiet_shapes(fake_mode), python_dispatcher(), fake_mode, tape:
            tape.result = function(*args, **kwargs)
    except Exception:
        return None
    return None if tape.result is NotImplemented else tape


python_dispatcher: Callable[[], contextlib.AbstractContextManager[Any]] = enable_python_dispatcher
"""Runs fake tensors by Python decompositions, as Dynamo does: some C++ operators reject symbolic sizes (``matmul`` on
torch 2.11)."""


def shape_env_of(values: Iterable[Any]) -> Any | None:
    """The shape environment of the symbolic sizes and fake tensors in ``values``, or None."""
    values = list(values)
    for value in values:
        if isinstance(value, NUMBERS):
            return value.node.shape_env
    return getattr(fake_mode_of(values), "shape_env", None)


def expression_of(size: Any) -> sympy.Expr | int | None:
    """The sympy expression of a SymInt, SymFloat or SymBool; an int unchanged; None for anything else."""
    if isinstance(size, NUMBERS):
        return size.node.expr
    return size if isinstance(size, int) else None


def places_of(
    values: Iterable[Any], expression: Callable[[Any], Any] = expression_of
) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """{symbol: (position, dimension)}: which value has a symbol as a size. The dimension of an int is None.

    Ints are preferred, because they cost less to read than shapes. ``expression`` returns that of a size.
    """
    places: dict[Any, tuple[int, int | None]] = {}
    of_ints: dict[Any, tuple[int, int | None]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(map(expression, value.shape)):
                places.setdefault(size, (position, dim))
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            of_ints.setdefault(expression(value), (position, None))
    return {size: place for size, place in (places | of_ints).items() if isinstance(size, sympy.Symbol)}


def sizes_at(places: Iterable[tuple[int, int | None]], args: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that arguments have at places as :func:`places_of` returns them."""
    return tuple([args[position] if dim is None else args[position].shape[dim] for position, dim in places])


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Whether ``symbol`` depends on data and is known only at run time (``.item()``, the row count of ``nonzero``)."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def bounds_of(shape_env: Any, size: sympy.Expr) -> tuple[int | None, int | None]:
    """The (least, greatest) value of ``size``; None for a bound that is infinite or above any tensor size."""
    value_range = shape_env.var_to_range.get(size) if size.is_Symbol else shape_env.bound_sympy(size)
    if value_range is None:
        return None, None
    return _finite(value_range.lower), _finite(value_range.upper)


def _finite(bound: Any) -> int | None:
    largest = 2**62
    return int(bound) if getattr(bound, "is_Integer", False) and abs(int(bound)) < largest else None


def guards_of(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """The guards of ``shape_env`` as boolean expressions, in order, without duplicates."""
    return tuple(dict.fromkeys(guard.expr for guard in shape_env.guards))


def facts_of(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """All facts that ``shape_env`` assumes: its guards, and the divisions known to be exact."""
    if shape_env is None:
        return ()
    divisible = (sympy.Eq(remainder, 0) for remainder in sorted(shape_env.divisible, key=str))
    return tuple(dict.fromkeys((*guards_of(shape_env), *divisible)))


def guard_on(shape_env: Any, conditions: Sequence[sympy.Basic]) -> bool:
    """Guard the graph being traced on ``conditions``; return False, without a guard, if its sizes violate one."""
    hints = hints_of(shape_env)
    if any(condition.xreplace(hints) != sympy.true for condition in conditions):
        return False
    for condition in conditions:
        shape_env.evaluate_expr(condition)
    return True


def hints_of(shape_env: Any) -> dict[sympy.Symbol, Any]:
    """The value of each symbol in the call being traced; without the ragged sizes of nested tensors, no numbers."""
    hints = {} if shape_env is None else shape_env.backed_var_to_val
    return {symbol: hint for symbol, hint in hints.items() if isinstance(hint, (int, float, sympy.Number))}


def new_symbol(shape_env: Any, name: str, lowest: int | None, highest: int | None, like: int) -> Any:
    """A new symbol of ``shape_env`` within bounds, or an integer if the bounds allow only one size.

    None bounds a size below by 0, above by nothing. ``like`` is the size to trace with, if it is within the bounds.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    if lowest is not None and lowest == highest:
        return sympy.Integer(lowest)
    least = lowest or 0
    upper = sympy.Integer(highest) if highest is not None else ValueRanges.unknown().upper
    bounds = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(sympy.Integer(least), upper))
    hint = max(2, like if highest is None or least <= like <= highest else highest)
    return shape_env.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC, bounds, positive=None)


def floor_div(size: Any, divisor: Any) -> Any:
    """The quotient of two expressions, rounded down, as torch writes it."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(sympy.sympify(size), sympy.sympify(divisor))


def size_of(shape_env: Any, expression: Any, symbols: Mapping[sympy.Symbol, Any]) -> Any:
    """``expression`` with its symbols replaced by ``symbols`` of ``shape_env``, as a SymInt; an int unchanged."""
    if not isinstance(expression, sympy.Basic):
        return expression
    renamed = expression.xreplace(dict(symbols))
    hint = int(renamed.xreplace(hints_of(shape_env)))
    return shape_env.create_symintnode(renamed, hint=hint)


def aten_graph_of(
    module: torch.nn.Module, arguments: Mapping[str, torch.Tensor], dims: Mapping[str, Collection[int]]
) -> tuple[fx.GraphModule, sympy.Symbol, Any]:
    """Trace a call of a module without Dynamo, over fake tensors, with parameters and buffers as inputs.

    Returns (graph of its eager aten operators, the symbol of the size that all of ``dims`` have, the fake mode). The
    size is at least 2, and the first input.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = new_fake_mode()
    symbol = new_symbol(fake_mode.shape_env, "size", 2, None, _TRACED_SIZE)
    size = size_of(fake_mode.shape_env, symbol, {symbol: symbol})
    with fake_mode:
        given = {
            name: torch.empty(
                [size if dim in dims[name] else length for dim, length in enumerate(tensor.shape)],
                dtype=tensor.dtype,
                device=tensor.device,
            )
            for name, tensor in arguments.items()
        }
    state = {name: fakify(fake_mode, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}

    def call(_: Any, state: Any, given: Any) -> list[Any]:
        return trees.flatten(torch.func.functional_call(module, state, (), given))[0]

    with torch.no_grad(), python_dispatcher(), fake_mode:
        graph = make_fx(call, _allow_non_fake_inputs=True)(size, state, given)
    if any(str(node.target).startswith("aten.sym_") for node in graph.graph.nodes):
        raise ValueError("a size is read from a tensor, where it has lost its symbol")
    return graph, symbol, fake_mode


@dataclass(frozen=True, slots=True)
class LateValue:
    """The fake value of a node of a saved graph, made when it is first read: most never are."""

    make: Callable[..., Any]
    args: tuple[Any, ...]

    def value(self) -> Any:
        """Make it."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with torch.inference_mode(False), unset_fake_temporarily():
            return self.make(*self.args)


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbolic size that tracing stored on a node."""
    key = "example_value" if "example_value" in node.meta else "val"
    value = node.meta[key]
    if isinstance(value, LateValue):
        value = node.meta[key] = value.value()
    return value


def set_values(graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> None:
    """Give each node of a graph, as Dynamo does, its fake value in a run on these inputs of the mode."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph_module, fake_mode).propagate_dont_convert_inputs(*inputs)
    for node in graph_module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
