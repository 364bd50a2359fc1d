"""Choosing sizes: the ladder that pads observed traffic least.

A batch is padded to the next rung, so a ladder cuts the ascending observed sizes into segments, each of which runs at
its last size. The work of one segment is its weight times the cost of that size, and the cheapest cut into at most k
segments is a dynamic programme over the segments' ends. Two observations make it exact and fast:

- *Only some sizes can be rungs.* If a larger size costs less, both run better at the larger one, so an optimal ladder
  has rungs of ascending cost only. Sizes that never came, and sizes as expensive as the next, only add graphs.
- *Cuts move one way.* With costs that ascend, the best last cut of a longer prefix never lies before that of a shorter
  one (the work of segments satisfies the quadrangle inequality). Each prefix is searched between the cuts of its
  neighbours: k n log n steps in all, whatever the cost was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from graphpass.errors import OptionError

__all__ = ["SizePlan", "plan_sizes"]


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Sizes to capture, and what observed traffic costs over them.

    Attributes:
        sizes: ascending; ``capture_sizes``, or ``token_budgets`` of an encoder.
        expected_cost: of one batch, in units of the cost: the mean over the traffic.
        waste: the share of it that is padding, 0 to 1: what graphs for all observed sizes would save. A batch that is
            cheapest at a larger observed size than its own has none there.
    """

    sizes: tuple[int, ...]
    expected_cost: float
    waste: float


def plan_sizes(
    histogram: Mapping[int, float], max_graphs: int, *, cost: Callable[[int], float] | None = None
) -> SizePlan:
    """The sizes to capture so that observed traffic costs least, exactly.

    Every batch runs at the smallest planned size that holds it, as the dispatcher decides. Planned sizes are observed
    ones, and the largest is always among them. Where a larger size never costs less, no other sizes do better; for a
    cost that falls somewhere, list sizes to consider with weight 0. Of ladders that cost the same the one with fewer
    sizes is taken, then the one with the smaller sizes, compared from the largest down.
    Sums are those of float64: nothing is rounded as long as weights and costs are integers and the work, with every
    batch at the largest cost, stays below 2**53.

    Args:
        histogram: observed size (tokens of a batch, say) → how often it came, as a count or a share. Weight 0: it
            never came, but may be planned, and as the largest is covered.
        max_graphs: the most sizes to plan.
        cost: the work of one replay at a size, in any unit, such as measured milliseconds; asked once for each
            observed size. None: the size itself.

    Raises:
        OptionError: the histogram is empty, or has weights of 0 only; a size is no integer of at least 1; a weight or
            a cost is negative or not finite; ``max_graphs`` is below 1.
    """
    if not _counts(max_graphs):
        raise OptionError(
            "max_graphs cannot be used",
            expected="an integer of at least 1",
            found=repr(max_graphs),
            remedy="pass how many graphs time and memory allow",
        )
    sizes, weights = _observed(histogram)
    costs = _costs(sizes, (lambda size: size) if cost is None else cost)
    # Powers of two change no digit, and sums of what is below 1 do not overflow.
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


def _counts(value: object) -> bool:
    """Whether it is an integer of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _observed(histogram: Mapping[int, float]) -> tuple[list[int], NDArray[np.float64]]:
    """The sizes, ascending, and their weights."""
    if not isinstance(histogram, Mapping) or not histogram:
        raise OptionError(
            "there is no traffic to plan sizes for",
            expected="a mapping of at least one size to how often it came",
            found=repr(histogram),
            remedy="count the sizes of real batches: collections.Counter(sizes)",
        )
    for size in histogram:
        if not _counts(size):
            raise OptionError(
                "a size of the histogram cannot be captured",
                expected="integers of at least 1",
                found=repr(size),
                remedy="leave empty batches out, and count whole tokens",
            )
    sizes = sorted(map(int, histogram))
    weights = _finite(
        ((f"the weight of size {size}", histogram[size]) for size in sizes), "pass how often each size came, or 0"
    )
    if not weights.any():
        raise OptionError(
            "no size of the histogram ever came",
            expected="at least one weight above 0",
            found=f"weights of 0 for {len(sizes)} sizes",
            remedy="count the sizes of real batches",
        )
    return sizes, weights


def _costs(sizes: Iterable[int], cost: Callable[[int], float]) -> NDArray[np.float64]:
    return _finite(
        ((f"the cost of size {size}", cost(size)) for size in sizes),
        "return the work of one replay, such as its milliseconds",
    )


def _finite(named: Iterable[tuple[str, object]], remedy: str) -> NDArray[np.float64]:
    """The values as floats.

    Raises:
        OptionError: one is no number, negative, infinite or NaN.
    """
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
    """The values by a power of two, the largest of them in [0.5, 1) unless it is 0, and its exponent."""
    _, exponent = math.frexp(values.max())
    return np.ldexp(values, -exponent), exponent


def _possible_rungs(
    weights: NDArray[np.float64], costs: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """DictSlots of the sizes that an optimal ladder of fewest rungs may have, and the weight each takes from below too.

    Their costs ascend strictly, and all weights but the last one's are positive: another rung always saves something.
    """
    cheapest_above = np.minimum.accumulate(costs[::-1])[::-1]
    ends = np.flatnonzero(costs == cheapest_above)
    # A rung without traffic of its own is better off one lower. Before equal costs are merged: of two that cost the
    # same the larger one is worth having only for traffic in between.
    ends = _with_last(ends, _served(weights, ends) > 0)
    ends = _with_last(ends, np.diff(costs[ends], append=np.inf) > 0)
    return ends, _served(weights, ends)


def _served(weights: NDArray[np.float64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each segment that ends there."""
    return np.add.reduceat(weights, np.concatenate(([0], ends[:-1] + 1)))


def _with_last(ends: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Those of ``ends`` that are kept, and the last one."""
    return np.append(ends[:-1][kept[:-1]], ends[-1])


def _cheapest_ends(weights: NDArray[np.float64], costs: NDArray[np.float64], num_rungs: int) -> NDArray[np.int64]:
    """The places, ascending, where exactly ``num_rungs`` segments end that cover everything at the least work.

    Args:
        weights: of each size; positive but for the last.
        costs: of each size, ascending.
        num_rungs: at most the number of sizes.
    """
    num_sizes = len(weights)
    if num_rungs == num_sizes:
        return np.arange(num_sizes)
    up_to = np.concatenate(([0.0], np.cumsum(weights)))
    # Of the first n sizes: the least work of one rung, then of two, and so on.
    least = up_to * np.concatenate(([0.0], costs))
    cuts = []
    for fewest in range(2, num_rungs + 1):
        least, cut = _with_another_rung(least, up_to, costs, fewest)
        cuts.append(cut)
    ends = [num_sizes]
    while cuts:
        ends.append(cuts.pop()[ends[-1]])
    return np.array(ends[::-1]) - 1


def _with_another_rung(
    before: NDArray[np.float64], up_to: NDArray[np.float64], costs: NDArray[np.float64], fewest: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The least work of each prefix with one rung more, and how many sizes then lie below its last segment.

    Args:
        before: the least work of each prefix, by its number of sizes, with ``fewest - 1`` rungs.
        up_to: the weight of each prefix.
        costs: of the sizes, ascending.
        fewest: rungs of the result; shorter prefixes have no meaning there, and are never read.
    """
    num_sizes, num_rows = len(costs), len(costs) - fewest + 1
    least, cuts = np.zeros_like(before), np.zeros(num_sizes + 1, dtype=np.int64)
    stride = 1 << num_rows.bit_length()
    # Row r is the prefix of fewest - 1 + r sizes. Row 0 and what is beyond the last row bound the others' cuts.
    bounds = np.full(stride + 1, num_sizes - 1)
    bounds[0] = fewest - 1
    while stride := stride // 2:  # every second row that is left, between neighbours that are known
        rows = np.arange(stride, num_rows + 1, 2 * stride)
        prefixes = rows + (fewest - 1)
        lowest, highest = bounds[rows - stride], np.minimum(bounds[rows + stride], prefixes - 1)
        lengths = highest - lowest + 1
        starts = np.cumsum(lengths) - lengths
        tried = np.arange(lengths.sum()) - np.repeat(starts - lowest, lengths)
        above = np.repeat(up_to[prefixes], lengths) - up_to[tried]
        work = before[tried] + above * np.repeat(costs[prefixes - 1], lengths)
        least[prefixes] = np.minimum.reduceat(work, starts)
        cheapest = np.flatnonzero(work == np.repeat(least[prefixes], lengths))
        bounds[rows] = cuts[prefixes] = tried[cheapest[np.searchsorted(cheapest, starts)]]  # the lowest of equals
    return least, cuts
