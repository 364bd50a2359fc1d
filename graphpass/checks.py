"""Checks of values that users pass; each raises the caller's class of error."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from graphpass.errors import GraphpassError, OptionError, nearest

__all__ = ["is_integer", "one_of", "positive"]


def is_integer(value: object, *, at_least: int) -> bool:
    """Whether ``value`` is an int of at least ``at_least``; a bool is not, and neither is an integer of numpy."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def positive(
    value: Any,
    name: str,
    *,
    at_least: int = 1,
    remedy: str | None = None,
    error: type[GraphpassError] = OptionError,
) -> int:
    """``value`` as an int; every type with ``__index__`` is accepted, numpy integers for example, except bool.

    Args:
        value: the user's value.
        name: the name of the value in the error.
        at_least: the smallest valid integer.
        remedy: what the user should change; None: pass a valid integer.
        error: the class of the error.

    Raises:
        error: ``value`` is no integer, or below ``at_least``.
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
    """Raise if ``value`` is none of the known values.

    Args:
        value: the user's value.
        known: the valid values, in the order of the error's text; at least one.
        problem: the first part of the error's text.
        remedy: what the user should change if no known name is close to ``value``.
        error: the class of the error.

    Raises:
        error: ``value`` is none of ``known``; the remedy suggests the nearest known names.
    """
    if value in known:
        return
    *others, last = map(repr, known)
    close = nearest(value, [name for name in known if isinstance(name, str)]) if isinstance(value, str) else ""
    raise error(
        problem,
        expected=f"{', '.join(others)} or {last}" if others else last,
        found=repr(value),
        remedy=f"did you mean {close}?" if close else remedy,
    )
