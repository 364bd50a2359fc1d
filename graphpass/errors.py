"""Typed errors, and checks of user arguments that raise them.

Every message states the problem, the expected value, the actual value and a remedy. Each class also inherits a builtin
exception: ``except ValueError`` catches errors in arguments and options, and ``except RuntimeError`` catches failures
at run time.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

__all__ = [
    "AgreementError",
    "CaptureError",
    "CommandError",
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
    """Base class of all graphpass errors.

    Args:
        problem: one clause that names the object or argument at fault.
        expected: the values that graphpass accepts.
        found: the actual value.
        remedy: the change that the caller should make.
    """

    def __init__(self, problem: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{problem}: expected {expected}; found {found}; remedy: {remedy}")
        self.problem = problem
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        parts = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        return (partial(type(self), **parts), (self.problem,))


class OptionError(GraphpassError, ValueError):
    """An option is unknown, or its value is invalid."""


class DispatchError(GraphpassError, ValueError):
    """A batch, a key or a limit of the dispatcher is invalid, or no allowed mode can run the batch."""


class PartitionError(GraphpassError, ValueError):
    """A graph cannot be split into regions with the requested rules."""


class ContextError(GraphpassError, ValueError):
    """The forward context is missing, incomplete, or names a mode that cannot run."""


class ShapeError(GraphpassError, ValueError):
    """A tensor's shape, stride or dtype, or a size, does not match what a graph expects."""


class CaptureError(GraphpassError, RuntimeError):
    """A region could not be captured, or a replay names a key that was never captured.

    Args:
        problem, expected, found, remedy: see :class:`GraphpassError`.
        where: region, operation and line of a failed capture, without its key; empty for other errors.
    """

    def __init__(self, problem: str, *, expected: str, found: str, remedy: str, where: str = "") -> None:
        super().__init__(problem, expected=expected, found=found, remedy=remedy)
        self.where = where


class StaticInputError(GraphpassError, RuntimeError):
    """A static input is not at the address that a graph recorded for it."""


class MismatchError(GraphpassError, RuntimeError):
    """Two runs that must produce equal results differ: replay and eager, or real rows under different padding."""


class PoolBusyError(GraphpassError, RuntimeError):
    """A forward started inside another forward of the same pool."""


class OffloadError(GraphpassError, RuntimeError):
    """Weights cannot be moved to host memory, or cannot be copied to the device while the layers run."""


class EncoderConfigError(GraphpassError, ValueError):
    """Encoder options contradict each other or the model, or the model contradicts its own configuration."""


class CommandError(GraphpassError, ValueError):
    """An argument of the command line is invalid, or the model, configuration or file that it names cannot be used."""


class OutOfPagesError(GraphpassError, RuntimeError):
    """A paged KV cache has fewer free pages than an allocation requests."""


class AgreementError(GraphpassError, RuntimeError):
    """Data-parallel ranks cannot agree on a step: one died, failed, timed out, or has another configuration."""


def unreachable(cause: str) -> AgreementError:
    """The error of a rank that has waited for the others."""
    return AgreementError(
        "the other ranks cannot be reached",
        expected="an answer from every rank within the timeout",
        found=cause,
        remedy="find out why a rank ended, hung, or called another method; then restart all ranks",
    )


class DeviceError(GraphpassError, RuntimeError):
    """Tensors are on a combination of devices that one callable does not support."""


def named(called: object) -> str:
    """A callable for an error: the name of a function, the class of a module."""
    return getattr(called, "__qualname__", None) or type(getattr(called, "_orig_mod", called)).__qualname__


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A remedy that suggests up to three names of ``known`` that resemble ``name``; ``otherwise`` if none does."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise


# -- checks; the caller chooses the class of the error ----------------------------------------------------------------


def is_integer(value: object, *, at_least: int) -> bool:
    """Whether ``value`` is a Python int of at least ``at_least``; False for bools and numpy integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_seconds(value: object) -> bool:
    """Whether ``value`` is a finite Python number above 0; False for bools."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def positive(
    value: Any,
    name: str,
    *,
    at_least: int = 1,
    remedy: str | None = None,
    error: type[GraphpassError] = OptionError,
) -> int:
    """``value`` as an int of at least ``at_least``; accepts every type with ``__index__`` except bool.

    The error names the value by ``name``. Its remedy is "pass <at_least> or more" if ``remedy`` is None.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise error(
            f"{name} cannot be used",
            expected=f"an integer of at least {at_least}",
            found=repr(value),
            remedy=remedy or f"pass {at_least} or more",
        )
    return number


def one_of(
    value: object,
    known: Collection[object],
    problem: str,
    *,
    remedy: str,
    error: type[GraphpassError] = OptionError,
) -> None:
    """Raise ``error`` unless ``value`` is in ``known``; its remedy suggests known names that resemble the value."""
    if value in known:
        return
    *others, last = map(repr, known)
    names = [name for name in known if isinstance(name, str)] if isinstance(value, str) else []
    raise error(
        problem,
        expected=f"{', '.join(others)} or {last}" if others else last,
        found=repr(value),
        remedy=did_you_mean(str(value), names, otherwise=remedy),
    )
