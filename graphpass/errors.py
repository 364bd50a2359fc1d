"""Typed errors: every message says what was expected, what was found and how to mend it.

Each class also inherits the builtin a caller would catch, so ``except ValueError`` keeps working for bad
arguments and ``except RuntimeError`` for what goes wrong while running.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AgreementError",
    "CaptureError",
    "ContextError",
    "DeviceError",
    "DispatchError",
    "EncoderConfigError",
    "MismatchError",
    "OffloadError",
    "OptionError",
    "OutOfPagesError",
    "PartitionError",
    "PoolBusyError",
    "ShapeError",
    "StaticInputError",
]


class GraphpassError(Exception):
    """Root of every error graphpass raises on purpose.

    Args:
        problem: one sentence that names the thing at fault.
        expected: what would have been accepted.
        found: what was given instead.
        remedy: what to change.
    """

    def __init__(self, problem: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{problem}: expected {expected}; found {found}; remedy: {remedy}")
        self.problem = problem
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.problem, self.expected, self.found, self.remedy))


def _rebuild(kind: type[GraphpassError], problem: str, expected: str, found: str, remedy: str) -> GraphpassError:
    return kind(problem, expected=expected, found=found, remedy=remedy)


class OptionError(GraphpassError, ValueError):
    """An option is unknown, or its value cannot be used."""


class DispatchError(GraphpassError, ValueError):
    """A batch cannot be dispatched as asked."""


class PartitionError(GraphpassError, ValueError):
    """A graph cannot be split as asked."""


class ContextError(GraphpassError, ValueError):
    """The forward context is missing, incomplete, or names a mode that cannot run."""


class ShapeError(GraphpassError, ValueError):
    """A tensor's shape, stride, dtype or a size does not fit the graph it is meant for."""


class CaptureError(GraphpassError, RuntimeError):
    """A region could not be captured, or was asked to replay a key that was never captured."""


class StaticInputError(GraphpassError, RuntimeError):
    """A tensor whose address a graph has baked in came at another address."""


class MismatchError(GraphpassError, RuntimeError):
    """Two runs that have to agree do not: a replay and eager, or real rows under different padding."""


class PoolBusyError(GraphpassError, RuntimeError):
    """A forward started inside another forward of the same pool."""


class OffloadError(GraphpassError, RuntimeError):
    """Weights in host memory cannot be brought to the layers as they run, or cannot be moved there at all."""


class EncoderConfigError(GraphpassError, ValueError):
    """Options of encoder graphs contradict each other or the model, or a model does not keep to its configuration."""


class OutOfPagesError(GraphpassError, RuntimeError):
    """A paged KV cache has fewer free pages than were asked for."""


class AgreementError(GraphpassError, RuntimeError):
    """Data-parallel ranks cannot agree on a step: one died, failed, came too late, or is configured differently."""


class DeviceError(GraphpassError, RuntimeError):
    """Tensors lie on devices that one callable cannot serve."""


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """The known names closest to ``name``, as text for an error's remedy; empty when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=limit, cutoff=0.5)
    return ", ".join(repr(candidate) for candidate in close)
