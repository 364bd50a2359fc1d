"""What an estimate says of a ladder: which keys it asks, and how far it is from what a capture takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass import BatchDescriptor, CUDAGraphMode, GraphRuntime
from graphpass.manager.devicememory import MemoryGrowth, MemoryReading
from graphpass.manager.memory import Key, Measured, MemoryEstimate, Sample, estimate_of, estimated, keys_to_sample

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MIB = 1 << 20


def mixed(*sizes: int, mode: CUDAGraphMode = PIECEWISE) -> list[Key]:
    return [(mode, BatchDescriptor(size)) for size in sorted(sizes, reverse=True)]


def decode(*sizes: int, **extra: int) -> list[Key]:
    more = tuple(extra.items())
    return [(FULL, BatchDescriptor(n, n, uniform=True, extra=more)) for n in sorted(sizes, reverse=True)]


def sizes_of(chosen: dict[str, list[Key]]) -> dict[str, list[int]]:
    return {name: [key.num_tokens for _, key in keys] for name, keys in chosen.items()}


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ([], {}),
        (mixed(4), {"mixed PIECEWISE": [4]}),
        (mixed(*range(1, 12)), {"mixed PIECEWISE": [11]}),
        (mixed(*range(1, 13)), {"mixed PIECEWISE": [12, 1]}),
        (mixed(*range(1, 19)), {"mixed PIECEWISE": [18, 9, 1]}),
        (mixed(*range(1, 501)), {"mixed PIECEWISE": [500, 250, 1]}),
        (mixed(8, 4, 2) + decode(4, 2), {"mixed PIECEWISE": [8], "decode FULL": [4]}),
        # Three of one mode, not of one group.
        (
            mixed(*range(1, 41), mode=FULL) + decode(*range(1, 41)),
            {"mixed FULL": [40], "decode FULL": [40]},
        ),
        # The longest sequence counts as the tokens do.
        (decode(4, longest=64) + decode(2, longest=256), {"decode FULL": [2]}),
    ],
)
def test_at_most_three_keys_a_mode_and_one_in_six(keys: list[Key], sizes: dict[str, list[int]]) -> None:
    assert sizes_of(keys_to_sample(keys)) == sizes


@given(st.sets(st.integers(1, 4096), max_size=80), st.sets(st.integers(1, 512), max_size=80))
def test_the_largest_of_every_group_is_asked_and_few_others(tokens: set[int], requests: set[int]) -> None:
    keys = mixed(*tokens) + decode(*requests)
    chosen = keys_to_sample(keys)
    assert [keys[0] for keys in chosen.values()] == [group[0] for group in (mixed(*tokens), decode(*requests)) if group]
    for group in chosen.values():
        mode = group[0][0]
        of_mode = [key for key in keys if key[0] is mode]
        assert len(set(group)) == len(group) <= min(3, max(1, len(of_mode) // 6))


class FakeDevice:
    """A device whose captures cost what a table says, with an allocator that rounds and keeps what it has.

    ``costs`` are (bytes needed while a token is computed, bytes kept a graph, bytes kept a token). Meter, runtime and
    capture in one.
    """

    def __init__(
        self,
        costs: dict[str, tuple[int, int, int]],
        *,
        block: int = 1,
        executable: int = 0,
        loaded_once: int = 0,
        cached: int = 0,
        state: int = 0,
        opening: int = 0,
    ) -> None:
        self.costs, self.block, self.executable, self.loaded_once = costs, block, executable, loaded_once
        self.cached_a_token, self.state = cached, state
        self.pool = self.kept = self.held = self.cached = self.driver = self.loaded = 0
        self.captured: list[Key] = []
        self.opening, self.opened = opening, False

    def open_pool(self) -> None:
        if not self.opened:
            self.opened, self.pool, self.kept = True, self.opening, self.opening

    def reading(self) -> MemoryReading:
        reserved = self.pool + self.held + self.cached
        return MemoryReading(5 * MIB + reserved + self.driver + self.loaded, reserved, self.pool)

    def kept_bytes(self) -> int:
        return self.kept

    def settle(self) -> None:
        self.cached = 0

    @contextlib.contextmanager
    def throwaway(self) -> Iterator[None]:
        held = (self.pool, self.kept, self.driver, self.opened)
        self.pool, self.kept, self.opened = 0, 0, False
        try:
            yield
        finally:
            self.pool, self.kept, self.driver, self.opened = held
            self.cached = 0

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """Holds a copy of the state; the allocator keeps its memory afterwards."""
        self.held = self.state
        yield
        self.cached, self.held = self.cached + self.held, 0

    def capture(self, key: Key) -> MemoryGrowth:
        name = "decode" if key[1].uniform else "mixed"
        needed, kept, kept_a_token = self.costs[name]
        before, tokens = self.reading(), key[1].num_tokens
        self.open_pool()
        self.captured.append(key)
        self.cached = max(self.cached, self.cached_a_token * tokens)
        missing = self.kept + kept + (kept_a_token + needed) * tokens - self.pool
        self.pool += -(-max(missing, 0) // self.block) * self.block
        self.kept += kept + kept_a_token * tokens
        self.driver, self.loaded = self.driver + self.executable, self.loaded_once
        return self.reading() - before

    def estimate(self, keys: Sequence[Key]) -> MemoryEstimate:
        runtime = cast(GraphRuntime, self)
        return estimated(keys, runtime, cast(Any, self), self.capture, self.surroundings, buffer_bytes=7)

    def capture_all(self, keys: Sequence[Key]) -> MemoryGrowth:
        before = self.reading()
        with self.surroundings():
            for key in keys:
                self.capture(key)
        return self.reading() - before


LADDERS = st.sets(st.integers(1, 2048), min_size=12, max_size=60)
BYTES = st.integers(0, 1 << 16)


@given(LADDERS, LADDERS, st.tuples(BYTES, BYTES, BYTES), st.tuples(BYTES, BYTES, BYTES), BYTES, BYTES, BYTES, BYTES)
def test_costs_that_go_by_the_size_are_met_exactly(
    tokens: set[int],
    requests: set[int],
    of_mixed: tuple[int, int, int],
    of_decode: tuple[int, int, int],
    executable: int,
    loaded_once: int,
    state: int,
    opening: int,
) -> None:
    device = FakeDevice(
        {"mixed": of_mixed, "decode": of_decode},
        executable=executable,
        loaded_once=loaded_once,
        state=state,
        cached=9,
        opening=opening,
    )
    keys = mixed(*tokens) + decode(*requests)
    estimate = device.estimate(keys)
    # The largest key of each group once more, behind each other.
    assert len(device.captured) == sum(len(group.sampled) for group in estimate.groups) + len(estimate.groups)
    assert (device.pool, device.kept, device.driver) == (0, 0, 0), "the throwaway pools are gone"
    growth = device.capture_all(keys)
    # A byte for each key: what is kept between two samples is rounded.
    assert abs(estimate.pool_bytes - growth.pool_bytes) <= len(keys)
    assert sum(group.growth.cached_bytes for group in estimate.groups) == growth.cached_bytes
    # The first key's driver bytes hold what is loaded once, and so does what estimating has spent.
    assert abs(estimate.total_bytes - growth.total_bytes) <= len(keys)
    assert estimate.buffer_bytes == 7


@given(
    LADDERS,
    st.tuples(st.integers(0, MIB), st.integers(0, MIB), st.integers(0, 1 << 12)),
    st.sampled_from([2 * MIB, 20 * MIB]),
    st.integers(0, MIB),
    st.integers(0, 40 * MIB),
    st.sampled_from([0, 34 * MIB]),
)
def test_an_allocator_that_rounds_is_met_within_a_tenth_or_32_mib(
    tokens: set[int], costs: tuple[int, int, int], block: int, executable: int, loaded_once: int, opening: int
) -> None:
    device = FakeDevice(
        {"mixed": costs}, block=block, executable=executable, loaded_once=loaded_once, cached=100, opening=opening
    )
    keys = mixed(*tokens)
    estimate, growth = device.estimate(keys), device.capture_all(keys)
    assert abs(estimate.total_bytes - growth.total_bytes) <= max(growth.total_bytes / 10, 32 * MIB)


@given(LADDERS, st.lists(st.tuples(BYTES, BYTES), min_size=3, max_size=3))
def test_the_pool_never_shrinks_and_holds_at_least_what_the_samples_took(
    tokens: set[int], measured: list[tuple[int, int]]
) -> None:
    keys = mixed(*tokens)
    chosen = keys_to_sample(keys)["mixed PIECEWISE"]
    samples = [
        Sample(key, MemoryGrowth(pool), min(kept, pool)) for key, (pool, kept) in zip(chosen, measured, strict=False)
    ]
    estimate = estimate_of(keys, Measured({"mixed PIECEWISE": samples}))
    after = [estimate.pool.bytes_after(keys[:count]) for count in range(len(keys) + 1)]
    assert after == sorted(after)
    assert after[-1] == estimate.pool_bytes >= sum(sample.growth.pool_bytes for sample in samples)


def test_what_a_block_of_its_own_size_takes_is_counted_once() -> None:
    """The smallest key needs a segment for small blocks, though there is room among the large ones."""
    keys = mixed(*range(1, 19))
    samples = [
        Sample(key, MemoryGrowth(taken), 0) for key, taken in zip(mixed(18, 9, 1), (100 * MIB, 0, 2 * MIB), strict=True)
    ]
    assert estimate_of(keys, Measured({"mixed PIECEWISE": samples})).pool_bytes == 102 * MIB


def test_a_group_that_finds_room_adds_nothing_to_the_pool() -> None:
    """Its largest key, behind that of the first group, says what there was room for."""
    keys = mixed(8, 4) + decode(4, 2)
    groups = {
        "mixed PIECEWISE": [Sample(keys[0], MemoryGrowth(80, 50, 7), 0)],
        "decode FULL": [Sample(keys[2], MemoryGrowth(60, 60, 3), 0)],
    }
    behind = [Sample(keys[0], MemoryGrowth(80, 50, 0), 0), Sample(keys[2], MemoryGrowth(0, 10, 0), 0)]
    estimate = estimate_of(keys, Measured(groups, behind), spent_bytes=4)
    assert [(group.name, group.num_keys, group.growth) for group in estimate.groups] == [
        ("mixed PIECEWISE", 2, MemoryGrowth(80, 50, 7 + 3)),
        ("decode FULL", 2, MemoryGrowth(0, 10, 3 + 3)),
    ]
    assert estimate.total_bytes == 80 + 60 + 16 - 4


def test_a_group_that_finds_no_room_in_one_piece_adds_what_it_took() -> None:
    keys = mixed(8, 4) + decode(4, 2)
    groups = {
        "mixed PIECEWISE": [Sample(keys[0], MemoryGrowth(80), 0)],
        "decode FULL": [Sample(keys[2], MemoryGrowth(60), 0)],
    }
    behind = [Sample(keys[0], MemoryGrowth(80), 0), Sample(keys[2], MemoryGrowth(60), 0)]
    estimate = estimate_of(keys, Measured(groups, behind, opening=30))
    assert [group.growth.pool_bytes for group in estimate.groups] == [30 + 80, 60]
    assert estimate.pool.bytes_after(keys[2:]) == 30 + 60 + 60, "never less than what it took behind the others"


def test_driver_bytes_that_an_earlier_estimate_saw_are_remembered() -> None:
    keys = mixed(8, 4)
    groups = {"mixed PIECEWISE": [Sample(keys[0], MemoryGrowth(), 0)]}
    estimate = estimate_of(keys, Measured(groups, driver_bytes_a_key={"mixed PIECEWISE": 5.0}))
    assert estimate.groups[0].growth.driver_bytes == 10
    assert estimate.driver_bytes_a_key == {"mixed PIECEWISE": 5.0}


def test_it_prints_a_line_for_each_group() -> None:
    device = FakeDevice({"mixed": (100, 0, 0), "decode": (300, 0, 0)}, executable=11)
    estimate = device.estimate(mixed(8, 4) + decode(4, 2))
    assert [row[:2] for row in estimate.tables()[0].rows] == [("mixed PIECEWISE", "2"), ("decode FULL", "2")]
    assert str(estimate).count("mixed PIECEWISE") == str(estimate).count("decode FULL") == 1
    (together,) = estimate.tables()[1].rows
    assert together == ("0", str(1200 + 4 * 11), "7")


def test_a_ladder_without_keys_takes_nothing() -> None:
    device = FakeDevice({})
    estimate = device.estimate([])
    assert (estimate.groups, estimate.total_bytes, device.captured) == ((), 0, [])
