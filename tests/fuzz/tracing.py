"""A program as the FX graph that Dynamo would hand to the backend, without Dynamo: tracing it takes milliseconds."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import cgpass
from tests.fuzz.ops import namespace
from tests.fuzz.programs import COLUMNS, STATE, Program

_FEWEST_SYMBOLIC_ROWS = 2


class _Value(fx.Proxy):
    """A proxy that can be assigned to, and whose shape is read the way Dynamo writes it."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @property
    def shape(self) -> Any:
        return self.size()


class _Given(_Value):
    """An input with known sizes: Dynamo reads them from the inputs and not from the tensor."""

    sizes: tuple[Any, ...]

    def size(self, dim: int | None = None) -> Any:
        return self.sizes if dim is None else self.sizes[dim]


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph(tracer_cls=type(self))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.create_proxy("call_function", function, args, kwargs)


class _Recording:
    """A module whose functions record their calls."""

    def __init__(self, module: Any, tracer: _Tracer) -> None:
        self._module, self._tracer = module, tracer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return self._tracer.call(found) if callable(found) and not isinstance(found, type) else found


class _State:
    """Stands in for the module: its tensors are the graph's inputs."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What one trace made: the backend's callable, where its arguments come from, and what it guards."""

    function: Callable[..., Any]  #: takes one argument for each name in ``taken``, after the symbolic size
    taken: tuple[str, ...]  #: names of the distinct tensors
    environment: ShapeEnv | None  #: the shape environment, with all guards; None where nothing is symbolic
    symbol: sympy.Symbol | None  #: the number of rows in it

    def admits(self, rows: int) -> bool:
        """Whether the guards hold for this number of rows."""
        if self.environment is None or self.symbol is None:
            return True
        fixed = self.environment.replacements.get(self.symbol)
        if fixed is not None and fixed.is_number and int(fixed) != rows:
            return False
        bounds = self.environment.var_to_range.get(self.symbol)
        if bounds is not None and not bounds.lower <= rows <= bounds.upper:
            return False
        number = {self.symbol: sympy.Integer(rows)}
        return not any(guard.expr.xreplace(number) == sympy.false for guard in self.environment.guards)


class DirectlyCompiled:
    """Calls a program through ``cgpass.backend``, tracing again where Dynamo's guards would.

    One of these serves all instances of the module, as Dynamo's code of a class does.
    """

    def __init__(self, program: Program, options: dict[str, Any], device: torch.device) -> None:
        self._program, self._options, self._device = program, options, device
        self._compiled: dict[Any, list[_Compiled]] = {}
        scope: dict[str, Any] = {}
        exec(program.source(), scope)
        self._code = scope["forward"].__code__

    def __call__(self, module: Any, x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> Any:
        given = {**{name: getattr(module, name) for name in STATE}, "x": x, "y": y, "i": i}
        first_of: dict[int, str] = {}
        aliases = {name: first_of.setdefault(id(tensor), name) for name, tensor in given.items()}
        rows = x.shape[0]
        symbolic = self._program.dynamic and rows >= _FEWEST_SYMBOLIC_ROWS
        strides = tuple(_strides(tensor, rows if symbolic else None) for tensor in given.values())
        versions = self._compiled.setdefault((tuple(aliases.values()), strides, None if symbolic else rows), [])
        found = next((version for version in versions if version.admits(rows)), None)
        if found is None:
            found = self._compile(given, aliases, rows, symbolic=symbolic)
            versions.append(found)
        arguments = [given[name] for name in found.taken]
        return found.function(rows, *arguments) if symbolic else found.function(*arguments)

    def _compile(
        self, given: dict[str, torch.Tensor], aliases: dict[str, str], rows: int, *, symbolic: bool
    ) -> _Compiled:
        tracer = _Tracer()
        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment)
        size: Any = rows
        proxies: dict[str, Any] = {}
        if symbolic:
            size = _symbolic_rows(mode, rows)
            proxies["rows"] = _placeholder(tracer, "s0", size)
        names = [name for name in aliases if aliases[name] == name]
        for name in names:
            fake = _fake(mode, given[name], len(given[name]) if name in STATE else size, rows)
            proxies[name] = _placeholder(tracer, name, fake, static=name in STATE)
            proxies[name].sizes = tuple(
                proxies["rows"] if symbolic and isinstance(s, torch.SymInt) else s for s in fake.shape
            )
        results = self._run({name: proxies[aliases[name]] for name in aliases}, tracer)
        tracer.graph.output(tracer.create_arg(results))
        graph_module = fx.GraphModule(torch.nn.Module(), tracer.graph)
        examples = [node.meta["example_value"] for node in tracer.graph.find_nodes(op="placeholder")]
        symbol = size.node.expr if symbolic else None  # before a guard replaces it by a number
        function = cgpass.backend(graph_module, examples, options=self._options)
        return _Compiled(function, tuple(names), environment if symbolic else None, symbol)

    def _run(self, values: dict[str, Any], tracer: _Tracer) -> Any:
        state = _State()
        state.__dict__.update({name: values[name] for name in STATE})
        scope = {
            **namespace(self._device),
            "torch": _Recording(torch, tracer),
            "F": _Recording(F, tracer),
            "operator": _Recording(operator, tracer),
            **{n: tracer.call(getattr(torch.ops.graphpassfuzz, n).default) for n in ("fresh", "write", "mixed")},
        }
        forward = types.FunctionType(self._code, scope)
        return forward(state, values["x"], values["y"], values["i"])


def _placeholder(tracer: _Tracer, name: str, value: Any, *, static: bool = False) -> _Given:
    node = tracer.graph.placeholder(name)
    node.meta["example_value"] = value
    if static:  # as Dynamo marks what a module holds: no argument of the user's
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        node.meta["grapharg"] = None
    return _Given(node, tracer)


def _symbolic_rows(mode: FakeTensorMode, rows: int) -> Any:
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode.from_tensor(torch.empty(rows, COLUMNS), symbolic_context=context).shape[0]


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, size: Any, rows: int) -> torch.Tensor:
    """A fake tensor like ``tensor`` with ``size`` rows."""
    symbolic = not isinstance(size, int)
    strides = [size if symbolic and stride == rows != COLUMNS else stride for stride in tensor.stride()]
    shape, start = (size, *tensor.shape[1:]), tensor.storage_offset()
    with mode:
        if not start:
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        memory = torch.empty(tensor.untyped_storage().nbytes(), dtype=tensor.dtype, device=tensor.device)
        return memory.as_strided(shape, strides, start)


def _strides(tensor: torch.Tensor, rows: int | None) -> Sequence[Any]:
    return tuple("rows" if stride == rows != COLUMNS else stride for stride in tensor.stride())
