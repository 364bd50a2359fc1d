"""Rules for the padding of an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from graphpass.errors import OptionError

PadRule = float | int | bool | Literal["repeat"] | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""A value, ``"repeat"`` (the last real slice), or ``f(real tensor, padded shape) -> padded tensor``."""


def is_rule(rule: Any) -> bool:
    """Whether ``rule`` is one of the kinds of :data:`PadRule`."""
    return rule == "repeat" or isinstance(rule, (bool, int, float)) or callable(rule)


def checked_rule(name: str, rule: Any) -> PadRule:
    """``rule``, if it is valid for input ``name``."""
    if is_rule(rule):
        return rule  # type: ignore[no-any-return]
    raise OptionError(
        f"padding of input {name!r} is no padding rule",
        expected="a number, 'repeat', or a function of (real tensor, padded shape)",
        found=repr(rule),
        remedy="leave it out for the default",
    )
