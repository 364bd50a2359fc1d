"""The forward context: one ContextVar that carries the runtime mode and the batch descriptor into the model.

It is the only ambient value in graphpass. Setting is by token, so contexts nest, and every thread and every asyncio
task sees its own. Read it inside opaque ops: ``ContextVar.get()`` in code that Dynamo traces does not trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from graphpass.errors import ContextError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = [
    "ForwardContext",
    "current_context",
    "entered",
    "get_forward_context",
    "is_forward_context_available",
    "set_forward_context",
    "without_context",
]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ForwardContext:
    """What one forward carries besides its inputs. Two contexts are the same forward only if they are one object.

    Attributes:
        attn_metadata: whatever the model's attention reads; None inside captured regions of a PIECEWISE capture.
        runtime_mode: NONE, PIECEWISE or FULL: the level of wrappers that captures or replays.
        batch_descriptor: the key's padded shape; None only with NONE.
        num_tokens: real token count of this rank, before padding.
        num_tokens_across_dp: token counts of all data-parallel ranks.
        slot_mapping: cache slots that attention writes to, one a token.
        is_padding: True for rows that are padding, shape (num_tokens,).
        extra: anything else the caller's ops read.
        capture: what is recording the code that runs under this context, None outside of a capture. Wrappers set it;
            a wrapper that finds it set passes through, so that of nested wrappers the outer one wins.
        owner: the callable whose auto dispatcher made this context, None for a context that a user set. Only that
            callable, its wrappers and graphpass's own ops see such a context.
    """

    attn_metadata: Any
    runtime_mode: CUDAGraphMode
    batch_descriptor: BatchDescriptor | None
    num_tokens: int | None
    num_tokens_across_dp: Any
    slot_mapping: Any
    is_padding: Any
    extra: Any
    capture: Any = None
    owner: Any = None


_forward_context: ContextVar[ForwardContext | None] = ContextVar("graphpass_forward_context", default=None)
current_context = _forward_context.get
"""The forward context, or None outside of one, also one that an auto dispatcher made: one C call."""


def get_forward_context() -> ForwardContext:
    """The forward context of the running forward.

    Raises:
        ContextError: no context is set; :func:`is_forward_context_available` asks first.
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
    """Make an existing context the current one for the body of the ``with``; restored by token."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context
        self._token: Token[ForwardContext | None] | None = None

    def __enter__(self) -> ForwardContext:
        self._token = _forward_context.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _forward_context.reset(self._token)


@contextmanager
def without_context() -> Iterator[None]:
    """No context is set in the body of the ``with``; restored by token."""
    token = _forward_context.set(None)
    try:
        yield
    finally:
        _forward_context.reset(token)


def set_forward_context(
    attn_metadata: Any = None,
    *,
    runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    num_tokens: int | None = None,
    num_tokens_across_dp: Any = None,
    slot_mapping: Any = None,
    is_padding: Any = None,
    extra: Any = None,
) -> entered:
    """A context manager: the forward context for the body of a ``with``.

    It yields the frozen :class:`ForwardContext`. What was set before comes back afterwards, also after an exception.

    Raises:
        ContextError: ``runtime_mode`` is a pair, or PIECEWISE or FULL came without a descriptor.
    """
    if not isinstance(runtime_mode, CUDAGraphMode) or not runtime_mode.is_valid_runtime_mode():
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
