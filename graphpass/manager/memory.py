"""What capturing a ladder takes of a device's memory, estimated from a few of its keys.

Keys share the pool, so its bytes do not add up: the largest key makes room for the others. What adds up is what a graph
keeps. :class:`PoolModel` says so in three numbers a key, from samples that are captured in a pool of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphpass.capture import GraphRuntime
from graphpass.keys import BatchDescriptor
from graphpass.manager.devicememory import NOTHING, MemoryGrowth, MemoryMeter
from graphpass.modes import CUDAGraphMode
from graphpass.tables import Report, Table

__all__ = [
    "GroupEstimate",
    "Key",
    "Measured",
    "MemoryEstimate",
    "PoolModel",
    "Sample",
    "estimate_of",
    "estimated",
    "group_of",
    "keys_by_group",
    "keys_to_sample",
]

Key = tuple[CUDAGraphMode, BatchDescriptor]
_MOST_SAMPLES_A_MODE = 3
# The largest keys are the slowest ones, and giving the pool back takes time, too: that keeps it below a quarter.
_KEYS_A_SAMPLE = 6


# -- groups and samples -----------------------------------------------------------------------------------------------


def group_of(key: Key) -> str:
    """What kind of batches a key serves, and how."""
    mode, descriptor = key
    return f"{'decode' if descriptor.uniform else 'mixed'} {mode}"


def keys_by_group(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """The keys of each group, in their order."""
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    return groups


def _size_of(key: Key) -> int:
    """What a key's memory goes by: its tokens, times what else it counts (the longest sequence)."""
    size = key[1].num_tokens
    for _, value in key[1].extra:
        if isinstance(value, int) and value > 1:
            size *= value
    return size


def keys_to_sample(keys: Sequence[Key]) -> dict[str, list[Key]]:
    """Which keys of each group to measure, largest first: its largest, then its smallest, then the one in the middle.

    At most three a mode, and one in six: a group of fewer keys is known from its largest alone.
    """
    groups = keys_by_group(keys)
    modes = [group_keys[0][0] for group_keys in groups.values()]
    chosen = {}
    for name, group in groups.items():
        ordered = sorted(group, key=_size_of, reverse=True)
        most = _MOST_SAMPLES_A_MODE // modes.count(group[0][0])
        count = min(most, max(1, len(ordered) // _KEYS_A_SAMPLE))
        places = sorted({0, len(ordered) - 1, len(ordered) // 2} if count == 3 else {0, len(ordered) - 1})
        chosen[name] = [ordered[place] for place in places[:count]]
    return chosen


@dataclass(frozen=True, slots=True)
class Sample:
    """One key as it was measured, after those before it in the same pool.

    Attributes:
        key: what was captured.
        growth: by its capture.
        kept_bytes: of the pool that its graph keeps for itself.
    """

    key: Key
    growth: MemoryGrowth
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a ladder.

    Attributes:
        groups: the samples of each group, in a pool of the group's own, the largest key first.
        together: the largest key of each group, in one pool; empty where there is one group.
        around: what is taken once, before the first key.
        opening: bytes that a pool takes once.
        driver_bytes_a_key: of each group, from an earlier estimate: the driver hands freed memory out again, unseen.
    """

    groups: Mapping[str, Sequence[Sample]]
    together: Sequence[Sample] = ()
    around: MemoryGrowth = NOTHING
    opening: int = 0
    driver_bytes_a_key: Mapping[str, float] = field(default_factory=dict)


# -- from samples to a ladder -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolModel:
    """How the pool grows from key to key.

    Attributes:
        needs: bytes that a key takes in an empty pool; later keys may use what it does not keep.
        kept: bytes that it keeps.
        extra: bytes that it takes although there is room: blocks of a size of its own.
        opening: bytes that the pool takes once, whatever is captured.
    """

    needs: Mapping[Key, int]
    kept: Mapping[Key, int]
    extra: Mapping[Key, int]
    opening: int = 0

    def after(self, pool_bytes: int, captured: Iterable[Key], key: Key) -> int:
        """Bytes of a pool, ``pool_bytes`` large with these keys in it, once ``key`` is captured, too."""
        kept = sum(self.kept.get(other, 0) for other in captured)
        return max(pool_bytes, self.opening + kept + self.needs.get(key, 0)) + self.extra.get(key, 0)

    def bytes_after(self, keys: Sequence[Key]) -> int:
        """Bytes of a pool with all these keys, captured in this order."""
        pool_bytes = 0
        for position, key in enumerate(keys):
            pool_bytes = self.after(pool_bytes, keys[:position], key)
        return pool_bytes

    @classmethod
    def of(cls, keys: Sequence[Key], measured: Measured) -> PoolModel:
        """The model that fits every sample.

        Between samples, what a key keeps goes by its size in straight lines; what it needs besides is in proportion.
        """
        needs: dict[Key, int] = {}
        kept: dict[Key, int] = {}
        extra: dict[Key, int] = {}
        for name, group in keys_by_group(keys).items():
            known = measured.groups[name]
            first, rising = known[0], sorted(known, key=lambda sample: _size_of(sample.key))
            sizes, bytes_kept = [_size_of(s.key) for s in rising], [s.kept_bytes for s in rising]
            besides = max(first.growth.pool_bytes - first.kept_bytes, 0)
            for key in group:
                kept[key] = round(float(np.interp(_size_of(key), sizes, bytes_kept)))
                needs[key] = kept[key] + besides * _size_of(key) // _size_of(first.key)
            extra |= cls(needs, kept, {}).misses(known)
        # Behind other groups, a key may find no room that is large enough in one piece.
        for key, missed in cls(needs, kept, extra).misses(measured.together).items():
            extra[key] = extra.get(key, 0) + missed
        return cls(needs, kept, extra, measured.opening)

    def misses(self, samples: Sequence[Sample]) -> dict[Key, int]:
        """By how much each of these, captured one after the other in one pool, took more than the model says."""
        pool_bytes, found = 0, {}
        for position, sample in enumerate(samples):
            expected = self.after(pool_bytes, [other.key for other in samples[:position]], sample.key)
            pool_bytes += sample.growth.pool_bytes
            found[sample.key] = max(pool_bytes - expected, 0)
        return found


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """What the keys of one group will take, in bytes.

    Attributes:
        name: ``mixed PIECEWISE``, ``decode FULL``, ...
        num_keys: keys of the group.
        sampled: those that were captured to know.
        growth: pool, cached and driver; of the pool what it adds to that of the groups before.
    """

    name: str
    num_keys: int
    sampled: tuple[BatchDescriptor, ...]
    growth: MemoryGrowth


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What capturing a whole ladder will take. ``print`` it.

    Attributes:
        groups: one for each kind of keys, in the order of capture.
        spent_bytes: what estimating has left taken (loaded kernels, metadata): a capture takes that no more.
        buffer_bytes: of the manager's input and output buffers, which exist already.
        seconds: that estimating took.
        keys: the ladder.
        pool: how the pool grows.
        driver_bytes_a_key: of each group.
    """

    groups: tuple[GroupEstimate, ...]
    spent_bytes: int
    buffer_bytes: int
    seconds: float
    keys: tuple[Key, ...]
    pool: PoolModel
    driver_bytes_a_key: Mapping[str, float]

    @property
    def pool_bytes(self) -> int:
        """Of the graph pool."""
        return sum(group.growth.pool_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """By which the device's free memory shrinks when the ladder is captured now."""
        return max(sum(group.growth.total_bytes for group in self.groups) - self.spent_bytes, 0)

    def tables(self) -> tuple[Table, ...]:
        """A row for each group, and the sums."""
        rows = [
            _row(group.name, str(group.num_keys), ", ".join(map(str, group.sampled)), group.growth)
            for group in self.groups
        ]
        spent = (str(-self.spent_bytes), str(self.total_bytes), str(self.buffer_bytes))
        columns = ("group", "keys", "sampled", "pool bytes", "cached bytes", "driver bytes", "bytes")
        return (
            Table("Memory of a capture", columns, tuple(rows)),
            Table("Together", ("spent by estimating", "device bytes to come", "buffer bytes, there already"), (spent,)),
        )

    def __str__(self) -> str:
        return str(Report(self.tables()))


def _row(name: str, num_keys: str, sampled_keys: str, growth: MemoryGrowth) -> tuple[str, ...]:
    parts = (growth.pool_bytes, growth.cached_bytes, growth.driver_bytes, growth.total_bytes)
    return (name, num_keys, sampled_keys, *map(str, parts))


def estimate_of(
    keys: Sequence[Key], measured: Measured, *, spent_bytes: int = 0, buffer_bytes: int = 0, seconds: float = 0.0
) -> MemoryEstimate:
    """The estimate for a ladder.

    Args:
        keys: all of it, in the order of capture.
        measured: of each group, what :func:`keys_to_sample` says.
        spent_bytes: see :class:`MemoryEstimate`.
        buffer_bytes: see :class:`MemoryEstimate`.
        seconds: see :class:`MemoryEstimate`.
    """
    pool, around = PoolModel.of(keys, measured), measured.around
    found = _driver_bytes_a_key(measured.groups)
    a_key = {name: max(taken, measured.driver_bytes_a_key.get(name, 0.0)) for name, taken in found.items()}
    groups: list[GroupEstimate] = []
    pool_bytes = 0
    captured: list[Key] = []
    for name, group in keys_by_group(keys).items():
        known, before = measured.groups[name], pool_bytes
        for key in group:
            pool_bytes = pool.after(pool_bytes, captured, key)
            captured.append(key)
        # The largest keys' warm-ups are those of the ladder; what one leaves cached may serve the next group's.
        in_order = [sample for sample in measured.together if sample.key == known[0].key] or [known[0]]
        cached_bytes = sum(sample.growth.cached_bytes for sample in (*in_order, *known[1:]))
        seen = sum(sample.growth.driver_bytes for sample in known)
        driver_bytes = max(seen, round(a_key[name] * len(known))) + round(a_key[name] * (len(group) - len(known)))
        growth = MemoryGrowth(pool_bytes - before, cached_bytes, driver_bytes)
        growth, around = MemoryGrowth.sum_of([growth, around]), NOTHING
        groups.append(GroupEstimate(name, len(group), tuple(sample.key[1] for sample in known), growth))
    return MemoryEstimate(tuple(groups), spent_bytes, buffer_bytes, seconds, tuple(keys), pool, a_key)


def _driver_bytes_a_key(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """What the driver takes for one more key of each group.

    The very first sample is left out where there are others: kernels are loaded, and tables made, at the first use.
    """
    order = [(name, sample.growth.driver_bytes) for name, group in samples.items() for sample in group]
    later = order[1:] or order
    overall = sum(taken for _, taken in later) / max(len(later), 1)
    found = {}
    for name in samples:
        own = [taken for group, taken in later if group == name]
        found[name] = max(sum(own) / len(own) if own else overall, 0.0)
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def estimated(
    keys: Sequence[Key],
    runtime: GraphRuntime,
    meter: MemoryMeter,
    capture: Callable[[Key], MemoryGrowth],
    surroundings: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    buffer_bytes: int,
    earlier: MemoryEstimate | None = None,
) -> MemoryEstimate:
    """Capture what :func:`keys_to_sample` says, each group in a throwaway pool, and estimate.

    Args:
        keys: all of the ladder, in the order of capture.
        runtime: what the captures belong to.
        meter: reads the device's memory.
        capture: captures a key in the open scope; what that took.
        surroundings: what a capture of the ladder is done in, and takes memory for.
        buffer_bytes: see :class:`MemoryEstimate`.
        earlier: the last estimate, of another ladder.
    """
    started = time.perf_counter()
    meter.settle()
    at_first = meter.reading()
    with surroundings():
        around = meter.reading() - at_first
        measured = _measured(keys_to_sample(keys), runtime, meter, capture)
    meter.settle()
    measured = replace(
        measured,
        around=MemoryGrowth.sum_of([around, measured.around]),
        driver_bytes_a_key={} if earlier is None else earlier.driver_bytes_a_key,
    )
    spent_bytes = max(meter.reading().taken - at_first.taken, 0)
    seconds = time.perf_counter() - started
    return estimate_of(keys, measured, spent_bytes=spent_bytes, buffer_bytes=buffer_bytes, seconds=seconds)


def _measured(
    chosen: Mapping[str, Sequence[Key]],
    runtime: GraphRuntime,
    meter: MemoryMeter,
    capture: Callable[[Key], MemoryGrowth],
) -> Measured:
    """The samples, each group by itself, and then the largest of all of them in one pool."""
    openings: list[MemoryGrowth] = []

    def in_one_pool(keys: Sequence[Key]) -> list[Sample]:
        with runtime.throwaway():
            unopened = meter.reading()
            meter.open_pool()
            openings.append(meter.reading() - unopened)
            return [_sample(key, meter, capture) for key in keys]

    groups = {name: in_one_pool(keys) for name, keys in chosen.items()}
    largest = [samples[0].key for samples in groups.values()]
    together = in_one_pool(largest) if len(largest) > 1 else []
    if not openings:
        return Measured(groups)
    outside = MemoryGrowth(0, openings[0].cached_bytes, openings[0].driver_bytes)
    return Measured(groups, together, outside, openings[0].pool_bytes)


def _sample(key: Key, meter: MemoryMeter, capture: Callable[[Key], MemoryGrowth]) -> Sample:
    kept = meter.kept_bytes()
    growth = capture(key)
    return Sample(key, growth, max(meter.kept_bytes() - kept, 0))
