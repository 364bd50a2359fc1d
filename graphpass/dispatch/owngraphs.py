"""Which padded sizes get graphs of their own, when, and what these may cost: for callables, managers and encoders.

A callable decides by itself, see :class:`RecurringSizes`: each replay at a larger key costs the time at the key minus
the time at the size. Once that has cost as much as a capture, a capture costs at most twice the best choice in
hindsight; before that, captures are made as long as all of them take a small share of the time spent. Managers and
encoders capture when asked, the sizes that are :func:`due`. A graph is kept if it :func:`is_faster`, and within one
bound of bytes, see :class:`OwnGraphs`.

Times are seconds, or rows where nothing is timed (the CPU tape).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from graphpass.ledger import Reason, Row

LEAST_REPLAYS = 3
CALLS_BETWEEN = 20
"""Calls from one capture to the next: a server's tail latency must not show a series of them."""
SHARE_OF_TIME = 0.05
LEAST_BYTES = 64 << 20
MOST_LOSSES = 2
"""After so many losses of its graph, padding keeps a size."""
_SHARE_OF_DEVICE = 0.01
_HALF_LIFE = 1024  # calls
# What a run without a graph costs the host beyond a replay, at least; its time on the device does not contain it.
_LAUNCHES_S = 1e-4
_FASTER_WITHOUT = 0.9
_NOISE = 0.01  # of a measured time; a smaller gain is none
_COST_OF_INSERTIONS = 0.05  # of the time of a graph; a smaller one is not worth another artifact
_SLACK = 0.5  # a size goes before others that cost up to twice as much
_HYSTERESIS = 1.25  # a graph makes room only for one that saves this much more
_REPLAYS_A_CAPTURE = 16  # where nothing is timed
_MOST_SIZES = 4096
_NEVER = math.inf
NO_ROOM = Reason("sizes that recur stay padded: the graphs for other sizes take graph_bytes", "raise graph_bytes")

Seconds = Callable[[], float | None]
"""The median seconds of a graph's replay; None while the device has not finished them."""
_Size = TypeVar("_Size", bound=Hashable)


def due(served: Iterable[tuple[_Size, int, int]]) -> list[_Size]:
    """The sizes that padding has served often enough, the most padded first; of (size, replays, padding of one)."""
    # guard: adapted_after_replays
    padding = {size: times * each for size, times, each in served if times >= LEAST_REPLAYS}
    return sorted(padding, key=padding.__getitem__, reverse=True)


def is_faster(own_s: float, padded_s: float) -> bool:
    """Whether a size's own graph takes less time than the padded one; products of matrices step in tiles."""
    return own_s < (1 - _NOISE) * padded_s  # guard: exact_no_faster


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_allowed(given: int | None, device_bytes: int, *, has_ladder: bool) -> int | None:
    """The option ``graph_bytes``, or its default for a device with ``device_bytes`` of memory (0 if unknown).

    None: no graphs of their own, because the user declared which sizes are captured.
    """
    if given is not None:
        return given
    # guard: exact_beside_declared
    return None if has_ladder else max(LEAST_BYTES, int(_SHARE_OF_DEVICE * device_bytes))


class CaptureBytes:
    """What captures took of the pool and the driver, in the mean.

    The driver takes memory for several executables at once, so the mean counts for each, at least.
    """

    def __init__(self) -> None:
        self._captures = self._pool_bytes = self._driver_bytes = 0

    def add(self, pool_bytes: int, driver_bytes: int) -> None:
        """Record the growth of a capture."""
        self._captures += 1
        self._pool_bytes += pool_bytes
        self._driver_bytes += driver_bytes

    def mean(self) -> tuple[int, int]:
        """Bytes of the pool and of the driver."""
        captures = max(1, self._captures)
        return max(0, self._pool_bytes) // captures, max(0, self._driver_bytes) // captures

    def charged(self, pool_bytes: int, driver_bytes: int) -> int:
        """What counts for a graph whose capture took this."""
        return pool_bytes + max(driver_bytes, self.mean()[1])


class OwnGraph(NamedTuple):
    """The graph of a size that recurs."""

    num_bytes: int  #: what counts for it
    saves: float  #: seconds in a second
    drop: Callable[[], None]  #: drop it as soon as no forward uses its pool


class _HasGraphs(Protocol):
    def graphs(self) -> list[OwnGraph]: ...


class OwnGraphs:
    """The graphs for sizes that recur on one device, of all runtimes of the process: one bound holds for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: weakref.WeakSet[_HasGraphs] = weakref.WeakSet()

    @classmethod
    def on(cls, device: Hashable) -> OwnGraphs:
        """Those of a device."""
        return _ON_DEVICES.setdefault(device, cls())

    def adopt(self, owner: _HasGraphs) -> None:
        """Count the graphs of ``owner``, by weak reference."""
        with self._lock:
            self._owners.add(owner)

    def graphs(self) -> list[OwnGraph]:
        """All graphs."""
        with self._lock:
            owners = list(self._owners)
        return [graph for owner in owners for graph in owner.graphs()]

    def num_bytes(self) -> int:
        """Bytes of all graphs."""
        return sum(graph.num_bytes for graph in self.graphs())

    def has_room(self, num_bytes: int, limit: int, saves: float) -> bool:
        """Whether a graph of ``num_bytes`` fits, if need be after one that saves less a second has been dropped."""
        graphs = self.graphs()
        missing = sum(graph.num_bytes for graph in graphs) + num_bytes - limit
        if missing <= 0:  # guard: exact_bytes
            return True
        least = min(graphs, key=lambda graph: graph.saves, default=None)
        if least is None or least.num_bytes < missing or least.saves * _HYSTERESIS >= saves:  # guard: exact_saves_least
            return False
        least.drop()
        return self.num_bytes() + num_bytes <= limit  # not yet, if a forward uses its pool


_ON_DEVICES: dict[Hashable, OwnGraphs] = {}


# -- times -------------------------------------------------------------------------------------------------------------


class Times:
    """Times by rows, as measured; monotone between the measured ones.

    Where ``is_proportional``, they shrink below the least measured rows. ``launches_s`` is added to each.
    """

    def __init__(self, *, is_proportional: bool, launches_s: float = 0.0) -> None:
        self._is_proportional, self._launches_s = is_proportional, launches_s
        self._measured: dict[int, float] = {}
        self._pending: dict[int, Seconds] = {}
        self._rows: list[int] = []
        self._times: list[float] = []

    def add(self, rows: int, seconds: Seconds) -> None:
        """Add the time of a graph of so many rows, which may be known later."""
        self._pending[rows] = seconds
        self._measured.pop(rows, None)

    def measured(self, rows: int) -> float | None:
        """The time that was measured at exactly these rows; None if none was, or not yet."""
        self._read()
        return self._measured.get(rows)

    def at(self, rows: int) -> float | None:
        """The time at ``rows``; None before the first measurement."""
        self._read()
        if not self._rows:
            return None
        place = bisect.bisect_left(self._rows, rows)
        if place == len(self._rows):
            return self._times[-1] * rows / self._rows[-1]
        if place == 0:
            return self._times[0] * rows / self._rows[0] if self._is_proportional else self._times[0]
        (low, high), (least, most) = self._rows[place - 1 : place + 1], self._times[place - 1 : place + 1]
        return least + (most - least) * (rows - low) / (high - low)

    def _read(self) -> None:
        ready = {rows: found for rows, seconds in list(self._pending.items()) if (found := seconds()) is not None}
        if not ready:
            return
        for rows, seconds in ready.items():
            self._measured[rows] = seconds + self._launches_s
            self._pending.pop(rows, None)
        self._rows = sorted(self._measured)
        self._times = list(itertools.accumulate((self._measured[rows] for rows in self._rows), max))


# -- by itself ---------------------------------------------------------------------------------------------------------


class Serve(Enum):
    """What serves a call of a size."""

    PADDED = "padding"
    CAPTURE = "a graph of its own, which the call captures"
    OWN = "its own graph"
    PLAIN = "its own graph, which the call captures anew, without what makes padding neutral"
    WITHOUT = "a run without a graph"


@dataclass(slots=True, eq=False)
class RecurringSize:
    """One size of calls that a padded key serves. A call increments ``replays``, and asks at ``asks_at``."""

    real: tuple[int, ...]
    rows: int  #: product of the real sizes of padded fields
    key_rows: int  #: the same of the padded key
    replayed: Times  #: of the graphs of all keys that differ from this size in padded fields only
    run: Times  #: of the same without a graph, which may be none
    asks_at: float  #: the number of replays from which on the policy is asked at the next call
    replays: int = 0  #: over the padded graph, and over the graph of this size
    start: int = 0  #: replays when its padding or its own graph began
    forgotten: float = 0.0  #: replays that were too long ago to count for the present rate
    losses: int = 0  #: times that its graph could not serve a call, because a static input was another one
    own_bytes: int | None = None  #: what counts for its own graph; None while it has none
    #: the time of its own graph with insertions, where those after it contain none; None where they do
    insertions_s: float | None = None

    def gain(self) -> float:
        """What a replay over a graph of its own saves, by the times so far; 0 before the key was timed."""
        at_key, at_size = self.replayed.at(self.key_rows), self.replayed.at(self.rows)
        if at_key is None or at_size is None:
            return 0.0
        return at_key - at_size if is_faster(at_size, at_key) else 0.0

    def is_faster_without(self) -> bool:
        """Whether a run without a graph takes clearly less time than the padded graph, as with a lot of padding."""
        at_key, at_size = self.replayed.at(self.key_rows), self.run.at(self.rows)
        if at_key is None or at_size is None:
            return False
        return at_size < _FASTER_WITHOUT * at_key  # guard: faster_without

    def cost(self) -> float:
        """What its padding has cost."""
        return (self.replays - self.start) * self.gain()

    def recent_cost(self) -> float:
        """What its padding costs at present, by the replays that are not long ago."""
        return (self.replays - self.forgotten) * self.gain()


class RecurringSizes:
    """Decides for one callable which sizes get a graph of their own, and when.

    Args:
        shared: the graphs of all callables on the device.
        limit: the most bytes of all those graphs; None for no graphs.
        is_timed: whether times are seconds; False: rows, and a capture counts as some replays.
        spent: the time spent before the first call, in compiling.
        plain_s: the time to compile all without insertions; None if there are none, or if that cannot be.
        clock: seconds of the present.
        most: the greatest of a number over ranks in lockstep, which decide by counts of calls; None: this process
            decides alone, by times.
    """

    def __init__(
        self,
        shared: OwnGraphs,
        limit: int | None,
        *,
        is_timed: bool = True,
        spent: float = 0.0,
        plain_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        most: Callable[[int], int] | None = None,
    ) -> None:
        self._most = most
        self._shared, self._limit, self._is_timed, self._clock = shared, limit, is_timed, clock
        self._lock = threading.Lock()
        self._times: dict[tuple[int, ...], tuple[Times, Times]] = {}
        self._sizes: dict[tuple[int, ...], RecurringSize] = {}
        self._ran: dict[Hashable, tuple[Row, Times, int]] = {}  # {key: its calls, the times of keys like it, its rows}
        self._last = -CALLS_BETWEEN  # calls at the last capture of a size
        self._aged_at, self._since_s = 0, clock()  # calls when replays were last forgotten; when present rates began
        # The driver uses the memory of dropped executables again: what captures take is measured until the first drop.
        self._bytes, self._has_dropped, self._last_bytes = CaptureBytes(), False, 0
        self._least_s, self._own_s = math.inf, 0.0  # the least of a capture of any key, all captures of sizes
        self._spent = spent  # in compiling and in captures
        self._plain_s = plain_s  # 0 when it is compiled
        shared.adopt(self)

    # -- what is told --------------------------------------------------------------------------------------------------

    def times_of(self, group: tuple[int, ...]) -> tuple[Times, Times]:
        """The times of the keys whose exact sizes are ``group``: of replays, and of runs without a graph."""
        found = self._times.get(group)
        if found is None:
            run = Times(is_proportional=False, launches_s=_LAUNCHES_S)
            found = self._times[group] = Times(is_proportional=True), run
        return found

    def size_of(self, real: tuple[int, ...], group: tuple[int, ...], rows: int, key_rows: int) -> RecurringSize:
        """The record of the calls with these sizes, which a key of ``key_rows`` rows serves."""
        size = self._sizes.get(real)
        if size is None:
            if len(self._sizes) >= _MOST_SIZES:  # traffic with ever new sizes must not fill the memory
                self._sizes = {known: kept for known, kept in self._sizes.items() if kept.own_bytes is not None}
            times = self.times_of(group)
            size = self._sizes[real] = RecurringSize(real, rows, key_rows, *times, asks_at=LEAST_REPLAYS)
        return size

    def find(self, real: tuple[int, ...]) -> RecurringSize | None:
        """The record of the calls with these sizes; None if there is none."""
        return self._sizes.get(real)

    def captured_any(self, seconds: float, pool_bytes: int, driver_bytes: int) -> None:
        """Record what a capture of this callable took, of any key."""
        self._least_s = min(self._least_s, seconds)
        self._spent += seconds * self._is_timed
        if not self._has_dropped:
            self._bytes.add(pool_bytes, driver_bytes)

    def captured_own(self, size: RecurringSize, seconds: float, pool_bytes: int, driver_bytes: int) -> bool:
        """Record the graph of a size, which serves it until it is dropped; returns whether the bound holds."""
        self._own_s += seconds if self._is_timed else self._capture_s(size)
        self._last = self.calls()
        self._sizes[size.real] = size  # it may have been forgotten
        size.own_bytes = self._last_bytes = self._bytes.charged(pool_bytes, driver_bytes)
        size.start, size.asks_at = size.replays, size.replays + 1  # for the verdict, as soon as the time is known
        return self._is_in_bounds()

    def compiled_plain(self, seconds: float, *, is_compiled: bool) -> None:
        """Record that all was compiled without insertions, or could not be."""
        self._spent += seconds
        self._plain_s = 0.0 if is_compiled else None

    def dropped(self, size: RecurringSize, losses: int = 0) -> None:
        """Record that a size has no graph of its own any more, or could get none; it may get one again."""
        self._has_dropped |= size.own_bytes is not None
        size.own_bytes, size.start, size.losses = None, size.replays, size.losses + losses
        size.asks_at = size.replays + LEAST_REPLAYS if size.losses < MOST_LOSSES else _NEVER

    # -- what is asked -------------------------------------------------------------------------------------------------

    def serve(self, size: RecurringSize) -> Serve:
        """What serves the next call of a size."""
        if size.replays >= size.asks_at and self._lock.acquire(blocking=False):
            try:
                if size.own_bytes is not None:
                    return self._verdict(size)
                if self._is_due(size):
                    return Serve.CAPTURE
                if size.is_faster_without():
                    size.replays, size.asks_at = size.replays + 1, 0  # counts for a graph, and is asked each time
                    return Serve.WITHOUT
            finally:
                self._lock.release()
        return Serve.PADDED if size.own_bytes is None else Serve.OWN

    def drop(self, size: RecurringSize, losses: int = 0) -> None:
        """Drop the graph of a size, as soon as no forward uses the pool. After :data:`MOST_LOSSES` it stays padded."""
        self.dropped(size, losses)

    def leave_out(self, size: RecurringSize) -> None:
        """Report that there is no room for the graph of a size."""

    def calls(self) -> int:
        """How many calls have run over graphs so far."""
        return sum(row.n for row, _, _ in list(self._ran.values()))

    def spent(self) -> float:
        """The time spent so far in them, and in compiling and captures."""
        return self._spent + sum(row.n * (times.at(rows) or 0.0) for row, times, rows in list(self._ran.values()))

    def graphs(self) -> list[OwnGraph]:
        """The graphs of this callable."""
        own = [(size, size.own_bytes) for size in list(self._sizes.values())]
        return [
            OwnGraph(num_bytes, self._saves(size), functools.partial(self.drop, size))
            for size, num_bytes in own
            if num_bytes is not None
        ]

    def _saves(self, size: RecurringSize) -> float:
        if self._most is not None:  # guard: lockstep_not_evicted
            return math.inf
        return size.recent_cost() / max(1e-9, self._clock() - self._since_s)

    def _verdict(self, size: RecurringSize) -> Serve:
        own_s, padded_s = size.replayed.measured(size.rows), size.replayed.measured(size.key_rows)
        if self._most is not None or own_s is None or padded_s is None:
            return Serve.OWN
        size.asks_at = _NEVER
        if not is_faster(own_s, padded_s) or not self._is_in_bounds():
            self.drop(size, MOST_LOSSES)
            return Serve.PADDED
        if size.insertions_s is None:
            return self._own_or_plain(size, own_s)
        if size.insertions_s <= (1 + _COST_OF_INSERTIONS) * own_s:  # guard: plain_where_insertions_cost
            self._plain_s = None  # for other sizes, too
        return Serve.OWN

    def _own_or_plain(self, size: RecurringSize, own_s: float) -> Serve:
        """A size's own graph; or one without insertions, once that takes a small share of the time in own graphs."""
        if self._plain_s is None:
            return Serve.OWN
        sizes = list(self._sizes.values()) if self._plain_s else [size]
        own = [one for one in sizes if one.own_bytes is not None and one.insertions_s is None]
        spent = sum((one.replays - one.start) * (one.replayed.at(one.rows) or 0.0) for one in own)
        missing = (self._plain_s + self._capture_s(size)) / SHARE_OF_TIME - spent  # guard: plain_pays
        if missing > 0 or self.calls() - self._last < CALLS_BETWEEN:
            size.asks_at = size.replays + max(1, math.ceil(missing / own_s / len(own)))
            return Serve.OWN
        size.insertions_s = own_s
        return Serve.PLAIN

    def _is_due(self, size: RecurringSize) -> bool:
        if self._most is not None:  # guard: lockstep_by_counts
            return self._is_due_in_lockstep(size)
        replays, gain, capture_s, calls = size.replays - size.start, size.gain(), self._capture_s(size), self.calls()
        size.asks_at = size.replays + max(1, replays // 8)
        if self._limit is None or not gain or not math.isfinite(capture_s):  # not timed yet, or to be measured anew
            return False
        self._age(calls)
        # guard: exact_pays_for_itself
        pays, is_cheap = replays * gain >= capture_s, self._own_s + capture_s <= SHARE_OF_TIME * self.spent()
        if not pays and not (is_cheap and self._costs_most(size)):
            size.asks_at = min(size.asks_at, size.replays + math.ceil(capture_s / gain) - replays)
            return False
        size.asks_at = size.replays + 1
        since = calls - self._last
        if since < CALLS_BETWEEN:  # guard: exact_captures_apart
            return False
        if since < 2 * CALLS_BETWEEN and not self._costs_most(size):  # after that, the other had time to come
            return False
        if self._shared.has_room(max(self._last_bytes, self._bytes.mean()[1]), self._limit, self._saves(size)):
            return True
        self.leave_out(size)
        size.asks_at = size.replays + max(CALLS_BETWEEN, replays // 4)
        return False

    def _is_due_in_lockstep(self, size: RecurringSize) -> bool:
        """:meth:`_is_due` for ranks that make the same calls: by their number, and whether every rank has room."""
        due_at = size.start + _REPLAYS_A_CAPTURE
        size.asks_at = max(size.replays + 1, due_at)
        if self._limit is None or size.replays < due_at or self.calls() - self._last < CALLS_BETWEEN:
            return False
        if self._is_in_bounds(max(self._last_bytes, self._bytes.mean()[1])):
            return True
        self.leave_out(size)
        size.asks_at = 2 * size.replays
        return False

    def _is_in_bounds(self, more: int = 0) -> bool:
        above = self._shared.num_bytes() + more - (self._limit or 0)
        return (above if self._most is None else self._most(above)) <= 0  # guard: lockstep_bytes

    def _capture_s(self, size: RecurringSize) -> float:
        return self._least_s if self._is_timed else _REPLAYS_A_CAPTURE * size.rows

    def _costs_most(self, size: RecurringSize) -> bool:
        padded = [other for other in list(self._sizes.values()) if other.own_bytes is None and other.asks_at != _NEVER]
        return size.recent_cost() >= _SLACK * max((other.recent_cost() for other in padded), default=0.0)

    def _age(self, calls: int) -> None:
        """Forget half of the replays and of their time, so that sizes which no longer come make room."""
        if calls - self._aged_at < _HALF_LIFE:
            return
        self._aged_at, self._since_s = calls, (self._since_s + self._clock()) / 2
        for size in list(self._sizes.values()):
            size.forgotten += (size.replays - size.forgotten) / 2
