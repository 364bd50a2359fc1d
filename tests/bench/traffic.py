"""Simulated traffic against the policy of exact graphs: ``python -m tests.bench.traffic``; needs no GPU.

Times are tables, a + b * ceil(size / tile), in the range of what was measured on an H100. *Waste* is the time that
padding costs, the time at the key minus the time at the size, summed over calls. The best choice in hindsight knows the
whole traffic: it captures a size exactly before its first call where that costs less than its padding.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from graphpass.dispatch.owngraphs import OwnGraphs, RecurringSize, RecurringSizes, Serve
from graphpass.dispatch.recurring import step_above
from tests.bench.timing import table_of

CALLS = (600, 10_000)
CAPTURE_S = 0.05
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """The time of a replay by size: ``base_s + step_s * ceil(size / tile)``."""

    name: str
    base_s: float
    step_s: float
    tile: int = 1
    compile_s: float = 0.0  #: what compilations took: captures may take a share of that, too

    def seconds(self, size: int) -> float:
        """Of one replay over a graph of this size."""
        return self.base_s + self.step_s * math.ceil(size / self.tile)


MODELS = (
    Model("ViT-B/16", 0.5e-3, 0.088e-3),
    Model("ViT-B/16, compile counted", 0.5e-3, 0.088e-3, compile_s=20.0),
    Model("BERT-base x 64", 0.45e-3, 0.043e-3),
    Model("tiles of 8", 0.5e-3, 0.7e-3, tile=8),
)


def uniform(rng: random.Random, number: int, calls: int) -> int:
    """Sizes 1 to 32, all alike."""
    return rng.randint(1, 32)


def zipf(rng: random.Random, number: int, calls: int) -> int:
    """Sizes 1 to 32 in a random order of frequency, the n-th with weight 1/n."""
    order = random.Random(7).sample(range(1, 33), 32)
    return rng.choices(order, [1 / rank for rank in range(1, 33)])[0]


def lognormal(rng: random.Random, number: int, calls: int) -> int:
    """Lengths up to 512, few of which recur."""
    return min(512, max(1, round(rng.lognormvariate(4.3, 0.8))))


def drifting(rng: random.Random, number: int, calls: int) -> int:
    """Eight sizes at a time, of 1 to 64; the window moves four times."""
    low = 1 + 14 * (4 * number // calls)
    return low + rng.randrange(8)


TRAFFIC: dict[str, Callable[[random.Random, int, int], int]] = {
    "uniform": uniform,
    "zipf": zipf,
    "lognormal": lognormal,
    "drifting": drifting,
}


@dataclass(slots=True)
class Outcome:
    """What one simulation cost."""

    calls: list[float] = field(default_factory=list)  #: seconds of each call
    padded: list[float] = field(default_factory=list)  #: seconds of each call, captures and exact graphs left out
    exact_s: float = 0.0  #: seconds of all calls over graphs of their own size
    waste_s: float = 0.0
    captures: int = 0
    compile_s: float = 0.0
    best_s: float = 0.0  #: waste and captures of the best choice in hindsight
    settled: int | None = None  #: calls after which the next 200 were within 1 % of exact graphs
    first: int | None = None  #: the call of the first exact capture

    @property
    def cost_s(self) -> float:
        """Waste and captures."""
        return self.waste_s + self.captures * CAPTURE_S

    @property
    def whole_s(self) -> float:
        """All calls and compilations."""
        return sum(self.calls) + self.compile_s

    @property
    def is_good(self) -> bool:
        """At most twice the best choice in hindsight, or 5 % of the whole."""
        return self.cost_s <= 2 * self.best_s or self.cost_s <= 0.05 * self.whole_s


class Simulation:
    """One callable with the default ladder, whose ladder keys are captured before the traffic starts.

    Exact graphs have 2 MiB each, and all of them at most ``limit`` bytes.
    """

    def __init__(self, model: Model, limit: int = 256 * MIB) -> None:
        self.model, self.now_s, self.num_calls = model, model.compile_s, 0
        self.policy = _Policy(self, limit)
        self.exact: set[int] = set()
        self._timed: set[int] = set()

    def call(self, size: int) -> tuple[float, bool]:
        """The seconds of one call, and whether it captured."""
        key = step_above(size)
        self._time(key)
        if key == size:
            return self._ran(self.model.seconds(size)), False
        recurring = self.policy.size_of((size,), (), size, key)
        has_captured = self.policy.serve(recurring) is Serve.CAPTURE
        if has_captured:
            self.exact.add(size)
            self._time(size)
            self.policy.captured_own(recurring, CAPTURE_S, 0, 2 * MIB)
        seconds = self.model.seconds(size if size in self.exact else key)
        self._ran(seconds + CAPTURE_S * has_captured)
        recurring.replays += 1
        return seconds + CAPTURE_S * has_captured, has_captured

    def _ran(self, seconds: float) -> float:
        self.now_s += seconds
        self.num_calls += 1
        return seconds

    def _time(self, size: int) -> None:
        if size not in self._timed:
            self._timed.add(size)
            self.policy.times_of(())[0].add(size, lambda: self.model.seconds(size))
            self.policy.captured_any(CAPTURE_S, 0, 2 * MIB)


class _Policy(RecurringSizes):
    """The policy of one simulation, over its calls and its time."""

    def __init__(self, simulation: Simulation, limit: int) -> None:
        self._simulation = simulation
        super().__init__(OwnGraphs(), limit, clock=self.spent)

    def calls(self) -> int:
        return self._simulation.num_calls

    def spent(self) -> float:
        return self._simulation.now_s

    def drop(self, size: RecurringSize, losses: int = 0) -> None:
        self._simulation.exact.discard(size.rows)
        super().drop(size, losses)


def simulated(model: Model, traffic: str, calls: int, seed: int = 0, limit: int = 256 * MIB) -> Outcome:
    """The cost of so many calls of one traffic."""
    rng = random.Random(seed)
    sizes = [TRAFFIC[traffic](rng, number, calls) for number in range(calls)]
    simulation, outcome = Simulation(model, limit), Outcome(compile_s=model.compile_s)
    waste: list[float] = []
    for number, size in enumerate(sizes):
        seconds, has_captured = simulation.call(size)
        if has_captured and outcome.first is None:
            outcome.first = number
        outcome.captures += has_captured
        outcome.calls.append(seconds)
        waste.append(seconds - CAPTURE_S * has_captured - model.seconds(size))
        outcome.padded.append(model.seconds(step_above(size)))
    outcome.waste_s, outcome.exact_s = sum(waste), sum(map(model.seconds, sizes))
    for size, times in Counter(sizes).items():
        outcome.best_s += min(CAPTURE_S, times * (model.seconds(step_above(size)) - model.seconds(size)))
    outcome.settled = _settled(waste, [model.seconds(size) for size in sizes])
    return outcome


def _settled(waste: Sequence[float], exact: Sequence[float], window: int = 200) -> int | None:
    for start in range(0, len(waste) - window, 10):
        if sum(waste[start : start + window]) <= 0.01 * sum(exact[start : start + window]):
            return start
    return None


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    rows = [
        (model.name, traffic, calls, *described([simulated(model, traffic, calls, seed) for seed in seeds]))
        for model, traffic, calls in itertools.product(MODELS, TRAFFIC, CALLS)
    ]
    columns = (
        "model | traffic | calls | captures | waste + captures, ms | best in hindsight | of the best | of the whole | "
        "padding alone | first | within 1 % | P99 ms | without | good"
    )
    Console(width=190).print(table_of("", columns, rows))


def described(found: Sequence[Outcome]) -> Iterator[str]:
    """The figures of one row."""

    def mean(of: Callable[[Outcome], float]) -> float:
        return statistics.fmean(map(of, found))

    settled = [outcome.settled for outcome in found]
    yield f"{mean(lambda o: o.captures):.0f}"
    yield f"{mean(lambda o: o.cost_s) * 1e3:.0f}"
    yield f"{mean(lambda o: o.best_s) * 1e3:.0f}"
    yield f"{mean(lambda o: o.cost_s / max(o.best_s, 1e-9)):.2f}"
    yield f"{mean(lambda o: o.cost_s / o.whole_s):.1%}"
    yield f"{mean(lambda o: (sum(o.padded) - o.exact_s) / sum(o.padded)):.1%}"
    yield str(min((outcome.first for outcome in found if outcome.first is not None), default="-"))
    yield str(max(s for s in settled if s is not None)) if None not in settled else "-"
    yield f"{mean(lambda o: percentile(o.calls, 0.99)) * 1e3:.2f}"
    yield f"{mean(lambda o: percentile(o.padded, 0.99)) * 1e3:.2f}"
    yield str(sum(o.is_good for o in found))


if __name__ == "__main__":
    main()
