"""Budgets: the output-token counts that encoder graphs are captured for."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from graphpass.checks import is_integer
from graphpass.errors import EncoderConfigError

__all__ = ["checked_budgets", "fine_budgets", "generate_budgets", "smallest_fitting_budget"]

_BITS_OF_ROUND_BUDGETS = 5


def generate_budgets(minimum: int, maximum: int, *, ratio: float = 2) -> list[int]:
    """A geometric ladder of budgets that includes ``minimum`` and ``maximum``, ascending.

    Args:
        minimum: the smallest budget, in output tokens.
        maximum: the largest budget.
        ratio: ratio of neighbouring budgets. Budgets are rounded down and grow by at least one token.

    Raises:
        EncoderConfigError: a bound is not positive, the minimum is above the maximum, or the ratio is not above 1.
    """
    _refuse_bounds(minimum, maximum)
    if not (ratio > 1 and math.isfinite(ratio)):
        raise EncoderConfigError(
            "budgets do not grow",
            expected="a finite ratio above 1",
            found=f"ratio={ratio!r}",
            remedy="omit ratio for the default of 2",
        )
    budgets = [minimum]
    while (following := max(budgets[-1] + 1, int(budgets[-1] * ratio))) < maximum:
        budgets.append(following)
    return budgets if minimum == maximum else [*budgets, maximum]


def smallest_fitting_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the ascending ``budgets`` that is at least ``tokens``; None if all are smaller."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def fine_budgets(minimum: int, maximum: int, *, max_graphs: int, multiple: int = 1) -> list[int]:
    """The ladder of at most ``max_graphs`` budgets with the least padding in the worst case, ascending.

    It includes the largest budget divided by powers of two, if ``max_graphs`` is large enough. Budgets between them are
    multiples of 1/32 of a power of two, because most images are scaled to round sizes.

    Args:
        minimum: the smallest budget, in output tokens. Smaller batches are padded to it.
        maximum: the largest budget. Both bounds are on the ladder, rounded to a multiple within the range.
        max_graphs: maximum number of budgets.
        multiple: every budget is a multiple of it, as are the output tokens of every item.

    Raises:
        EncoderConfigError: a bound is not positive, no multiple is between them, or ``max_graphs`` is below 1.
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
    """The ladder, ascending, with ``steps`` geometric steps between neighbouring ``stops``, which descend."""
    budgets = set(stops)
    for upper, lower in itertools.pairwise(stops):
        for step in range(1, steps):
            budget = round(lower * (upper / lower) ** (step / steps))
            unit = 1 << max(0, budget.bit_length() - 1 - _BITS_OF_ROUND_BUDGETS)
            budgets.add(min(max(lower, round(budget / unit) * unit), upper))
    return sorted(budgets)


def _worst_padding(budgets: Sequence[int]) -> float:
    """The largest share of padding, which a batch has with one token more than the next smaller budget."""
    return max((1 - (smaller + 1) / larger for smaller, larger in itertools.pairwise(budgets)), default=0.0)


def checked_budgets(budgets: Sequence[int], minimum: int, maximum: int | None = None) -> tuple[int, ...]:
    """Check the user's ``budgets`` and sort them in ascending order.

    Args:
        budgets: the value of the option.
        minimum: output tokens of the model's smallest item.
        maximum: output tokens of the model's largest batch; None: not known yet.

    Raises:
        EncoderConfigError: there are no budgets, a budget is not a positive integer or is a duplicate, a budget exceeds
            ``maximum``, or all are smaller than ``minimum``.
    """
    found = list(budgets) if isinstance(budgets, Iterable) else []
    wrong = [budget for budget in found if not is_integer(budget, at_least=1)]
    twice = sorted({budget for budget in found if budget not in wrong and found.count(budget) > 1})
    if not found or wrong or twice:
        raise EncoderConfigError(
            "token_budgets has a wrong value",
            expected="positive integers, each once",
            found=f"{twice[0]} {found.count(twice[0])} times" if twice else repr(wrong[0] if wrong else budgets),
            remedy="omit token_budgets to infer them from the model",
        )
    if max(found) < minimum or (maximum is not None and max(found) > maximum):
        raise EncoderConfigError(
            "token_budgets do not fit the model",
            expected=f"a largest budget from {minimum}, its smallest item, to {maximum}, its largest batch",
            found=f"{max(found)}",
            remedy="omit token_budgets to infer them from the model, or give the model a larger batch (max_tokens)",
        )
    return tuple(sorted(found))


def _refuse_bounds(minimum: int, maximum: int) -> None:
    if minimum < 1 or maximum < minimum:
        raise EncoderConfigError(
            "the range of budgets is empty",
            expected="1 <= minimum <= maximum",
            found=f"minimum={minimum}, maximum={maximum}",
            remedy="pass the output tokens of the smallest item and of the largest batch",
        )
