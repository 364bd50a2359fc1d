"""Compiles a model with one function for each form of a call, and runs it without autograd."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import keyword
import linecache
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.replay import without_grad
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.settings import replay_settings
from graphpass.compat import dynamo, operators, trees
from graphpass.errors import CaptureError, GraphpassError
from graphpass.options import Fallbacks
from graphpass.saved.calls import SavedCalls

_MODEL = "graphed_model"


class CallForms:
    """A model compiled by :func:`graphpass.graphed`.

    The form of a call is the number of positional arguments and the names of the others; what a plain function takes
    both ways counts as positional. Each form has a generated function, whose parameters are named like the model's:
    Dynamo passes these names to the backend. It counts recompiles by code object, so models of one class have separate
    limits.
    """

    def __init__(self, model: Callable[..., Any], backend: str, user_options: Mapping[str, Any]) -> None:
        self.model, self.user_options = model, user_options  #: as the user passed them
        self.runtime: GraphRuntime = user_options.get("runtime") or GraphRuntime()  #: from the options, else a new one
        self._backend = backend
        self._options = {"dispatch": "auto", **user_options, "runtime": self.runtime}
        self._is_dynamic = True if {"capture_sizes", "dynamic_dims"} & user_options.keys() else None
        self._saved = SavedCalls(model, (_MODEL,), backend, self._options, self._is_dynamic)
        self._fallbacks = Fallbacks(self.runtime, user_options.get("on_fallback", "warn"))
        self.is_captured_ahead = False  #: whether graphs were captured for calls to come
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()
        self._is_of_inference_mode = any(map(torch.is_inference, tensors))
        self._forms: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._names: tuple[str, ...]
        self.forward: Callable[..., Any]  #: calls the model with graphs, without the module's own hooks
        self.forget_forms()

    def forget_forms(self) -> None:
        """Drop the compiled functions, so that the next call compiles the model again."""
        self._forms.clear()
        self._names = _names_either_way(self._uncompiled())

        @functools.wraps(self._uncompiled(), updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        self.forward = forward

    def without_autograd(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """A context manager for the grad and inference modes in which the model runs.

        Inference mode is off for the call, which replays graphs captured outside of it; it stays on if an argument or a
        parameter is an inference tensor, which can be written to in that mode only.
        """
        if torch.is_inference_mode_enabled():
            stays = any(tensor.is_inference() for tensor in trees.tensors((args, kwargs)))
            return contextlib.nullcontext() if stays or self._is_of_inference_mode else replay_settings()
        return without_grad()

    def _uncompiled(self) -> Callable[..., Any]:
        return self.model.forward if isinstance(self.model, torch.nn.Module) else self.model

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        operators.refuse_transform("a graphed model", operators.active_transform())
        if kwargs:
            args, kwargs = self._positional_first(args, kwargs)
        form = (len(args), *kwargs)
        compiled = self._forms.get(form)
        if compiled is None:
            if self.is_captured_ahead and self.runtime.scopes.current() is None:
                self._fallbacks.report_late(
                    f"a call with {len(args)} positional arguments and {', '.join(kwargs) or 'no others'}"
                )
            function = self._function(args, kwargs)
            self._saved.load(function, form)
            compiled = torch.compile(function, backend=self._backend, dynamic=self._is_dynamic, options=self._options)
            self._forms[form] = compiled
        seen = self.runtime.given_up.watch()
        try:
            result = compiled(*args, *kwargs.values())
        except GraphpassError:
            raise
        except Exception as error:
            if not dynamo.came_from_tracing(error):
                raise
            raise _typed(error) from error
        self._fallbacks.report_uncompiled(seen)
        return result

    def _function(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        return _function_of_form(self.model, self._uncompiled(), len(args), tuple(kwargs))

    def save(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Save what the compilation of such a call has made, where ``warm_start`` is set."""
        args, kwargs = self._positional_first(args, kwargs)
        self._saved.save(self._function(args, kwargs), (len(args), *kwargs), (*args, *kwargs.values()))

    def gives_saved_bits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether such a call has the result that was saved with it, where it was loaded; see :class:`SavedCalls`."""
        args, kwargs = self._positional_first(args, kwargs)
        form, given = (len(args), *kwargs), (*args, *kwargs.values())
        return self._saved.gives_saved_bits(
            form,
            given,
            lambda *values: self._call(values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))),
        )

    def _positional_first(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        positional, others = list(args), dict(kwargs)
        for name in self._names[len(args) :]:
            if name not in others:
                break
            positional.append(others.pop(name))
        return tuple(positional), others


def _typed(error: BaseException) -> GraphpassError:
    within: BaseException | None = error
    while within is not None:
        inner = getattr(within, "inner_exception", within)
        if isinstance(inner, GraphpassError):
            return inner
        within = within.__cause__
    return CaptureError(
        "the model cannot be compiled for these arguments",
        expected="code that torch.compile can trace",
        found=f"{type(error).__name__}: {error}",
        remedy="put torch.compiler.disable around the part that it names, or call the model itself",
    )


def _names_either_way(called: Callable[..., Any]) -> tuple[str, ...]:
    """The leading parameters that behave the same by position and by name; none of decorated and C functions."""
    if hasattr(called, "__wrapped__") or not hasattr(getattr(called, "__func__", called), "__code__"):
        return ()
    parameters = inspect.signature(called).parameters.values()
    either_way = itertools.takewhile(lambda p: p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD), parameters)
    return tuple("" if p.kind is p.POSITIONAL_ONLY else p.name for p in either_way)


def _function_of_form(
    model: Callable[..., Any], called: Callable[..., Any], num_positional: int, keywords: Sequence[str]
) -> Callable[..., Any]:
    """A function with positional parameters that calls the model in one form; ``called`` has the model's signature."""
    target = _MODEL
    positional = _parameter_names(called, num_positional)
    parameters = list(positional)
    for name in keywords:
        is_free = name.isidentifier() and not keyword.iskeyword(name) and name not in (*parameters, target)
        parameters.append(name if is_free else f"argument_{len(parameters)}")
    by_name = zip(keywords, parameters[num_positional:], strict=True)
    passed = [*positional, *(f"**{{{name!r}: {parameter}}}" for name, parameter in by_name)]
    call = f"{target}.forward" if isinstance(model, torch.nn.Module) else target
    # The model is a closure variable, because Dynamo's guards keep a function's globals alive.
    source = (
        f"def of_model({target}):\n"
        f"    def call_model({', '.join(parameters)}):\n"
        f"        return {call}({', '.join(passed)})\n"
        f"    return call_model\n"
    )
    filename = f"<graphed {zlib.crc32(source.encode()):08x}>"
    # Dynamo calls a function without source through a wrapper with *args, which would lose the parameter names.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, filename, "exec"), scope)
    function: Callable[..., Any] = scope["of_model"](model)
    return function


def _parameter_names(called: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    with contextlib.suppress(ValueError, TypeError):  # a builtin has no signature
        for parameter in inspect.signature(called).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
    names = names[:count]
    return [*names, *(f"argument_{index}" for index in range(len(names), count))]
