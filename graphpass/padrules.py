"""Rules for the padding of an input, and how they fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch

from graphpass.errors import OptionError, ShapeError

__all__ = ["PadRule", "PaddingParts", "checked_rule", "fill_by_function", "fill_parts", "is_rule", "padding_parts"]

PadRule = float | int | bool | Literal["repeat"] | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""A value, ``"repeat"`` (the last real slice), or ``f(real tensor, padded shape) -> padded tensor``."""

PaddingParts: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor | float]]
"""(part of the padding, its contents)."""


def is_rule(rule: Any) -> bool:
    """Whether ``rule`` is one of the kinds of :data:`PadRule`."""
    return rule == "repeat" or isinstance(rule, (bool, int, float)) or callable(rule)


def checked_rule(name: str, rule: Any) -> PadRule:
    """``rule``, if it is valid for input ``name``.

    Raises:
        OptionError: it is not a :data:`PadRule`.
    """
    if is_rule(rule):
        return rule  # type: ignore[no-any-return]
    raise OptionError(
        f"padding of input {name!r} is no padding rule",
        expected="a number, 'repeat', or a function of (real tensor, padded shape)",
        found=repr(rule),
        remedy="leave it out for the default",
    )


def padding_parts(buffer: torch.Tensor, real_sizes: Mapping[int, int], rule: PadRule) -> PaddingParts:
    """The parts of a buffer's padding, and the contents of each, in the order in which :func:`fill_parts` fills them.

    Args:
        buffer: the padded tensor; its real entries are the first along each dimension.
        real_sizes: {dimension: number of real entries} of the dimensions that may be padded.
        rule: a value, or ``"repeat"``, which is zero where there are no real entries.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    for dim, real in real_sizes.items():
        padded = buffer.shape[dim]
        if real == padded:
            continue
        rest = buffer.narrow(dim, real, padded - real)
        if rule != "repeat":
            parts.append((rest, cast(float, rule)))
            buffer = buffer.narrow(dim, 0, real)
        elif real:  # later dimensions overwrite their own padding in this part
            parts.append((rest, buffer.narrow(dim, real - 1, 1).expand_as(rest)))  # guard: encoder_padding_last
        else:
            parts.append((rest, 0))
    return parts


def fill_parts(parts: PaddingParts) -> None:
    """Fill the padding of a buffer whose real entries are in place."""
    for rest, contents in parts:
        if isinstance(contents, torch.Tensor):
            rest.copy_(contents)
        else:
            rest.fill_(contents)


def fill_by_function(
    buffer: torch.Tensor, real: torch.Tensor, function: Callable[[torch.Tensor, tuple[int, ...]], Any], *, name: str
) -> None:
    """Fill a buffer, real entries and padding, with the result of a padding function.

    Args:
        buffer: the padded tensor.
        real: its real entries.
        function: returns a tensor of the second argument's shape.
        name: the input, in the error.

    Raises:
        ShapeError: the function returned something else.
    """
    padded = function(real, tuple(buffer.shape))
    if not isinstance(padded, torch.Tensor) or padded.shape != buffer.shape:
        raise ShapeError(
            f"the padding function of {name} returned another shape",
            expected=str(tuple(buffer.shape)),
            found=str(tuple(padded.shape)) if isinstance(padded, torch.Tensor) else repr(padded),
            remedy="return a tensor of the shape in the function's second argument",
        )
    buffer.copy_(padded)
