"""Validation of user arguments; the caller chooses the class of the error."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from graphpass.errors import GraphpassError, OptionError, did_you_mean


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
