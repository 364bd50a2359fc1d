"""Looks up the runtime of a compiled callable.

The runtime is an attribute of the object through which Dynamo calls the backend, one for each ``torch.compile``. So
there is no global registry, the caller's options are not changed, and the runtime is freed with that object.
"""

from __future__ import annotations

from typing import Any

from graphpass.capture.runtime import GraphRuntime
from graphpass.compat import dynamo
from graphpass.errors import GraphpassError, OptionError

__all__ = ["runtime_of", "runtime_of_compiler"]

_ATTRIBUTE = "graphpass_runtime"


def runtime_of_compiler(compiler: Any) -> GraphRuntime:
    """The runtime of one ``torch.compile``: from its options, else created at its first graph."""
    given = dynamo.backend_options(compiler).get("runtime")
    if given is not None:
        return _checked(given)
    runtime: GraphRuntime | None = getattr(compiler, _ATTRIBUTE, None)
    if runtime is None:
        runtime = GraphRuntime()
        setattr(compiler, _ATTRIBUTE, runtime)
    return runtime


def runtime_of(compiled: Any) -> GraphRuntime:
    """The runtime of a callable compiled with ``backend="cgpass"``.

    Args:
        compiled: what ``torch.compile`` or :func:`graphpass.graphed` returned, or a module after
            ``module.compile(backend="cgpass")``.

    Raises:
        OptionError: it was compiled with another backend, has not run yet, or is not compiled.
    """
    for compiler in dynamo.compilers_of(compiled):
        runtime = dynamo.backend_options(compiler).get("runtime") or getattr(compiler, _ATTRIBUTE, None)
        if runtime is not None:
            return _checked(runtime)
    runtime = getattr(compiled, "runtime", None)
    if isinstance(runtime, GraphRuntime):
        return runtime
    raise _no_runtime(compiled)


def _no_runtime(compiled: Any) -> GraphpassError:
    return OptionError(
        "this callable has no graphpass runtime",
        expected="a callable compiled with backend='cgpass' that has run once, or options with runtime=GraphRuntime()",
        found=repr(compiled)[:200],
        remedy="call it once first, or pass options=cgpass.options(runtime=...) to torch.compile; "
        "if it has run, Dynamo compiled no graph of it: TORCH_LOGS=graph_breaks says why, and for an RNN, GRU or LSTM "
        f"{dynamo.ALLOW_RNN}",
    )


def _checked(runtime: Any) -> GraphRuntime:
    if isinstance(runtime, GraphRuntime):
        return runtime
    raise OptionError(
        "option runtime is no runtime",
        expected="a graphpass.GraphRuntime",
        found=repr(runtime),
        remedy="pass runtime=graphpass.GraphRuntime(), or leave it out",
    )
