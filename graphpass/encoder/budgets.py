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


def fine_budgets(minimum: int, maximum: int, *, max_graphs: int, max_padding: float) -> list[int]:
    """The coarsest ladder that pads a batch by at most ``max_padding``, in at most ``max_graphs`` budgets.

    Where that many budgets do not suffice, the ladder of ``max_graphs`` budgets that pads least.

    Args:
        minimum: the smallest budget, in output tokens; a batch below it is padded more.
        maximum: the largest.
        max_graphs: how many budgets time and memory allow.
        max_padding: the share of a replay's tokens that may be padding: (budget - tokens) / budget.

    Raises:
        EncoderConfigError: a bound is not positive, the minimum is above the maximum, or ``max_graphs`` is below 1.
    """
    _refuse_bounds(minimum, maximum)
    if max_graphs < 1:
        raise EncoderConfigError(
            "there is no budget to capture",
            expected="room for at least 1 graph",
            found=f"max_graphs={max_graphs}",
            remedy="raise max_graphs, or set enable=False",
        )
    budgets = _ladder_padding_at_most(minimum, maximum, max_padding)
    if len(budgets) <= max_graphs:
        return budgets
    if max_graphs == 1:
        return [maximum]
    fits, too_fine = 1.0, max_padding
    for _ in range(50):  # halves the gap: below the resolution of whole tokens after some 20 rounds
        middle = (fits + too_fine) / 2
        if len(_ladder_padding_at_most(minimum, maximum, middle)) <= max_graphs:
            fits = middle
        else:
            too_fine = middle
    return _ladder_padding_at_most(minimum, maximum, fits)


def _ladder_padding_at_most(minimum: int, maximum: int, padding: float) -> list[int]:
    """From the top down: below each budget the largest one whose successor, as the smallest batch, pads that little."""
    budgets = [maximum]
    while budgets[-1] > minimum:
        # A batch of one token more than the next smaller budget runs in this one.
        least = math.ceil(budgets[-1] * (1 - padding) - 1e-9)
        budgets.append(max(minimum, min(budgets[-1], least) - 1))
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
