"""A model with CUDA graphs in three lines: the backend's own dispatch and padding, with defaults for serving.

Dynamo runs the model's Python with the caller's own tensors; padding, replay and cutting happen inside the graphs'
boundary. So a graphed model is the model, compiled: nothing here looks at its results, or changes its arguments.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from graphpass.callforms import CompiledModel
from graphpass.capture.lookup import runtime_of, runtime_of_compiler
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import ReachedCall, ReachedCallable
from graphpass.compat import dynamo, symbolic, trees
from graphpass.errors import CaptureError, OptionError
from graphpass.ladder.progress import capture_progress
from graphpass.modes import CUDAGraphMode
from graphpass.regions.symbols import key_symbols
from graphpass.report import Report

__all__ = ["GraphedModel", "graphed", "precapture"]

_BACKEND = "cgpass"
"""A callable, its flat arguments, its flat outputs."""


def graphed(
    model: Callable[..., Any],
    capture_sizes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    dynamic_dims: Mapping[str, int | Mapping[int, str]] | None = None,
    *,
    padding: Mapping[str, Any] | None = None,
    mode: str | CUDAGraphMode = "FULL_AND_PIECEWISE",
    **options: Any,
) -> GraphedModel:
    """Compile ``model`` with CUDA graphs: a call is padded to a captured size where that is proved safe, and replayed.

    Args:
        model: a module or function; it runs under ``no_grad``, with any arguments that it takes.
        capture_sizes: padded sizes to capture, or {key field: sizes}; chosen from the sizes seen where left out.
        dynamic_dims: {argument: dimension}, or {argument: {dimension: key field}}: dimensions to pad. Other arguments
            whose dimensions carry the same symbol are found.
        padding: {argument: what fills its padding}: a value, ``"repeat"`` (the last real slice, the default), or
            ``f(real, padded_shape) -> padded``.
        mode: ``FULL``, ``PIECEWISE``, or a pair.
        options: the backend's others, see :func:`cgpass.options`.

    Returns:
        For a module, a module of its class that has the same parameters, buffers and attributes.

    Raises:
        OptionError: an option cannot be used, or the backend is not registered.
    """
    given = {"capture_sizes": capture_sizes, "dynamic_dims": dynamic_dims, "padding": padding}
    return _graphed(model, {**options, "mode": mode, **{n: value for n, value in given.items() if value is not None}})


class GraphedModel:
    """See :func:`graphed`. Call it like the model.

    For a module it is one: an object of a subclass of the module's class that shares the module's ``__dict__``. So
    ``eval()``, ``to()``, ``state_dict()``, hooks and assignments are the model's. Only ``capture``, ``report``,
    ``runtime``, ``close`` and ``forward`` mean something else here. A copy, pickled or not, has the same options, no
    graphs, and a runtime of its own.
    """

    __slots__ = ()
    _graphed: CompiledModel

    def __init_subclass__(cls) -> None:
        """Keep the model's class from treating the graphed one as a subclass that a user wrote."""

    # -- what users call ------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, over a graph where one fits."""
        if torch.compiler.is_compiling():  # inside of another compiled model it is a part of that
            return self._graphed.model(*args, **kwargs)
        with self._graphed.serving(args, kwargs):
            # The class's own way to be called: a module's hooks, around `forward`.
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the ``capture_sizes`` ahead, with a progress bar; see :func:`precapture`.

        Args:
            *args: an example call: of sizes at least 2 that differ from the model's other sizes.
            **kwargs: the same.

        Raises:
            CaptureError: nothing can be captured, or a key cannot be; it names the key.
        """
        with self._graphed.serving(args, kwargs):
            precapture(self, *args, **kwargs)

    def report(self) -> Report:
        """Regions with reasons, what may be padded and why, keys with counts, calls without a graph, bytes."""
        return self.runtime.report()

    @property
    def runtime(self) -> GraphRuntime:
        """The owner of its graphs and statistics."""
        return self._graphed.runtime

    def close(self) -> None:
        """Drop all graphs and give the pool back; it can be captured again."""
        self.runtime.close()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What ``to()`` and its like go through: torch swaps no parameters that graphs refer to."""
        if torch.__future__.get_swap_module_params_on_conversion():
            self.close()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    # -- the model, otherwise --------------------------------------------------------------------------------------

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's ``forward``, over graphs; a module's hooks are called by what calls this."""
        return self._graphed.forward

    @forward.setter
    def forward(self, forward: Callable[..., Any]) -> None:
        self._graphed.model.forward = forward  # type: ignore[attr-defined]
        self._graphed.forget_forms()

    def __getattr__(self, name: str) -> Any:
        if name == "_graphed":  # before it is set
            raise AttributeError(name)
        return getattr(self._graphed.model, name)

    def __copy__(self) -> GraphedModel:
        return _graphed(copy.copy(self._graphed.model), self._graphed.given)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModel:
        return _graphed(copy.deepcopy(self._graphed.model, memo), copy.deepcopy(self._graphed.given, memo))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return (_graphed, (self._graphed.model, self._graphed.given))


class _GraphedFunction(GraphedModel):
    """A function with graphs."""

    __slots__ = ("__dict__", "__weakref__", "_graphed")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._graphed.model(*args, **kwargs)
        with self._graphed.serving(args, kwargs):
            return self._graphed.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"GraphedModel({self._graphed.model!r})"


def _graphed(model: Callable[..., Any], given: Mapping[str, Any]) -> GraphedModel:
    """Make one; ``given`` are the backend's options.

    Raises:
        OptionError: an option cannot be used, the backend is not registered, or the model has no parameters yet.
    """
    if isinstance(model, GraphedModel):
        model = model._graphed.model
    _check_options(given)
    if isinstance(model, torch.nn.Module) and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise OptionError(
            "the model has parameters without a shape",
            expected="parameters that have been initialized",
            found="a lazy module that has not been called",
            remedy="call the model once before it is graphed",
        )
    compiled = CompiledModel(model, _BACKEND, given)
    if not isinstance(model, torch.nn.Module):
        function = _GraphedFunction()
        function._graphed = compiled
        return function
    kind: Any = type(model)
    names = {"__slots__": ("_graphed",), "__module__": kind.__module__, "__doc__": kind.__doc__}
    made: Any = object.__new__(type(kind)(f"Graphed{kind.__name__}", (GraphedModel, kind), names))
    made.__dict__ = model.__dict__
    object.__setattr__(made, "_graphed", compiled)
    return made  # type: ignore[no-any-return]


def _check_options(given: Mapping[str, Any]) -> None:
    """Have the backend check its options now instead of at the first call.

    Raises:
        OptionError: one cannot be used, or the backend is not registered.
    """
    backend = dynamo.registered_backend(_BACKEND)
    if backend is None:
        raise OptionError(
            f"torch.compile knows no backend {_BACKEND!r}",
            expected="an installed distribution of graphpass, or the backend imported",
            found="neither",
            remedy=f"import {_BACKEND}",
        )
    importlib.import_module(backend.__module__.partition(".")[0]).options(**given)


# -- capturing ahead ---------------------------------------------------------------------------------------------------


def precapture(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Capture the ``capture_sizes`` of a callable compiled with the backend, with a progress bar.

    The callable is called with the example, and once more narrowed to size 1 where size 1 is asked for and its
    dimension declared, both without graphs. Each graph that these calls reach is then captured at its sizes, from
    inputs made there; without sizes and dimensions, at the example's own.

    Args:
        compiled: what torch.compile or :func:`graphed` returned.
        *args: an example call: of sizes at least 2 that differ from the model's other sizes.
        **kwargs: the same.

    Raises:
        CaptureError: the calls reach no graph, or a key cannot be captured; it names the key.
        OptionError: the callable was not compiled with this backend.
    """
    runtime, options = _runtime_and_options(compiled)
    reached = _reached(runtime, compiled, args, kwargs)
    narrowed = _narrowed(reached, _fields_of_size_one(options), args, kwargs)
    if narrowed is not None:
        reached += _reached(runtime, compiled, *narrowed)
    if not reached:
        raise CaptureError(
            "there is nothing to capture",
            expected="a call that enters a compiled graph, under torch.no_grad() or torch.inference_mode()",
            found="none: the graphs are compiled for training, or Dynamo is off or at its recompile limit",
            remedy="call it under torch.inference_mode(), and see its report",
        )
    keys = [
        (callable_, key, given) for callable_, given in _distinct(reached).items() for key in callable_.ladder(given)
    ]
    with runtime.capturing(), capture_progress(keys) as progress:
        for callable_, key, given in progress:
            progress.set_postfix_str(f"{callable_.name} {key}")
            callable_.capture_key(key, given)


def _runtime_and_options(compiled: Any) -> tuple[GraphRuntime, Mapping[str, Any]]:
    if isinstance(compiled, GraphedModel):
        return compiled.runtime, compiled._graphed.given
    compilers = dynamo.compilers_of(compiled)
    runtime = runtime_of_compiler(compilers[0]) if compilers else runtime_of(compiled)
    return runtime, dynamo.backend_options(compilers[0]) if compilers else {}


def _reached(runtime: GraphRuntime, compiled: Callable[..., Any], args: Any, kwargs: Any) -> list[ReachedCall]:
    with runtime.capturing(reaches=True) as scope:
        compiled(*args, **kwargs)
        return list(scope.reached)


def _distinct(reached: Sequence[ReachedCall]) -> dict[ReachedCallable, tuple[Any, ...]]:
    """Each callable with the arguments of its first call."""
    found: dict[ReachedCallable, tuple[Any, ...]] = {}
    for call in reached:
        found.setdefault(call.callable, call.args)
    return found


def _fields_of_size_one(options: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """The declared dimensions, {argument: {dimension: key field}}, of those fields whose ladder has size 1."""
    sizes = options.get("capture_sizes") or {}
    ladders = sizes if isinstance(sizes, Mapping) else {"num_tokens": sizes}
    declared = options.get("dynamic_dims") or {}
    dims = {name: {of: "num_tokens"} if isinstance(of, int) else dict(of) for name, of in declared.items()}
    return {name: {d: f for d, f in of.items() if 1 in ladders.get(f, (1,))} for name, of in dims.items()}


def _narrowed(
    reached: Sequence[ReachedCall], dims: Mapping[str, Mapping[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The example at size 1 in ``dims`` and in what shares a symbol with them; None where there is nothing to narrow.

    The example's tensors reach a graph as they are, so they are known by identity.
    """
    narrowed: dict[int, torch.Tensor] = {}
    for callable_, given in _distinct(reached).items():
        inputs = callable_.partition.inputs
        symbols = {size for size in key_symbols(inputs, dims).values() if not isinstance(size, int)} if dims else set()
        for value, graph_input in zip(given, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                small = value
                for dim, size in enumerate(graph_input.value.shape):
                    if symbolic.expression_of(size) in symbols:
                        small = small.narrow(dim, 0, 1)
                if small is not value:
                    narrowed.setdefault(id(value), small.clone(memory_format=torch.contiguous_format))
    leaves, spec = trees.flatten((args, kwargs))
    if not narrowed or not narrowed.keys() & set(map(id, leaves)):
        return None
    return trees.unflatten([narrowed.get(id(leaf), leaf) for leaf in leaves], spec)  # type: ignore[no-any-return]
