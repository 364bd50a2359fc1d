"""The forward context: one ContextVar that carries the runtime mode and the batch descriptor into the model.

It is the only ambient value in graphpass. It is set and restored by token, so contexts nest, and each thread and each
asyncio task has its own. Read it inside opaque ops, because Dynamo cannot trace ``ContextVar.get()``.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from graphpass.errors import ContextError
from graphpass.keys import BatchDescriptor, CUDAGraphMode


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ForwardContext:
    """The state of one forward besides its inputs. Contexts are compared by identity."""

    #: metadata that the model's attention reads; None inside captured regions of a PIECEWISE capture
    attn_metadata: Any
    runtime_mode: CUDAGraphMode  #: NONE, PIECEWISE or FULL: which wrappers capture or replay
    batch_descriptor: BatchDescriptor | None  #: the padded shape of the batch; may be None in mode NONE only
    num_tokens: int | None  #: number of tokens of this rank, before padding
    num_tokens_across_dp: Any  #: token counts of all data-parallel ranks
    slot_mapping: Any  #: the cache slot that attention writes for each token
    is_padding: Any  #: True for rows that are padding, shape (num_tokens,)
    extra: Any  #: further values for the caller's ops
    #: the recorder of the capture in progress, None outside of a capture. Wrappers set it. A wrapper does not capture
    #: if it is set already, so of nested wrappers only the outermost captures.
    capture: Any = None
    #: name of the callable whose auto dispatcher created this context, None for a context that a user set. Only that
    #: callable, its wrappers and graphpass's own ops see a context with an owner.
    owner: Any = None
    observer: Any = None  #: a ``graphpass.capture.scope.CallObserver`` of the calls of graphs in this forward, or None


_forward_context: ContextVar[ForwardContext | None] = ContextVar("graphpass_forward_context", default=None)
current_context = _forward_context.get
"""The current forward context, or None; includes contexts of an auto dispatcher. A single C call."""


def get_forward_context() -> ForwardContext:
    """The forward context of the running forward.

    Raises:
        ContextError: no context is set; check with :func:`is_forward_context_available`.
    """
    context = _forward_context.get()
    if context is None or context.owner is not None:
        raise ContextError(
            "no forward context is set",
            expected="a call inside `with set_forward_context(...)`",
            found="none in this thread or task",
            remedy="wrap the model call in `with graphpass.set_forward_context(...)`",
        )
    return context


def is_forward_context_available() -> bool:
    """Whether :func:`get_forward_context` would return a context here."""
    context = _forward_context.get()
    return context is not None and context.owner is None


class entered:  # noqa: N801 - a context manager, named like one
    """Make an existing context current for the body of the ``with``; the previous one is restored by token."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext | None) -> None:
        self._context = context
        self._token: Token[ForwardContext | None] | None = None

    def __enter__(self) -> ForwardContext:
        self._token = _forward_context.set(self._context)
        return self._context  # type: ignore[return-value]  # None for those who read none

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _forward_context.reset(self._token)


def set_forward_context(
    attn_metadata: Any = None,
    *,
    runtime_mode: CUDAGraphMode | str = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    num_tokens: int | None = None,
    num_tokens_across_dp: Any = None,
    slot_mapping: Any = None,
    is_padding: Any = None,
    extra: Any = None,
) -> entered:
    """Set the forward context for the body of a ``with``.

    Yields the frozen :class:`ForwardContext`. The previous context is restored at the end, also after an exception.

    Raises:
        OptionError: ``runtime_mode`` is no mode and no name of one.
        ContextError: ``runtime_mode`` is a pair, or it is PIECEWISE or FULL and ``batch_descriptor`` is None.
    """
    runtime_mode = CUDAGraphMode.parse(runtime_mode)
    if not runtime_mode.is_valid_runtime_mode():
        raise ContextError(
            "a forward runs in one runtime mode",
            expected="NONE, PIECEWISE or FULL",
            found=str(runtime_mode),
            remedy="let a dispatcher choose: runtime_mode=dispatcher.dispatch(...).mode",
        )
    if runtime_mode and batch_descriptor is None:
        raise ContextError(
            f"runtime mode {runtime_mode} replays the graph of one key",
            expected="batch_descriptor=BatchDescriptor(...)",
            found="None",
            remedy="pass the descriptor that the dispatcher returned: batch_descriptor=step.descriptor",
        )
    return entered(
        ForwardContext(
            attn_metadata=attn_metadata,
            runtime_mode=runtime_mode,
            batch_descriptor=batch_descriptor,
            num_tokens=num_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mapping,
            is_padding=is_padding,
            extra=extra,
        )
    )
