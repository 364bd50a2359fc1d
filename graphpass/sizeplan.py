"""Chooses the capture sizes that minimize the cost of observed traffic.

A ladder divides the ascending observed sizes into segments, which run at their last size: the work of one is its weight
times the cost of that size. The cheapest division into at most k segments is a dynamic programme over their ends. Two
observations make it exact and fast. Only some sizes can be rungs: those of ascending cost, with traffic. And cuts move
one way: with ascending costs, the best last cut of a longer prefix is never before that of a shorter prefix (the work
of segments satisfies the quadrangle inequality), nor before its own with one rung fewer; each is searched from there
on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from graphpass.errors import OptionError, positive


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Sizes to capture, and the cost of observed traffic with them."""

    sizes: tuple[int, ...]  #: ascending; for use as ``capture_sizes``, or as ``token_budgets`` of an encoder
    expected_cost: float  #: the mean cost of a batch over the traffic, in the unit of the cost function
    #: the share of ``expected_cost`` that graphs for all observed sizes would save, 0 to 1. A batch that is cheapest at
    #: an observed size above its own wastes nothing there.
    waste: float


def plan_sizes(
    histogram: Mapping[int, float], max_graphs: int, *, cost: Callable[[int], float] | None = None
) -> SizePlan:
    """The sizes to capture that give observed traffic the least cost; the result is exact.

    Each batch runs at the smallest planned size that is at least its own, as the dispatcher does. All planned sizes are
    observed sizes, and the largest observed size is always planned. If the cost never falls with the size, no other
    sizes are better; if it falls somewhere, add further candidates with weight 0. Among ladders of equal cost, the one
    with fewer sizes wins, then the one with smaller sizes, compared from the largest down.
    Sums are float64. They are exact if weights and costs are integers and the work with every batch at the largest cost
    is below 2**53.

    Args:
        histogram: observed size (tokens of a batch, for example) → its weight, a count or a share. A size of weight 0
            has no traffic but may be planned; the largest size is always covered.
        max_graphs: the most sizes to plan.
        cost: the cost of one replay at a size in any unit, such as measured milliseconds; called once for each size in
            the histogram. None: the size itself.

    Raises:
        OptionError: the histogram is empty, or has weights of 0 only; a size is no integer of at least 1; a weight or
            a cost is negative or not finite; ``max_graphs`` is below 1.
    """
    max_graphs = positive(max_graphs, "max_graphs", remedy="pass how many graphs time and memory allow")
    sizes, weights = _observed(histogram)
    costs = _finite(
        ((f"the cost of size {size}", size if cost is None else cost(size)) for size in sizes),
        "return the work of one replay, such as its milliseconds",
    )
    # Scaling by powers of two is exact, and sums of values below 1 do not overflow.
    costs, cost_exponent = _scaled(costs)
    weights, _ = _scaled(weights)
    ends, end_weights = _possible_rungs(weights, costs)
    rungs = ends[_cheapest_ends(end_weights, costs[ends], min(max_graphs, len(ends)))]
    work = math.fsum(end_weights * costs[rungs[np.searchsorted(rungs, ends)]])
    unpadded = math.fsum(end_weights * costs[ends])
    return SizePlan(
        tuple(sizes[rung] for rung in rungs),
        math.ldexp(work / math.fsum(weights), cost_exponent),
        1 - unpadded / work if work else 0.0,
    )


def _observed(histogram: Mapping[int, float]) -> tuple[list[int], NDArray[np.float64]]:
    if not isinstance(histogram, Mapping) or not any(value != 0 for value in histogram.values()):
        raise OptionError(
            "there is no traffic to plan sizes for",
            expected="a mapping of at least one size to how often it came",
            found=repr(histogram),
            remedy="count the sizes of real batches: collections.Counter(sizes)",
        )
    remedy = "leave empty batches out, and count whole tokens"
    observed = [(positive(size, "a size of the histogram", remedy=remedy), histogram[size]) for size in histogram]
    observed.sort(key=itemgetter(0))
    sizes = [size for size, _ in observed]
    weights = _finite(
        ((f"the weight of size {size}", weight) for size, weight in observed), "pass how often each size came, or 0"
    )
    return sizes, weights


def _finite(named: Iterable[tuple[str, object]], remedy: str) -> NDArray[np.float64]:
    numbers = []
    for name, value in named:
        try:
            number = float(value) if isinstance(value, SupportsFloat) else math.nan  # a string is no number
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise OptionError(
                f"{name} cannot be used", expected="a finite number of at least 0", found=repr(value), remedy=remedy
            )
        numbers.append(number)
    return np.array(numbers)


def _scaled(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """The values divided by a power of two so that the largest is in [0.5, 1) or 0, and the exponent."""
    _, exponent = math.frexp(values.max())
    return np.ldexp(values, -exponent), exponent


def _possible_rungs(
    weights: NDArray[np.float64], costs: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions of the sizes that an optimal ladder of fewest rungs may have, and the weight that each would serve.

    Their costs ascend strictly, and all weights but the last are positive, so each further rung saves work.
    """
    cheapest_above = np.minimum.accumulate(costs[::-1])[::-1]
    ends = np.flatnonzero(costs == cheapest_above)
    # A rung without traffic at its size can move down by one size. This comes before equal costs are merged: of two
    # sizes of equal cost, the larger one is useful only for traffic between them.
    ends = _with_last(ends, _served(weights, ends) > 0)
    ends = _with_last(ends, np.diff(costs[ends], append=np.inf) > 0)
    return ends, _served(weights, ends)


def _served(weights: NDArray[np.float64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.add.reduceat(weights, np.concatenate(([0], ends[:-1] + 1)))


def _with_last(ends: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.append(ends[:-1][kept[:-1]], ends[-1])


def _cheapest_ends(weights: NDArray[np.float64], costs: NDArray[np.float64], num_rungs: int) -> NDArray[np.int64]:
    """The ends, ascending, of the ``num_rungs`` segments that cover all sizes with the least work.

    Costs ascend, and all weights but the last are positive.
    """
    num_sizes = len(weights)
    if num_rungs == num_sizes:
        return np.arange(num_sizes)
    up_to = np.concatenate(([0.0], np.cumsum(weights)))
    # The least work of each prefix with one rung, then with two, and so on.
    least = up_to * np.concatenate(([0.0], costs))
    cuts = [np.zeros(num_sizes + 1, dtype=np.int64)]  # with one rung, the only segment starts before the first size
    for fewest in range(2, num_rungs + 1):
        least, cut = _with_another_rung(least, cuts[-1], up_to, costs, fewest)
        cuts.append(cut)
    ends = [num_sizes]
    while len(cuts) > 1:
        ends.append(cuts.pop()[ends[-1]])
    return np.array(ends[::-1]) - 1


def _with_another_rung(
    before: NDArray[np.float64],
    cuts_before: NDArray[np.int64],
    up_to: NDArray[np.float64],
    costs: NDArray[np.float64],
    fewest: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The least work of each prefix with one more rung, and the number of sizes before its last segment.

    ``before`` and ``cuts_before`` have ``fewest - 1`` rungs; ``up_to`` is the weight of each prefix. Those shorter than
    ``fewest`` are never read.
    """
    least, cuts, cut = np.zeros_like(before), np.zeros_like(cuts_before), fewest - 1
    for prefix in range(fewest, len(before)):
        cut = max(cut, cuts_before[prefix])
        work = before[cut:prefix] + (up_to[prefix] - up_to[cut:prefix]) * costs[prefix - 1]
        least[prefix] = work.min()
        cut = cuts[prefix] = cut + work.argmin()  # the lowest of equal cuts
    return least, cuts
