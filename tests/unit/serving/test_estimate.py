"""What an estimate says of a ladder, how far it is from what a capture takes; captures within a limit, and progress."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphpass
from graphpass import BatchDescriptor, CUDAGraphMode
from graphpass.progress import capture_progress
from graphpass.serving import MemoryEstimate, MemoryGrowth, traffic
from graphpass.serving.estimate import (
    Key,
    Measured,
    PoolModel,
    Sample,
    capture_within,
    estimate_of,
    estimated,
    keys_to_sample,
)
from graphpass.serving.stats import keys_by_group

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
        (mixed(*range(1, 41), mode=FULL) + decode(*range(1, 41)), {"mixed FULL": [40], "decode FULL": [40]}),
        # The longest sequence counts as the tokens do.
        (decode(4, longest=64) + decode(2, longest=256), {"decode FULL": [2]}),
    ],
)
def test_at_most_three_keys_a_mode_and_one_in_six(keys: list[Key], sizes: dict[str, list[int]]) -> None:
    assert sizes_of(keys_to_sample(keys_by_group(keys))) == sizes


class FakeDevice:
    """A device whose captures cost what a table says, with an allocator that keeps what it has.

    ``costs`` are (bytes needed while a token is computed, bytes kept a graph, bytes kept a token). Its driver takes
    memory for executables in chunks, keeps what they leave, and has some from the start. Meter, runtime, lease, capture
    and copies in one.
    """

    def __init__(
        self,
        costs: dict[str, tuple[int, int, int]],
        *,
        executable: int = 0,
        loaded_once: int = 0,
        cached: int = 0,
        state: int = 0,
        opening: int = 0,
        workspace: int = 0,
        chunk: int = 1,
        left: int = 0,
    ) -> None:
        self.costs, self.executable, self.loaded_once = costs, executable, loaded_once
        self.cached_a_token, self.state = cached, state
        self.pool = self.kept = self.held = self.cached = self.loaded = self.workspace = 0
        self.executables, self.chunk, self.driver = 0, chunk, left
        self.num_copied = 0
        self.captured: list[Key] = []
        self.opening, self.workspace_to_come, self.opened = opening, workspace, False

    def open_pool(self) -> None:
        if not self.opened:
            self.opened, self.pool, self.kept = True, self.opening, self.opening
            self.workspace = self.workspace_to_come

    def reading(self) -> MemoryGrowth:
        return MemoryGrowth(self.pool, self.held + self.cached + self.workspace, 5 * MIB + self.driver_bytes())

    def driver_bytes(self) -> int:
        return self.driver + self.loaded

    def kept_bytes(self) -> int:
        return self.kept

    def settle(self) -> None:
        self.cached = 0

    @property
    def lease(self) -> FakeDevice:
        return self

    runtime = lease

    def recordings(self) -> Sequence[Key]:
        return self.captured[-1:]

    @contextlib.contextmanager
    def copies(self) -> Iterator[Callable[[Sequence[Any]], bool]]:
        self.num_copied = 0
        yield self.add
        self.executables -= self.num_copied

    def add(self, recordings: Sequence[Any]) -> bool:
        assert len(recordings) == 1
        self.num_copied += 1
        self.instantiate()
        return True

    def instantiate(self) -> None:
        """One more executable; the driver gives nothing of its memory back."""
        self.executables += 1
        missing = self.executables * self.executable - self.driver
        self.driver += -(-max(missing, 0) // self.chunk) * self.chunk

    @contextlib.contextmanager
    def throwaway(self) -> Iterator[None]:
        held = (self.pool, self.kept, self.executables, self.opened, self.workspace)
        copied = self.num_copied
        self.pool, self.kept, self.opened = 0, 0, False
        try:
            yield
        finally:
            self.pool, self.kept, self.executables, self.opened, self.workspace = held
            self.executables += self.num_copied - copied
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
        self.pool += max(missing, 0)
        self.kept += kept + kept_a_token * tokens
        self.loaded = self.loaded_once
        self.instantiate()
        return self.reading() - before

    def estimate(self, keys: Sequence[Key]) -> MemoryEstimate:
        groups = keys_by_group(keys)
        return estimated(groups, cast(Any, self), self.capture, self.surroundings, buffer_bytes=7)

    def capture_all(self, keys: Sequence[Key]) -> tuple[MemoryGrowth, int]:
        """What stays taken, and what was taken at most."""
        before, most = self.reading(), 0
        with self.surroundings():
            for key in keys:
                self.capture(key)
                most = max(most, (self.reading() - before).total_bytes)
        self.settle()
        return self.reading() - before, most


LADDERS = st.sets(st.integers(1, 2048), min_size=12, max_size=60)
BYTES = st.integers(0, 1 << 16)
COSTS = st.tuples(BYTES, BYTES, BYTES)


@given(
    LADDERS,
    LADDERS,
    COSTS,
    COSTS,
    st.fixed_dictionaries(dict.fromkeys(("executable", "loaded_once"), BYTES)),
    st.fixed_dictionaries(dict.fromkeys(("state", "opening", "workspace", "left"), BYTES)),
)
def test_costs_that_go_by_the_size_are_met_exactly(
    tokens: set[int],
    requests: set[int],
    of_mixed: tuple[int, int, int],
    of_decode: tuple[int, int, int],
    of_driver: dict[str, int],
    others: dict[str, int],
) -> None:
    device = FakeDevice({"mixed": of_mixed, "decode": of_decode}, cached=9, **of_driver, **others)
    keys = mixed(*tokens) + decode(*requests)
    estimate = device.estimate(keys)
    # The largest key of each group once more, behind each other.
    assert len(device.captured) == sum(len(group.sampled) for group in estimate.groups) + len(estimate.groups)
    assert (device.pool, device.kept, device.executables) == (0, 0, 0), "the throwaway pools are gone"
    growth, peak = device.capture_all(keys)
    # A byte for each key: what is kept between two samples is rounded.
    assert abs(estimate.pool_bytes - growth.pool_bytes) <= len(keys)
    # Executables of a group's samples are made twice: the last group's are there for nothing.
    too_many = len(estimate.groups[-1].sampled) * of_driver["executable"]
    assert growth.total_bytes - len(keys) <= estimate.total_bytes <= growth.total_bytes + len(keys) + too_many
    assert peak - len(keys) <= estimate.peak_bytes <= peak + len(keys) + too_many
    assert estimate.buffer_bytes == 7


def test_what_the_driver_had_left_is_seen_to_be_used_up() -> None:
    """Three samples show nothing; the ladder will take what 30 executables take, less what was there.

    The samples' own executables are there besides.
    """
    device = FakeDevice({"mixed": (0, 0, 0)}, executable=MIB, left=12 * MIB, chunk=2 * MIB)
    keys = mixed(*range(1, 31))
    estimate = device.estimate(keys)
    assert (30 - 12) * MIB <= estimate.groups[0].growth.driver_bytes <= (33 + 1 - 12) * MIB
    assert estimate.spent_bytes == estimate.groups[0].growth.driver_bytes
    assert estimate.total_bytes == device.capture_all(keys)[0].total_bytes == 0


def test_executables_are_made_until_their_size_is_known() -> None:
    device = FakeDevice({"mixed": (0, 0, 0)}, executable=8 * MIB)
    keys = mixed(*range(1, 201))
    estimate = device.estimate(keys)
    assert device.num_copied < 10
    assert estimate.groups[0].growth.driver_bytes == (200 + 3) * 8 * MIB


def test_what_a_block_of_its_own_size_takes_is_counted_once() -> None:
    """The smallest key needs a segment for small blocks, though there is room among the large ones."""
    keys = mixed(*range(1, 19))
    samples = [
        Sample(key, MemoryGrowth(taken), 0) for key, taken in zip(mixed(18, 9, 1), (100 * MIB, 0, 2 * MIB), strict=True)
    ]
    assert estimate_of(keys_by_group(keys), Measured({"mixed PIECEWISE": samples})).pool_bytes == 102 * MIB


def test_it_prints_a_line_for_each_group() -> None:
    device = FakeDevice({"mixed": (100, 0, 0), "decode": (300, 0, 0)}, executable=11)
    estimate = device.estimate(mixed(8, 4) + decode(4, 2))
    assert [row[:2] for row in estimate.tables()[0].rows] == [("mixed PIECEWISE", "2"), ("decode FULL", "2")]
    assert str(estimate).count("mixed PIECEWISE") == str(estimate).count("decode FULL") == 1
    (together,) = estimate.tables()[1].rows
    assert together == ("0", "7", str(-5 * 11), "1200", "1200")


@pytest.mark.parametrize(
    ("seconds", "enough_s", "expected"),
    [([9, 3, 1, 2], 100.0, 2), ([9, 3, 1, 2], 4.0, 2), ([9, 3, 1, 2], 3.0, 3), ([9, 1, 1, 2], 3.0, 1)],
)
def test_the_median_of_as_many_runs_as_take_long_enough(
    seconds: list[int], enough_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = [0.0], iter(seconds)

    def run() -> None:
        now[0] += next(left)

    monkeypatch.setattr(traffic.time, "perf_counter", lambda: now[0])
    assert traffic.timed_s(run, torch.device("cpu"), enough_s=enough_s) == expected


def test_a_run_is_timed_three_times_after_a_warm_up() -> None:
    runs: Iterator[int] = iter(range(100))
    traffic.timed_s(lambda: next(runs), torch.device("cpu"))
    assert next(runs) == 4


NOTHING_KNOWN = PoolModel({}, {}, {})


def keys(*sizes: int) -> list[Key]:
    return [(CUDAGraphMode.FULL, BatchDescriptor(size)) for size in sizes]


class Pool:
    """Grows with each capture by the next number of a list (or by its key's), whatever was captured before."""

    def __init__(self, growths: Sequence[int] | dict[Key, int], held: Sequence[Key] = (), num_bytes: int = 0) -> None:
        self.growths, self.total, self.contents = growths, num_bytes, list(held)
        self.captures = self.drops = self.stays = 0

    def num_bytes(self) -> int:
        return self.total

    def capture(self, key: Key) -> None:
        assert key not in self.contents, "no key is captured twice"
        grows = self.growths
        self.total += grows[key] if isinstance(grows, dict) else grows[self.captures % len(grows)]
        self.captures += 1
        self.contents.append(key)

    def drop(self) -> None:
        self.drops += 1
        self.total, self.contents = self.stays, []

    def fill(self, max_bytes: int, missing: Sequence[Key], model: PoolModel = NOTHING_KNOWN) -> tuple[Key, ...]:
        ways = {"num_bytes": self.num_bytes, "capture": self.capture, "drop": self.drop}
        return capture_within(max_bytes, list(self.contents), missing, model, **ways)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(0, 200),
    st.dictionaries(st.integers(1, 28), st.integers(0, 60)),
)
def test_the_pool_ends_below_the_limit_whatever_it_does(
    growths: list[int], num_missing: int, num_held: int, max_bytes: int, believed: dict[int, int]
) -> None:
    every = keys(*range(num_held + num_missing, 0, -1))
    model = PoolModel({key: believed.get(key[1].num_tokens, 0) for key in every}, {}, {})
    pool = Pool(growths, held=every[:num_held], num_bytes=min(num_held, max_bytes))
    left_out = pool.fill(max_bytes, every[num_held:], model)
    assert pool.num_bytes() <= max_bytes
    assert sorted(map(str, [*left_out, *pool.contents])) == sorted(map(str, every)), "each key is one or the other"
    assert pool.captures <= 5 * len(every)


def test_a_good_model_spares_every_repetition() -> None:
    every = keys(8, 4, 2, 1)
    takes = dict(zip(every, (40, 30, 30, 10), strict=True))
    pool = Pool(takes)
    left_out = pool.fill(85, every, PoolModel(takes, takes, {}))
    assert (left_out, pool.captures, pool.drops) == (tuple(every[2:3]), 3, 0)
    assert pool.num_bytes() == 80


def test_a_pool_that_others_keep_is_not_filled_any_further() -> None:
    pool = Pool([10])
    pool.stays = 30
    assert len(pool.fill(15, keys(8, 4, 2))) == 3
    assert pool.captures == 2


# Progress bars: shown on terminals, unless somebody turns them off.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "progress", "is_shown"),
    [
        (Terminal, None, True),
        (Terminal, False, False),
        (Terminal, True, True),
        (io.StringIO, None, False),
        (io.StringIO, False, False),
        (io.StringIO, True, True),
        (lambda: None, None, False),
    ],
)
def test_a_bar_is_shown_on_a_terminal_or_where_it_is_asked_for(
    stderr: Callable[[], Any], progress: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = stderr()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(capture_progress([1, 2, 3], progress)) == [1, 2, 3]
    assert bool(screen and screen.getvalue()) == is_shown


def test_another_value_is_refused() -> None:
    with pytest.raises(graphpass.errors.OptionError, match="progress"):
        graphpass.graphed(torch.nn.Linear(3, 3), progress="never")
