"""Budgets: the output-token counts that encoder graphs are captured for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from graphpass.errors import EncoderConfigError

__all__ = ["checked_budgets", "fine_budgets", "generate_budgets", "smallest_fitting_budget"]


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

    The halves of the largest budget are on it, as far as there is room: many models scale images to sides that are
    powers of two, or nearly.

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
    fits, too_fine = 1.0, 0.0
    for _ in range(40):  # halves the gap until it is below what a single token makes
        middle = (fits + too_fine) / 2
        if len(_ladder_padding_at_most(stops, middle)) <= max_graphs:
            fits = middle
        else:
            too_fine = middle
    return [budget * multiple for budget in _ladder_padding_at_most(stops, fits)]


def _ladder_padding_at_most(stops: Sequence[int], padding: float) -> list[int]:
    """The coarsest ladder over ``stops``, which descend, that pads no batch by more than this share of its budget."""
    budgets = [stops[0]]
    for stop in stops[1:]:
        while budgets[-1] > stop:
            # From the top down: a batch of one token more than the next smaller budget runs in this one.
            least = math.ceil(budgets[-1] * (1 - padding) - 1e-9)
            budgets.append(max(stop, min(budgets[-1], least) - 1))
    return budgets[::-1]


def checked_budgets(budgets: Sequence[int], minimum: int, maximum: int) -> tuple[int, ...]:
    """``budgets``, ascending.

    Args:
        budgets: as the user gave them.
        minimum: the output tokens of the smallest item of the model.
        maximum: the largest batch that the model takes.

    Raises:
        EncoderConfigError: there is none, one is no positive integer, one is there twice, one exceeds ``maximum``, or
            none holds even the smallest item.
    """
    found = list(budgets)
    wrong = [budget for budget in found if type(budget) is not int or budget < 1]
    twice = sorted({budget for budget in found if budget not in wrong and found.count(budget) > 1})
    if not found or wrong or twice:
        raise EncoderConfigError(
            "token_budgets cannot be used",
            expected="positive integers, each once",
            found=f"{twice[0]} {found.count(twice[0])} times" if twice else repr(wrong[0] if wrong else found),
            remedy="leave token_budgets out to have them inferred from the model",
        )
    if max(found) > maximum or max(found) < minimum:
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
