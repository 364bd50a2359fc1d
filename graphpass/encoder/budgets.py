"""Budgets: the output-token counts that encoder graphs are captured for."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from graphpass.errors import EncoderConfigError

__all__ = ["checked_budgets", "fine_budgets", "generate_budgets", "smallest_fitting_budget"]

_BITS_OF_ROUND_BUDGETS = 5


def generate_budgets(minimum: int, maximum: int, *, ratio: float = 2) -> list[int]:
    """A geometric ladder from ``minimum`` to ``maximum``, both of them on it.

    Args:
        minimum: the smallest budget, in output tokens.
        maximum: the largest.
        ratio: of neighbours; 2 doubles. Steps are rounded down, and are never smaller than one token.

    Raises:
        EncoderConfigError: a bound is not positive, the minimum is above the maximum, or the ratio is not above 1.
    """
    _refuse_bounds(minimum, maximum)
    if not (ratio > 1 and math.isfinite(ratio)):
        raise EncoderConfigError(
            "budgets do not grow",
            expected="a finite ratio above 1",
            found=f"ratio={ratio!r}",
            remedy="leave it out to double",
        )
    budgets = [minimum]
    while (following := max(budgets[-1] + 1, int(budgets[-1] * ratio))) < maximum:
        budgets.append(following)
    return budgets if minimum == maximum else [*budgets, maximum]


def smallest_fitting_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of ``budgets``, which ascend, that holds ``tokens``; None when none does."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def fine_budgets(minimum: int, maximum: int, *, max_graphs: int, multiple: int = 1) -> list[int]:
    """The finest ladder of at most ``max_graphs`` budgets: the one whose worst batch is padded least.

    The halves of the largest budget are on it, as far as there is room, and between them multiples of 32nds of a power
    of two: images are scaled to round sides more often than not.

    Args:
        minimum: the smallest budget, in output tokens; a batch below it is padded more.
        maximum: the largest; both are on the ladder, rounded to a multiple within the range.
        max_graphs: how many budgets time and memory allow.
        multiple: what every item's output tokens are a multiple of, and so every budget.

    Raises:
        EncoderConfigError: a bound is not positive, no multiple lies between them, or ``max_graphs`` is below 1.
    """
    _refuse_bounds(minimum, maximum)
    _refuse_bounds(-(-minimum // multiple), maximum // multiple)
    if max_graphs < 1:
        raise EncoderConfigError(
            "there is no budget to capture",
            expected="room for at least 1 graph for each path and axis value",
            found=f"room for {max_graphs}",
            remedy="raise max_graphs, or set enable=False",
        )
    minimum, maximum = -(-minimum // multiple), maximum // multiple
    if max_graphs == 1:
        return [maximum * multiple]
    stops = [maximum >> halved for halved in range(maximum.bit_length()) if maximum >> halved > minimum] + [minimum]
    if len(stops) > max_graphs:
        stops = [maximum, minimum]
    ladders = (_ladder_between(stops, steps) for steps in range(1, max_graphs + 1))
    finest = min((ladder for ladder in ladders if len(ladder) <= max_graphs), key=_worst_padding)
    return [budget * multiple for budget in finest]


def _ladder_between(stops: Sequence[int], steps: int) -> list[int]:
    """``stops``, which descend, with as many equal steps between each two of them as there is room for, ascending."""
    budgets = set(stops)
    for upper, lower in itertools.pairwise(stops):
        for step in range(1, steps):
            budget = round(lower * (upper / lower) ** (step / steps))
            unit = 1 << max(0, budget.bit_length() - 1 - _BITS_OF_ROUND_BUDGETS)
            budgets.add(min(max(lower, round(budget / unit) * unit), upper))
    return sorted(budgets)


def _worst_padding(budgets: Sequence[int]) -> float:
    """The share of a budget that is padding in a batch of one token more than the next smaller one."""
    return max((1 - (smaller + 1) / larger for smaller, larger in itertools.pairwise(budgets)), default=0.0)


def checked_budgets(budgets: Sequence[int], minimum: int, maximum: int | None = None) -> tuple[int, ...]:
    """``budgets``, ascending.

    Args:
        budgets: as the user gave them.
        minimum: the output tokens of the smallest item of the model.
        maximum: the largest batch that the model takes; None: not known yet.

    Raises:
        EncoderConfigError: there is none, one is no positive integer, one is there twice, one exceeds ``maximum``, or
            none holds even the smallest item.
    """
    found = list(budgets) if isinstance(budgets, Iterable) else []
    wrong = [budget for budget in found if type(budget) is not int or budget < 1]
    twice = sorted({budget for budget in found if budget not in wrong and found.count(budget) > 1})
    if not found or wrong or twice:
        raise EncoderConfigError(
            "token_budgets cannot be used",
            expected="positive integers, each once",
            found=f"{twice[0]} {found.count(twice[0])} times" if twice else repr(wrong[0] if wrong else budgets),
            remedy="leave token_budgets out to have them inferred from the model",
        )
    if max(found) < minimum or (maximum is not None and max(found) > maximum):
        raise EncoderConfigError(
            "token_budgets do not fit the model",
            expected=f"a largest budget from {minimum}, its smallest item, to {maximum}, its largest batch",
            found=f"{max(found)}",
            remedy="leave token_budgets out to have them inferred from the model",
        )
    return tuple(sorted(found))


def _refuse_bounds(minimum: int, maximum: int) -> None:
    if minimum < 1 or maximum < minimum:
        raise EncoderConfigError(
            "the range of budgets is empty",
            expected="1 <= minimum <= maximum",
            found=f"minimum={minimum}, maximum={maximum}",
            remedy="give the output tokens of the smallest item and of the largest batch",
        )
