"""A model with CUDA graphs in three lines: the backend's own dispatch and padding, with defaults for serving.

Dynamo runs the model's Python with the caller's tensors. The compiled graphs pad their inputs, replay, and cut their
outputs. This module neither changes the model's arguments nor reads its results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from graphpass.callforms import CallForms
from graphpass.capture.runtime import GraphRuntime, runtime_of, runtime_of_compiler
from graphpass.capture.scope import CallObserver, ReachedCall, ReachedCallable
from graphpass.compat import dynamo, symbolic, trees
from graphpass.context import ForwardContext, entered
from graphpass.errors import CaptureError, OptionError
from graphpass.keys import CUDAGraphMode
from graphpass.options import Fallbacks, Settings
from graphpass.options import options as validated
from graphpass.progress import capture_progress
from graphpass.regions.symbols import key_symbols
from graphpass.report import Report

_BACKEND = "cgpass"


def graphed(
    model: Callable[..., Any],
    capture_sizes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    dynamic_dims: Mapping[str, int | Mapping[int, str]] | None = None,
    *,
    padding: Mapping[str, Any] | None = None,
    mode: str | CUDAGraphMode | None = None,
    **options: Any,
) -> GraphedModel:
    """Compile ``model`` with CUDA graphs: a call is padded to a captured size if that is proved safe, then replayed.

    Args:
        model: a module or function with any arguments; it runs under ``no_grad``.
        capture_sizes: padded sizes to capture, or {key field: sizes}. By default chosen from the sizes of the calls.
        dynamic_dims: the dimensions to pad, {argument: dimension} or {argument: {dimension: key field}}. Dimensions of
            other arguments with the same symbol are padded too.
        padding: {argument: rule for its padding}: a value, ``"repeat"`` (the last real slice, the default), or
            ``f(real, padded_shape) -> padded``.
        mode: ``FULL``, ``PIECEWISE``, or a pair. By default ``FULL_AND_PIECEWISE``; with ``splitting_ops``
            ``PIECEWISE``, so that they run eagerly.
        options: further options of the backend, see :func:`cgpass.options`.

    Returns:
        A callable with the model's signature. For a module, a module of the same class that shares its parameters,
        buffers and attributes.

    Raises:
        OptionError: an option is invalid, or the backend is not registered.
    """
    named = {"capture_sizes": capture_sizes, "dynamic_dims": dynamic_dims, "padding": padding, "mode": mode}
    return _graphed(model, {**options, **{n: value for n, value in named.items() if value is not None}})


class GraphedModel:
    """A model with CUDA graphs, from :func:`graphed`. Call it like the model.

    For a module, its class is a subclass of the module's class, and it shares the module's ``__dict__``. So ``eval()``,
    ``to()``, ``state_dict()``, hooks and assignments act on the model. Only ``capture``, ``report``, ``runtime``,
    ``close`` and ``forward`` are different. A copy, pickled or not, has the same options, no graphs, and a new runtime.
    """

    __slots__ = ()
    _graphed: CallForms

    def __init_subclass__(cls) -> None:
        """Skip the ``__init_subclass__`` of the model's class, which is meant for subclasses that users write."""

    # -- what users call ------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; a graph runs it where one fits."""
        if torch.compiler.is_compiling():  # inside another compiled model: let that model trace it
            return self._graphed.model(*args, **kwargs)
        with self._graphed.without_autograd(args, kwargs):
            # `nn.Module.__call__` runs the module's hooks around `forward`.
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the ``capture_sizes`` now, with a progress bar; see :func:`precapture`.

        Args:
            *args: an example call. Its dynamic sizes must be at least 2 and differ from the model's other sizes.
            **kwargs: keyword arguments of the example call.

        Raises:
            CaptureError: there is nothing to capture, or a capture fails; the error names the key.
        """
        with self._graphed.without_autograd(args, kwargs):
            examples = _captured_examples(self, args, kwargs)
            for _ in range(2):  # once more after it was compiled: then the bits are saved
                if all(self._graphed.gives_saved_bits(*example) for example in examples):
                    break
                self.close()
                self._graphed.forget_forms()
                examples = _captured_examples(self, args, kwargs)
            for example in examples:
                self._graphed.save(*example)

    def report(self) -> Report:
        """What is slow or missing, which keys replay, where padding goes, and what it cost; ``print`` it."""
        model = self._graphed.model
        return self.runtime.report(getattr(model, "__name__", type(model).__name__))

    @property
    def runtime(self) -> GraphRuntime:
        """The runtime that owns the model's graphs, memory pool and statistics."""
        return self._graphed.runtime

    def close(self) -> None:
        """Drop all graphs and free the memory pool. Later calls may capture again."""
        self._graphed.is_captured_ahead = False
        self.runtime.close()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Used by ``to()``, ``half()`` and similar. torch cannot swap parameters of captured graphs."""
        if torch.__future__.get_swap_module_params_on_conversion():
            self.close()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    # -- everything else is the model's ----------------------------------------------------------------------------

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's ``forward`` with graphs, without the module's hooks."""
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
        return _graphed(copy.copy(self._graphed.model), self._graphed.user_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModel:
        return _graphed(copy.deepcopy(self._graphed.model, memo), copy.deepcopy(self._graphed.user_options, memo))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return (_graphed, (self._graphed.model, self._graphed.user_options))


class _GraphedFunction(GraphedModel):
    __slots__ = ("__dict__", "__weakref__", "_graphed")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._graphed.model(*args, **kwargs)
        with self._graphed.without_autograd(args, kwargs):
            return self._graphed.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"GraphedModel({self._graphed.model!r})"


def _graphed(model: Callable[..., Any], options: Mapping[str, Any]) -> GraphedModel:
    if isinstance(model, GraphedModel):
        model = model._graphed.model
    if not callable(model):
        raise OptionError(
            "graphed() was given no model",
            expected="a module or a function",
            found=repr(model),
            remedy="pass the model itself",
        )
    _check_options(options)
    if isinstance(model, torch.nn.Module) and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise OptionError(
            "the model has parameters without a shape",
            expected="parameters that have been initialized",
            found="a lazy module that has not been called",
            remedy="call the model once before it is graphed",
        )
    compiled = CallForms(model, _BACKEND, options)
    if not isinstance(model, torch.nn.Module):
        function = _GraphedFunction()
        function._graphed = compiled
        return function
    kind: Any = type(model)
    names = {"__slots__": ("_graphed",), "__module__": kind.__module__, "__doc__": kind.__doc__}
    graphed_module: Any = object.__new__(type(kind)(f"Graphed{kind.__name__}", (GraphedModel, kind), names))
    graphed_module.__dict__ = model.__dict__
    object.__setattr__(graphed_module, "_graphed", compiled)
    return graphed_module  # type: ignore[no-any-return]


def _check_options(options: Mapping[str, Any]) -> None:
    if dynamo.registered_backend(_BACKEND) is None:
        raise OptionError(
            f"torch.compile knows no backend {_BACKEND!r}",
            expected="an installed distribution of graphpass, or the backend imported",
            found="neither",
            remedy=f"import {_BACKEND}",
        )
    validated(**options)


# -- capture before the first request ----------------------------------------------------------------------------------


def precapture(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Capture the ``capture_sizes`` of a callable compiled with the backend, with a progress bar.

    Runs the callable with the example, and again with the example narrowed to size 1 if size 1 is to be captured in a
    declared dimension; both runs use no graphs. Each graph that these runs reach is then captured at its
    ``capture_sizes`` with generated inputs, or at the example's sizes if neither sizes nor dimensions are declared.

    Args:
        compiled: the result of torch.compile or :func:`graphed`.
        *args: an example call. Its dynamic sizes must be at least 2 and differ from the model's other sizes.
        **kwargs: keyword arguments of the example call.

    Raises:
        CaptureError: the calls reach no graph, or a capture fails; the error names the key.
        OptionError: the callable was not compiled with this backend.
    """
    _captured_examples(compiled, args, kwargs)


def _captured_examples(
    compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """:func:`precapture`; returns the calls that it made."""
    runtime, settings = _runtime_and_settings(compiled)
    reached = _reached(runtime, compiled, args, kwargs)
    narrowed = _narrowed(reached, _fields_of_size_one(settings), args, kwargs)
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
        (callable_, key, call_args)
        for callable_, call_args in _distinct(reached).items()
        for key in callable_.ladder(call_args)
    ]
    if max(map(len, settings.capture_sizes.values()), default=1) > 1 and len({key for _, key, _ in keys}) == 1:
        remedy = "pass an example whose dynamic sizes are at least 2 and differ from the model's other sizes"
        if not isinstance(compiled, GraphedModel):
            remedy += ", and compile with dynamic=True"
        Fallbacks(runtime, settings.on_fallback).report(
            "one size was captured ahead of the calls: the sizes of the example are constants in its graph",
            expected="an example whose sizes are symbols in its graph",
            found=f"a graph of {keys[0][0].name} for {keys[0][1]} alone",
            remedy=remedy,
            at=keys[0][0].name,
        )
    with runtime.capturing(), capture_progress(keys, settings.progress) as progress:
        for callable_, key, call_args in progress:
            progress.set_postfix_str(f"{callable_.name} {key}")
            callable_.capture_key(key, call_args)
    runtime.captured_ahead(callable_.name for callable_, _, _ in keys)
    if isinstance(compiled, GraphedModel):
        compiled._graphed.is_captured_ahead = True
    return [(args, kwargs)] + ([] if narrowed is None else [narrowed])


def _runtime_and_settings(compiled: Any) -> tuple[GraphRuntime, Settings]:
    if isinstance(compiled, GraphedModel):
        return compiled.runtime, Settings.of(compiled._graphed.user_options)
    compilers = dynamo.compilers_of(compiled)
    runtime = runtime_of_compiler(compilers[0]) if compilers else runtime_of(compiled)
    return runtime, Settings.of(dynamo.backend_options(compilers[0]) if compilers else {})


def _reached(runtime: GraphRuntime, compiled: Callable[..., Any], args: Any, kwargs: Any) -> list[ReachedCall]:
    observer = CallObserver(runtime)
    none = CUDAGraphMode.NONE
    context = ForwardContext(None, none, None, None, None, None, None, None, owner=_BACKEND, observer=observer)
    with runtime.capturing(), entered(context):
        compiled(*args, **kwargs)
    return observer.reached


def _distinct(reached: Sequence[ReachedCall]) -> dict[ReachedCallable, tuple[Any, ...]]:
    first_arguments: dict[ReachedCallable, tuple[Any, ...]] = {}
    for call in reached:
        first_arguments.setdefault(call.callable, call.args)
    return first_arguments


def _fields_of_size_one(settings: Settings) -> dict[str, dict[int, str]]:
    dims, ladders = settings.dynamic_dims, settings.capture_sizes
    return {name: {d: f for d, f in of.items() if 1 in ladders.get(f, (1,))} for name, of in dims.items()}


def _narrowed(
    reached: Sequence[ReachedCall], dims: Mapping[str, Mapping[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The example narrowed to size 1 in all dimensions that have a symbol of ``dims``; None if there are none.

    A graph receives the example's tensors themselves, so they are compared by identity.
    """
    narrowed: dict[int, torch.Tensor] = {}
    for callable_, call_args in _distinct(reached).items():
        inputs = callable_.partition.inputs
        symbols = {size for size in key_symbols(inputs, dims).values() if not isinstance(size, int)} if dims else set()
        for value, graph_input in zip(call_args, inputs, strict=True):
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
