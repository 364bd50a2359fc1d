"""Graphs for sizes that recur in calls without a dispatcher: the key of a call, and which sizes get their own graph.

A field whose padding is proved harmless is rounded up in a ladder; all other fields are exact. The first call of a key
runs without a graph as warm-up, the next call captures, later calls replay. No key of a ladder is evicted: above a
maximum number of graphs, further keys run without one.

A size starts under padding, because a few graphs then serve many sizes. Each replay at a larger key costs the time at
the key minus the time at the size. Once that has cost as much as a capture, a capture costs at most twice the best
choice in hindsight; and before that, captures are made as long as all of them take a small share of the time spent.
Times are seconds, or rows where nothing is timed (the CPU tape).
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason

# Bound of the number of remembered keys: traffic with ever new sizes must not fill the memory.
_MAX_COUNTED = 4096
CALLS_OF_A_NUMBER = 8


@dataclass(frozen=True, slots=True)
class KeyField:
    """A size that distinguishes the keys of a graph."""

    #: the user's name for it, or the place where it is read: ``input_ids[0]``. Fields with the same name are the same
    #: size at several places: they are padded together, and only if they are equal.
    name: str
    #: the sizes that the user declared, ascending; None for powers of two and the steps halfway between them
    ladder: tuple[int, ...] | None
    is_padded: bool  #: whether the size is rounded up; other fields are exact
    #: whether it is an int argument that is no tensor's size. A counter never has the same value twice, so keys with
    #: such fields need more calls before they are captured.
    is_number: bool


@dataclass(slots=True)
class RecurringKey:
    """The state of one key."""

    descriptor: BatchDescriptor  #: its name in counts and reports
    sizes: tuple[int, ...]  #: the size of each field
    is_declared: bool  #: the user declared the sizes of all fields; such keys do not count towards ``max_graphs``
    calls: int = 0  #: number of calls so far
    num_graphs: int = 0  #: one for each set of static inputs
    refusal: Reason | None = None  #: why it gets no graph; None if it may get one
    #: it is for one size that padding could serve, see :class:`ExactSizes`; another bound holds for those
    is_exact: bool = False

    @property
    def is_captured(self) -> bool:
        """Whether it has a graph."""
        return self.num_graphs > 0

    @property
    def counts(self) -> bool:
        """Whether its graphs count towards ``max_graphs``."""
        return not self.is_declared and not self.is_exact


def step_above(size: int) -> int:
    """The smallest step of the default ladder (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...) that is at least ``size``."""
    power = 1
    while power < size:
        if power >= 2 and power + power // 2 >= size:
            return power + power // 2
        power *= 2
    return power


class RecurringKeys:
    """The keys of one graph."""

    def __init__(
        self,
        fields: Sequence[KeyField],
        *,
        admits: Callable[[tuple[int, ...]], bool],
        max_graphs: int,
        at_once: bool = False,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self.fields = tuple(fields)
        self.max_graphs = max_graphs
        self.num_graphs = 0
        self._admits = admits
        self._at_once = at_once
        self._fixed = dict(fixed or {})
        names = dict.fromkeys(field.name for field in fields if field.is_padded)
        self._padded_groups = [[i for i, field in enumerate(fields) if field.name == name] for name in names]
        self._keys: dict[tuple[tuple[int, ...], str], RecurringKey] = {}
        self._first_numbers: tuple[tuple[str, int], ...] | None = None  # of the first call that was counted
        self._numbers_vary = False

    def key_of(self, real: tuple[int, ...], *, as_is: bool = False) -> RecurringKey:
        """The key for a call with these sizes, padded where padding is allowed and the graph admits the padded size."""
        if as_is:
            return self._key(real, "as_is")
        key = self._key(self._padded(real))
        if key.calls == 0 and key.refusal is None:
            key.refusal = self._too_large(real)
        return key

    def exact_key(self, real: tuple[int, ...]) -> RecurringKey:
        """The key for exactly these sizes, which are otherwise padded."""
        return self._key(real, "exact")

    def _key(self, sizes: tuple[int, ...], kind: str = "") -> RecurringKey:
        key = self._keys.get((sizes, kind))
        if key is None:
            if len(self._keys) >= _MAX_COUNTED:
                self._keys = {s: k for s, k in self._keys.items() if k.is_captured or k.refusal is not None}
            is_declared = not kind and self._is_declared(sizes)
            key = RecurringKey(self._descriptor(sizes, kind), sizes, is_declared, is_exact=kind == "exact")
            self._keys[sizes, kind] = key
        return key

    def counted(self, key: RecurringKey) -> bool:
        """Count a call of a key without a graph; returns whether the key has had enough calls to be captured."""
        key.calls += 1
        self._first_numbers = self._numbers_of(key) if self._first_numbers is None else self._first_numbers
        self._numbers_vary |= self._numbers_of(key) != self._first_numbers
        needed = CALLS_OF_A_NUMBER if self.numbers(key) else 1
        return key.calls > (0 if key.is_declared and self._at_once else needed)

    def refusal(self, key: RecurringKey) -> Reason | None:
        """Why the key gets no graph; None while it may get one."""
        if key.refusal is None and key.counts and self.num_graphs >= self.max_graphs:
            why = f"max_graphs={self.max_graphs} keys have graphs already" if self.max_graphs else "max_graphs=0"
            return Reason(why, "raise max_graphs, or pass the sizes that recur as capture_sizes: they do not count")
        return key.refusal

    def captured(self, key: RecurringKey, num_graphs: int) -> None:
        """Record how many graphs the key has now; a call that waited for another capture may have added none."""
        if key.counts:  # guard: exact_graphs_uncounted
            self.num_graphs += num_graphs - key.num_graphs  # guard: graphs_counted_once
        key.num_graphs = num_graphs

    def numbers(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        """(field, value) of the Python numbers in a key; none as long as all calls have the same."""
        return self._numbers_of(key) if self._numbers_vary else ()

    def _numbers_of(self, key: RecurringKey) -> tuple[tuple[str, int], ...]:
        return tuple((field.name, size) for field, size in zip(self.fields, key.sizes, strict=True) if field.is_number)

    def recount(self, graphs_of: Callable[[BatchDescriptor], int]) -> None:
        """Count graphs again after some were dropped; the next call of a key captures missing graphs.

        ``graphs_of`` tells how many graphs a key has now, one for each set of static inputs.
        """
        self.num_graphs = 0
        for key in self._keys.values():
            key.num_graphs = graphs_of(key.descriptor)
            self.num_graphs += key.num_graphs if key.counts else 0

    def forget(self) -> None:
        """Reset all keys after all graphs were dropped; they may be captured again."""
        self.num_graphs = 0
        self._keys.clear()

    def ladder_keys(
        self, example: tuple[int, ...], used: Sequence[tuple[tuple[int, ...], bool]] = ()
    ) -> list[RecurringKey]:
        """The declared keys, largest first; fields without declared sizes have the size of the example's key.

        After them come the keys that were :meth:`used`, those under padding first.
        """
        names = dict(zip((field.name for field in self.fields), zip(self.fields, example, strict=True), strict=True))
        rungs = [(size,) if field.ladder is None else field.ladder for field, size in names.values()]
        combinations = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*rungs)]
        wanted = {tuple([named[field.name] for field in self.fields]) for named in combinations}
        padded = {self._padded(sizes) for sizes in filter(self._admits, wanted)}
        keys = [self._key(sizes) for sizes in sorted(padded, key=math.prod, reverse=True)]
        in_order = sorted(used, key=lambda key: (key[1], -math.prod(key[0])))
        more = [self._key(sizes, "exact" if exact else "") for sizes, exact in in_order if self._admits(sizes)]
        return [*keys, *(key for key in more if key not in keys)]

    def used(self, calls_of: Callable[[RecurringKey], int]) -> list[tuple[tuple[int, ...], bool]]:
        """(sizes, whether exact) of the undeclared keys that have graphs and served calls."""
        found = [key for (_, kind), key in self._keys.items() if kind != "as_is" and not key.is_declared]
        # guard: saved_keys_served
        return [(key.sizes, key.is_exact) for key in found if key.is_captured and calls_of(key)]

    def named(self, sizes: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """(field, size) of the sizes of a call or key, in the order of the fields; fields of one name once."""
        return tuple(dict(zip((field.name for field in self.fields), sizes, strict=True)).items())

    def differs(self, real: Sequence[int]) -> bool:
        """Whether fields with the same name have different sizes in a call."""
        return any(len({real[index] for index in indices}) > 1 for indices in self._padded_groups)

    def padded_sizes(self, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the padded fields, and those of the exact ones."""
        pairs = list(zip(self.fields, sizes, strict=True))
        padded = tuple([size for field, size in pairs if field.is_padded])
        return padded, tuple([size for field, size in pairs if not field.is_padded])

    def _descriptor(self, sizes: Sequence[int], kind: str) -> BatchDescriptor:
        named = dict(self._fixed)
        for number, (field, size) in enumerate(zip(self.fields, sizes, strict=True)):
            named[field.name if named.get(field.name, size) == size else f"{field.name} {number}"] = size
        num_tokens = named.pop("num_tokens", None)
        if num_tokens is None:
            declared = {field.name: size for field, size in zip(self.fields, sizes, strict=True) if field.ladder}
            counted = [*{**self._fixed, **declared}.values()]
            num_tokens = max(1, math.prod(counted or sizes[:1]))
        return BatchDescriptor(num_tokens, extra=(*named.items(), *([(kind, True)] if kind else ())))

    def _padded(self, real: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes, those of each padded field raised to the largest size, up to its step, that the graph admits."""
        padded = real
        for indices in self._padded_groups:
            field, size = self.fields[indices[0]], real[indices[0]]
            for step in range(_step(field, size), size, -1):
                raised = tuple([step if index in indices else other for index, other in enumerate(padded)])
                if self._admits(raised):
                    padded = raised
                    break
        return padded

    def _is_declared(self, sizes: Sequence[int]) -> bool:
        declared = [(field.ladder, size) for field, size in zip(self.fields, sizes, strict=True) if field.ladder]
        return bool(declared or self._fixed) and all(size in ladder for ladder, size in declared)

    def _too_large(self, real: Sequence[int]) -> Reason | None:
        for field, size in zip(self.fields, real, strict=True):
            if field.ladder is not None and field.is_padded and size > field.ladder[-1]:
                why = f"{field.name} is above the largest capture size {field.ladder[-1]}"
                return Reason(why, "add a size that holds it to capture_sizes", sizes=((field.name, size),))
        return None


def _step(field: KeyField, size: int) -> int:
    if field.ladder is None:
        return step_above(size)
    return next((step for step in field.ladder if step >= size), size)


# -- sizes with graphs of their own ------------------------------------------------------------------------------------

LEAST_REPLAYS = 3
CALLS_BETWEEN = 20
"""Calls from one capture to the next: a server's tail latency must not show a series of them."""
SHARE_OF_TIME = 0.05
LEAST_BYTES = 64 << 20
_SHARE_OF_DEVICE = 0.01
_CALLS_A_STEP, _HALF_LIFE = 64, 1024
_FASTER_WITHOUT = 0.9
NOISE = 0.01  # of a measured time; a smaller gain is none
_SLACK = 0.5  # a size goes before others that cost up to twice as much
_HYSTERESIS = 1.25  # a graph makes room only for one that saves this much more
_MOST_SIZES, _MOST_LOSSES = 4096, 2
_NEVER = math.inf
NO_ROOM = Reason("sizes that recur stay padded: the graphs for other sizes take graph_bytes", "raise graph_bytes")

Seconds = Callable[[], float | None]
"""The median seconds of a graph's replay; None while the device has not finished them."""


def bytes_allowed(given: int | None, device_bytes: int, *, has_ladder: bool) -> int | None:
    """The option ``graph_bytes``, or its default for a device with ``device_bytes`` of memory (0 if unknown).

    None: no exact graphs, because the user declared which sizes are captured.
    """
    if given is not None:
        return given
    # guard: exact_beside_declared
    return None if has_ladder else max(LEAST_BYTES, int(_SHARE_OF_DEVICE * device_bytes))


class Times:
    """Times by rows, as measured; monotone between the measured ones.

    Args:
        is_proportional: below the least measured rows, times shrink with the rows; otherwise they stay as they are.
    """

    def __init__(self, *, is_proportional: bool) -> None:
        self._is_proportional = is_proportional
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
        self._measured |= ready
        for rows in ready:
            self._pending.pop(rows, None)
        self._rows = sorted(self._measured)
        self._times = list(itertools.accumulate((self._measured[rows] for rows in self._rows), max))


@dataclass(slots=True, eq=False)
class RecurringSize:
    """One size of calls that a padded key serves. A call increments ``replays``, and asks at ``asks_at``."""

    rows: int  #: product of the real sizes
    key_rows: int  #: product of the padded key's sizes
    replayed: Times  #: of the graphs of all keys that differ from this size in padded fields only
    run: Times  #: of the same without a graph, which may be none
    asks_at: float  #: the number of replays from which on the policy is asked at the next call
    replays: int = 0  #: over the padded graph, and over the graph of this size
    start: int = 0  #: replays when its padding began, which is again when its graph was dropped
    is_left_out: bool = False  #: whether it stays padded because there is no room for its graph
    losses: int = 0  #: times that its graph could not serve a call, because a static input was another one
    recent: float = 0.0  #: replays, of which old ones count less
    counted: int = 0  #: replays that ``recent`` contains
    graph: OwnGraph | None = None  #: None while padding serves it

    def gain(self) -> float:
        """What a replay over a graph of its own saves, by the times so far; 0 before the key was timed."""
        at_key, at_size = self.replayed.at(self.key_rows), self.replayed.at(self.rows)
        if at_key is None or at_size is None:
            return 0.0
        return at_key - at_size if at_size < (1 - NOISE) * at_key else 0.0

    def is_faster_without(self) -> bool:
        """Whether a run without a graph takes clearly less time than the padded graph, as with a lot of padding."""
        at_key, at_size = self.replayed.at(self.key_rows), self.run.at(self.rows)
        if at_key is None or at_size is None:
            return False
        return at_size < _FASTER_WITHOUT * at_key  # guard: faster_without

    def cost(self) -> float:
        """What its padding has cost."""
        return (self.replays - self.start) * self.gain()


@dataclass(frozen=True, slots=True, eq=False)
class OwnGraph:
    """The graph of a size that recurs."""

    num_bytes: int  #: what counts for it: growth of pool and driver memory by its capture
    drop: Callable[[], bool]  #: drop it, unless a forward uses its pool; returns whether it was dropped


class _HasGraphs(Protocol):
    def graphs(self) -> list[tuple[OwnGraph, float]]: ...


class OwnGraphs:
    """The graphs for sizes that recur on one device, of all runtimes of the process: one bound holds for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: weakref.WeakSet[_HasGraphs] = weakref.WeakSet()

    def adopt(self, owner: _HasGraphs) -> None:
        """Count the graphs of ``owner``, by weak reference."""
        with self._lock:
            self._owners.add(owner)

    def graphs(self) -> list[tuple[OwnGraph, float]]:
        """All graphs, and what each saves a second."""
        with self._lock:
            owners = list(self._owners)
        return [pair for owner in owners for pair in owner.graphs()]

    def num_bytes(self) -> int:
        """Bytes of all graphs."""
        return sum(graph.num_bytes for graph, _ in self.graphs())

    def has_room(self, num_bytes: int, limit: int, saves: float) -> bool:
        """Whether a graph of ``num_bytes`` fits, if need be after one that saves less a second has been dropped."""
        graphs = self.graphs()
        taken = sum(graph.num_bytes for graph, _ in graphs)
        if taken + num_bytes <= limit:  # guard: exact_bytes
            return True
        least, least_saves = min(graphs, key=lambda pair: pair[1], default=(None, 0.0))
        if least is None or least_saves * _HYSTERESIS >= saves:  # guard: exact_saves_least
            return False
        return taken - least.num_bytes + num_bytes <= limit and least.drop()


class ExactSizes:
    """Decides for one callable which sizes get a graph of their own, and when.

    Args:
        shared: the graphs of all callables on the device.
        limit: the most bytes of all those graphs; None for no graphs.
        calls: how many calls have run over graphs so far.
        spent: the time spent so far in them, and in compiling.
        captures_as: the time of a capture at so many rows where none is timed; None: captures are timed.
        clock: seconds of the present.
    """

    def __init__(
        self,
        shared: OwnGraphs,
        limit: int | None,
        *,
        calls: Callable[[], int],
        spent: Callable[[], float],
        captures_as: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared, self._limit = shared, limit
        self._calls, self._spent, self._captures_as, self._clock = calls, spent, captures_as, clock
        self._lock = threading.Lock()
        self._times: dict[tuple[int, ...], tuple[Times, Times]] = {}
        self._sizes: dict[tuple[int, ...], RecurringSize] = {}
        self._began_s = clock()
        self._last = -CALLS_BETWEEN  # calls at the last exact capture
        self._aged_at, self._recent_calls = 0, 0.0
        self._least_s = math.inf
        # The driver takes memory for several executables at a time, and uses that of dropped ones again: at least the
        # mean of all captures before the first drop is counted for each.
        self._driver_bytes, self._captures, self._has_dropped = 0, 0, False
        self._last_bytes = 0  # of the last exact capture
        self.exact_s = 0.0  #: time of all exact captures so far
        shared.adopt(self)

    # -- what is told --------------------------------------------------------------------------------------------------

    def times_of(self, group: tuple[int, ...]) -> tuple[Times, Times]:
        """The times of the keys whose exact sizes are ``group``: of replays, and of runs without a graph."""
        found = self._times.get(group)
        if found is None:
            found = self._times[group] = Times(is_proportional=True), Times(is_proportional=False)
        return found

    def size_of(self, real: tuple[int, ...], group: tuple[int, ...], rows: int, key_rows: int) -> RecurringSize:
        """The record of the calls with these sizes, which a key of ``key_rows`` rows serves."""
        size = self._sizes.get(real)
        if size is None:
            if len(self._sizes) >= _MOST_SIZES:  # traffic with ever new sizes must not fill the memory
                self._sizes = {known: kept for known, kept in self._sizes.items() if kept.graph is not None}
            size = self._sizes[real] = RecurringSize(rows, key_rows, *self.times_of(group), asks_at=LEAST_REPLAYS)
        return size

    def captured(self, seconds: float, driver_bytes: int) -> None:
        """Record what a capture of this callable took, of any key."""
        self._least_s = min(self._least_s, seconds)
        if not self._has_dropped:
            self._driver_bytes, self._captures = self._driver_bytes + driver_bytes, self._captures + 1

    def captured_exactly(
        self, size: RecurringSize, seconds: float, pool_bytes: int, driver_bytes: int, drop: Callable[[], bool]
    ) -> bool:
        """Record the graph of a size, which serves it until it is dropped; returns whether the bound holds."""
        self.exact_s += seconds if self._captures_as is None else self._captures_as(size.rows)
        self._last = self._calls()
        size.graph = OwnGraph(pool_bytes + max(driver_bytes, self._mean_driver_bytes()), drop)
        self._last_bytes = size.graph.num_bytes
        size.asks_at = size.replays + 1  # for the verdict, as soon as the time is known
        return self._is_in_bounds()

    def dropped(self, size: RecurringSize, *, is_final: bool = False) -> None:
        """Record that a size has no graph of its own any more, or could get none; it may get one again."""
        self._has_dropped |= size.graph is not None
        size.graph, size.start = None, size.replays
        size.asks_at = _NEVER if is_final else size.replays + LEAST_REPLAYS

    def lost(self, size: RecurringSize) -> None:
        """Record that the graph of a size was for other static inputs: the second time, padding keeps the size."""
        size.losses += 1
        self.dropped(size, is_final=size.losses >= _MOST_LOSSES)

    def graphs(self) -> list[tuple[OwnGraph, float]]:
        """The graphs of this callable, and what each saves a second."""
        sizes = list(self._sizes.values())
        return [(size.graph, self._rate(size) * size.gain()) for size in sizes if size.graph is not None]

    def find(self, real: tuple[int, ...]) -> RecurringSize | None:
        """The record of the calls with these sizes; None if there is none."""
        return self._sizes.get(real)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def wants(self, size: RecurringSize) -> bool:
        """Whether the next call of a size captures a graph of its own now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._wants(size)
        finally:
            self._lock.release()

    def loses(self, size: RecurringSize) -> bool:
        """Whether the graph of a size is no faster than the padded one: a product of matrices steps in tiles."""
        size.asks_at = _NEVER
        exact, padded = size.replayed.measured(size.rows), size.replayed.measured(size.key_rows)
        if exact is None or padded is None:
            size.asks_at = size.replays + 1
            return False
        return exact >= (1 - NOISE) * padded or not self._is_in_bounds()  # guard: exact_no_faster

    def _wants(self, size: RecurringSize) -> bool:
        size.asks_at = size.replays + 1
        gain, capture_s = size.gain(), self._capture_s(size)
        if self._limit is None or not gain or not math.isfinite(capture_s):  # not timed yet, or to be measured anew
            size.asks_at = size.replays + max(LEAST_REPLAYS, (size.replays - size.start) // 4)
            return False
        replays, calls = size.replays - size.start, self._calls()
        self._age(calls)
        # guard: exact_pays_for_itself
        pays, is_cheap = replays * gain >= capture_s, self.exact_s + capture_s <= SHARE_OF_TIME * self._spent()
        if not pays and not (is_cheap and self._costs_most(size)):
            size.asks_at = size.replays + min(math.ceil(capture_s / gain) - replays, max(1, replays // 8))
            return False
        since = calls - self._last
        if since < CALLS_BETWEEN:  # guard: exact_captures_apart
            return False
        if since < 2 * CALLS_BETWEEN and not self._costs_most(size):  # after that, the other had time to come
            return False
        num_bytes = max(self._last_bytes, self._mean_driver_bytes())
        size.is_left_out = not self._shared.has_room(num_bytes, self._limit, self._rate(size) * gain)
        if not size.is_left_out:
            return True
        size.asks_at = size.replays + max(CALLS_BETWEEN, (size.replays - size.start) // 4)
        return False

    def _is_in_bounds(self) -> bool:
        return self._shared.num_bytes() <= (self._limit or 0)

    def _mean_driver_bytes(self) -> int:
        return max(0, self._driver_bytes) // max(1, self._captures)

    def _capture_s(self, size: RecurringSize) -> float:
        return self._least_s if self._captures_as is None else self._captures_as(size.rows)

    def _costs_most(self, size: RecurringSize) -> bool:
        """Whether no other size under padding costs clearly more now."""
        padded = [other for other in list(self._sizes.values()) if other.graph is None and other.asks_at != _NEVER]
        most = max((self._recent(other) * other.gain() for other in padded), default=0.0)
        return self._recent(size) * size.gain() >= _SLACK * most

    def _recent(self, size: RecurringSize) -> float:
        return size.recent + size.replays - size.counted

    def _age(self, calls: int) -> None:
        """Let old replays count less, so that sizes which no longer come make room."""
        passed = calls - self._aged_at
        if passed < _CALLS_A_STEP:
            return
        share = 0.5 ** (passed / _HALF_LIFE)
        self._aged_at, self._recent_calls = calls, self._recent_calls * share + passed
        for size in list(self._sizes.values()):
            size.recent = size.recent * share + size.replays - size.counted
            size.counted = size.replays

    def _rate(self, size: RecurringSize) -> float:
        """Calls of a size a second."""
        calls = self._calls()
        share = self._recent(size) / max(1.0, self._recent_calls + calls - self._aged_at)
        return share * calls / max(1e-9, self._clock() - self._began_s)
