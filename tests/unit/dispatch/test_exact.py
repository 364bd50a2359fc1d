"""Which sizes get a graph of their own: the policy by itself, over counts and times that a test makes up."""

from __future__ import annotations

import itertools
import math

import pytest

from graphpass.dispatch.owngraphs import (
    CALLS_BETWEEN,
    LEAST_BYTES,
    MOST_LOSSES,
    OwnGraphs,
    RecurringSize,
    RecurringSizes,
    Serve,
    Times,
    bytes_allowed,
)
from tests.bench.traffic import CALLS, MIB, MODELS, TRAFFIC, Model, simulated

TIMES = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}


class Traffic(RecurringSizes):
    """Calls of one callable whose time is known: the policy, and what it is told."""

    def __init__(self, shared: OwnGraphs | None = None, limit: int = 64 * MIB, capture_s: float = 100.0) -> None:
        self.num_calls, self.spent_s = 0, 0.0
        super().__init__(shared or OwnGraphs(), limit, clock=self.calls)
        self.capture_s = capture_s
        for size, seconds in TIMES.items():
            self.times_of(())[0].add(size, lambda seconds=seconds: seconds)
            self.captured_any(capture_s, 0, MIB)
        self.dropped_rows: list[int] = []

    def calls(self) -> int:
        return self.num_calls

    def spent(self) -> float:
        return self.spent_s

    def size(self, real: int, key: int) -> RecurringSize:
        return self.size_of((real,), (), real, key)

    def call(self, size: RecurringSize, times: int = 1) -> bool:
        """Call it so often; True as soon as the policy wants a graph of its own."""
        for _ in range(times):
            self.num_calls += 1
            is_captured = self.serve(size) is Serve.CAPTURE
            if is_captured:
                self.captured_own(size, self.capture_s, 0, MIB)
            size.replays += 1
            if is_captured:
                return True
        return False

    def drop(self, size: RecurringSize, losses: int = 0) -> None:
        self.dropped_rows.append(size.rows)
        super().drop(size, losses)


def captured_after(traffic: Traffic, size: RecurringSize, most: int = 1000) -> int | None:
    """The number of replays under padding at which the size is captured."""
    for number in range(most):
        if traffic.call(size):
            return number
    return None


def test_times_are_monotone_between_measurements_and_proportional_outside() -> None:
    times = Times(is_proportional=True)
    assert times.at(4) is None
    for rows, seconds in {4: 2.0, 8: 1.9, 16: 4.0}.items():
        times.add(rows, lambda seconds=seconds: seconds)
    assert [times.at(rows) for rows in (2, 4, 6, 8, 12, 16, 32)] == [1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 8.0]
    assert (times.measured(8), times.measured(6)) == (1.9, None)


def test_captures_are_apart() -> None:
    traffic = Traffic()
    traffic.spent_s = 1e9
    sizes = [traffic.size(real, 8) for real in (5, 6, 7)]
    captured = [traffic.num_calls for _ in range(200) for size in sizes if traffic.call(size)]
    assert len(captured) == 3
    assert all(later - earlier >= CALLS_BETWEEN for earlier, later in itertools.pairwise(captured))


def test_the_most_costly_size_goes_first() -> None:
    traffic = Traffic()
    traffic.spent_s = 1e9
    cheap, costly = traffic.size(7, 8), traffic.size(5, 8)
    cheap.replays = costly.replays = 100
    assert not traffic.call(cheap)
    assert traffic.call(costly)
    assert not traffic.call(cheap, CALLS_BETWEEN - 1)
    assert traffic.call(cheap, 2)


def test_an_exact_graph_that_is_no_faster_loses_and_tells_of_sizes_above() -> None:
    traffic = Traffic()
    size = traffic.size(6, 8)
    assert captured_after(traffic, size) == 50
    traffic.times_of(())[0].add(6, lambda: 7.95)
    assert traffic.serve(size) is Serve.PADDED
    assert traffic.dropped_rows == [6]
    assert captured_after(traffic, size) is None
    assert captured_after(traffic, traffic.size(7, 8)) is None, "7 rows take as long as 6 at least"


def test_a_verdict_waits_for_the_time() -> None:
    traffic = Traffic()
    size = traffic.size(6, 8)
    captured_after(traffic, size)
    ready: list[float] = []
    traffic.times_of(())[0].add(6, lambda: ready[0] if ready else None)
    assert traffic.serve(size) is Serve.OWN
    assert size.asks_at <= size.replays
    ready.append(6.0)
    assert traffic.serve(size) is Serve.OWN
    assert size.asks_at > 1e9


@pytest.mark.parametrize(("limit", "captured"), [(0, 0), (MIB, 1), (2 * MIB, 2), (3 * MIB, 3)])
def test_bytes_bound_the_graphs_of_all_callables(limit: int, captured: int) -> None:
    shared = OwnGraphs()
    callables = [Traffic(shared, limit) for _ in range(3)]
    for traffic in callables:  # equal callables: none saves more than another, so none makes room
        traffic.spent_s = 1e9
        captured_after(traffic, traffic.size(6, 8), most=200)
    assert shared.num_bytes() == captured * MIB


def test_at_the_bound_the_graph_that_saves_least_makes_room() -> None:
    traffic = Traffic(limit=MIB)
    traffic.spent_s = 1e9
    rare, often = traffic.size(7, 8), traffic.size(5, 8)
    assert traffic.call(rare, 30)
    assert traffic.call(often, 200)
    assert traffic.dropped_rows == [7]
    for _ in range(200):
        assert not traffic.call(rare)
        traffic.call(often, 4)
    assert traffic.dropped_rows == [7]
    assert [graph.num_bytes for graph in traffic.graphs()] == [MIB]


def test_a_size_whose_graph_is_lost_twice_stays_padded() -> None:
    traffic = Traffic()
    traffic.spent_s = 1e9
    size = traffic.size(6, 8)
    for _ in range(MOST_LOSSES):
        assert captured_after(traffic, size) is not None
        traffic.drop(size, losses=1)
    assert captured_after(traffic, size) is None


def test_the_default_bound_is_a_share_of_the_device() -> None:
    assert bytes_allowed(None, 80 << 30, has_ladder=False) == int(0.01 * (80 << 30))
    assert bytes_allowed(None, 0, has_ladder=False) == bytes_allowed(None, 1 << 30, has_ladder=False) == LEAST_BYTES
    assert bytes_allowed(0, 80 << 30, has_ladder=False) == 0
    assert (bytes_allowed(None, 80 << 30, has_ladder=True), bytes_allowed(7, 80 << 30, has_ladder=True)) == (None, 7)


def test_a_size_padded_far_is_faster_without_a_graph() -> None:
    traffic = Traffic()
    near, far = traffic.size(7, 8), traffic.size(5, 8)
    assert not far.is_faster_without(), "no run was timed"
    for rows, seconds in {4: 5.0, 8: 9.0}.items():
        traffic.times_of(())[1].add(rows, lambda seconds=seconds: seconds)
    assert far.is_faster_without()
    assert not near.is_faster_without()
    assert not traffic.size(1, 2).is_faster_without(), "small runs take as long as the least that was timed"


# -- simulated traffic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_waste_and_captures_are_near_the_best_in_hindsight(model: Model, traffic: str, calls: int) -> None:
    outcome = simulated(model, traffic, calls)
    assert outcome.is_good, f"{outcome.cost_s:.2f} s, best {outcome.best_s:.2f} s, whole {outcome.whole_s:.2f} s"


def in_lockstep(most: int = 0, limit: int = 64 * MIB) -> tuple[Traffic, RecurringSize]:
    """A callable whose ranks need ``most`` bytes more than this one."""
    traffic = Traffic(limit=limit)
    traffic._most = lambda number: number + most
    return traffic, traffic.size(5, 8)


def test_ranks_in_lockstep_capture_after_a_number_of_replays_and_keep_the_graph() -> None:
    traffic, size = in_lockstep()
    assert captured_after(traffic, size) == 16
    traffic.times_of(())[0].add(5, lambda: 1e9)
    assert {traffic.serve(size) for _ in range(50)} == {Serve.OWN}
    (graph,) = traffic.graphs()
    assert graph.saves == math.inf, "another callable, whose times differ from rank to rank, must not take its place"


def test_bytes_of_the_fullest_rank_bound_all() -> None:
    traffic, size = in_lockstep(most=64 * MIB)
    assert captured_after(traffic, size) is None


# -- without insertions ---------------------------------------------------------------------------------------------


class Made(Traffic):
    """A callable whose padding is made; compiling it without insertions takes so long."""

    def __init__(self, plain_s: float | None = 400.0) -> None:
        super().__init__(capture_s=10.0)
        self._plain_s = plain_s

    def owned(self, real: int, key: int, seconds: float) -> RecurringSize:
        """A size with a graph of its own that takes so long."""
        size = self.size(real, key)
        self.captured_own(size, 10.0, 0, MIB)
        self.times_of(())[0].add(real, lambda: seconds)
        return size

    def plain_after(self, size: RecurringSize, most: int = 10_000) -> int | None:
        """The number of replays of its own graph at which the size is captured without insertions."""
        for number in range(most):
            self.num_calls += 1
            served = self.serve(size)
            size.replays += 1
            if served is Serve.PLAIN:
                return number
            assert served is Serve.OWN
        return None

    def captured_plain(self, size: RecurringSize, seconds: float) -> Serve:
        """Capture the size anew, which then takes so long."""
        self.compiled_plain(400.0, is_compiled=True)
        self.drop(size)
        self.captured_own(size, 10.0, 0, MIB)
        self.times_of(())[0].add(size.rows, lambda: seconds)
        size.replays += 1
        return self.serve(size)


def test_sizes_pay_for_the_compilation_together_and_for_captures_alone() -> None:
    traffic = Made()
    first, second = traffic.owned(6, 8, 4.0), traffic.owned(5, 8, 4.0)
    second.replays += 1025
    assert traffic.plain_after(first) == pytest.approx(1025, abs=2)
    assert traffic.captured_plain(first, 3.0) is Serve.OWN
    third = traffic.owned(7, 8, 4.0)
    assert traffic.plain_after(third) == pytest.approx(50, abs=2), "10 s are 5 % of 50 replays of 4 s"


@pytest.mark.parametrize(("plain_s", "goes_on"), [(3.7, True), (3.9, False)])
def test_insertions_that_cost_little_stay_in_the_other_graphs(plain_s: float, goes_on: bool) -> None:
    traffic = Made()
    first, second = traffic.owned(6, 8, 4.0), traffic.owned(7, 8, 4.0)
    traffic.plain_after(first)
    assert traffic.captured_plain(first, plain_s) is Serve.OWN
    assert (traffic.plain_after(second) is not None) == goes_on
    assert traffic.plain_after(first) is None, "it is compared once"
