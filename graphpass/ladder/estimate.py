"""What capturing a ladder takes of a device's memory, estimated from a few of its keys.

Keys share the pool, so its bytes do not add up: the largest key makes room for the others. What adds up is what a graph
keeps. :class:`PoolModel` says so in three numbers a key, from samples that are captured in a pool of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphpass.keys import BatchDescriptor
from graphpass.ladder.meter import NOTHING, MemoryGrowth
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report, Table

__all__ = [
    "NOTHING_ESTIMATED",
    "GroupEstimate",
    "Groups",
    "Key",
    "Measured",
    "MemoryEstimate",
    "PoolModel",
    "Sample",
    "estimate_of",
    "keys_to_sample",
]

Key = tuple[CUDAGraphMode, BatchDescriptor]
Groups = Mapping[str, Sequence[Key]]
"""Keys of a kind under the name of the kind, in the order of capture."""
_MOST_SAMPLES_A_MODE = 3
# The largest keys are the slowest ones, and giving the pool back takes time, too: that keeps it below a quarter.
_KEYS_A_SAMPLE = 6


# -- groups and samples -----------------------------------------------------------------------------------------------


def _size_of(key: Key) -> int:
    """What a key's memory goes by: its tokens, times what else it counts (the longest sequence)."""
    size = key[1].num_tokens
    for _, value in key[1].extra:
        if isinstance(value, int) and value > 1:
            size *= value
    return size


def keys_to_sample(groups: Groups) -> dict[str, list[Key]]:
    """Which keys of each group to measure, largest first: its largest, then its smallest, then the one in the middle.

    At most three a mode, and one in six: a group of fewer keys is known from its largest alone.
    """
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
        driver_bytes: what the driver takes for all keys of each group.
        together: the largest key of each group, in one pool; empty where there is one group.
        around: what is taken before the first key, and given back behind the last.
        opening: what a pool takes once, and torch for the matrix products of warm-ups.
    """

    groups: Mapping[str, Sequence[Sample]]
    driver_bytes: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[Sample] = ()
    around: MemoryGrowth = NOTHING
    opening: MemoryGrowth = NOTHING


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
    def of(cls, groups: Groups, measured: Measured) -> PoolModel:
        """The model that fits every sample.

        Between samples, what a key keeps goes by its size in straight lines; what it needs besides is in proportion.
        """
        needs: dict[Key, int] = {}
        kept: dict[Key, int] = {}
        extra: dict[Key, int] = {}
        for name, group in groups.items():
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
        return cls(needs, kept, extra, measured.opening.pool_bytes)

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
        name: ``mixed PIECEWISE``, ``decode FULL``, ``encoder``, ...
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
        workspace_bytes: of torch, for the matrix products of warm-ups.
        spent_bytes: what estimating has left taken (loaded kernels, metadata): a capture takes that no more.
        buffer_bytes: of input and output buffers.
        buffers_exist: whether they are there already, as a manager's are; an encoder's are made by the capture.
        seconds: that estimating took.
        keys: the ladder.
        pool: how the pool grows.
    """

    groups: tuple[GroupEstimate, ...]
    workspace_bytes: int
    spent_bytes: int
    buffer_bytes: int
    buffers_exist: bool
    seconds: float
    keys: tuple[Key, ...]
    pool: PoolModel

    @property
    def pool_bytes(self) -> int:
        """Of the graph pool."""
        return sum(group.growth.pool_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """By which the device's free memory is smaller when the ladder has been captured now."""
        driver_bytes = sum(group.growth.driver_bytes for group in self.groups)
        buffer_bytes = 0 if self.buffers_exist else self.buffer_bytes
        return max(self.pool_bytes + driver_bytes + self.workspace_bytes + buffer_bytes - self.spent_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        """By which it is smaller at times during the capture: warm-ups take memory, too, which is given back."""
        return self.total_bytes + sum(group.growth.cached_bytes for group in self.groups)

    def tables(self) -> tuple[Table, ...]:
        """A row for each group, and the sums."""
        rows = [
            _row(group.name, str(group.num_keys), ", ".join(map(str, group.sampled)), group.growth)
            for group in self.groups
        ]
        sums = (self.workspace_bytes, self.buffer_bytes, -self.spent_bytes, self.total_bytes, self.peak_bytes)
        buffers = "buffers, there already" if self.buffers_exist else "buffers"
        named = ("workspaces", buffers, "spent by estimating", "to come", "at the peak")
        columns = ("group", "keys", "sampled", "pool bytes", "cached bytes", "driver bytes", "bytes")
        return (
            Table("Memory of a capture", columns, tuple(rows)),
            Table("Bytes together", named, (tuple(map(str, sums)),)),
        )

    def __str__(self) -> str:
        return str(Report(self.tables()))


def _row(name: str, num_keys: str, sampled_keys: str, growth: MemoryGrowth) -> tuple[str, ...]:
    parts = (growth.pool_bytes, growth.cached_bytes, growth.driver_bytes, growth.total_bytes)
    return (name, num_keys, sampled_keys, *map(str, parts))


def estimate_of(
    groups: Groups,
    measured: Measured,
    *,
    spent_bytes: int = 0,
    buffer_bytes: int = 0,
    buffers_exist: bool = True,
    seconds: float = 0.0,
) -> MemoryEstimate:
    """The estimate for a ladder.

    Args:
        groups: all of it.
        measured: of each group, what :func:`keys_to_sample` says.
        spent_bytes: see :class:`MemoryEstimate`.
        buffer_bytes: see :class:`MemoryEstimate`.
        buffers_exist: see :class:`MemoryEstimate`.
        seconds: see :class:`MemoryEstimate`.
    """
    pool, around = PoolModel.of(groups, measured), measured.around
    found: list[GroupEstimate] = []
    pool_bytes = 0
    captured: list[Key] = []
    for name, group in groups.items():
        known, before = measured.groups[name], pool_bytes
        for key in group:
            pool_bytes = pool.after(pool_bytes, captured, key)
            captured.append(key)
        # The largest keys' warm-ups are those of the ladder; what one leaves cached may serve the next group's.
        in_order = [sample for sample in measured.together if sample.key == known[0].key] or [known[0]]
        cached_bytes = sum(sample.growth.cached_bytes for sample in (*in_order, *known[1:]))
        growth = MemoryGrowth(pool_bytes - before, cached_bytes, measured.driver_bytes.get(name, 0))
        growth, around = MemoryGrowth.sum_of([growth, around]), NOTHING
        found.append(GroupEstimate(name, len(group), tuple(sample.key[1] for sample in known), growth))
    return MemoryEstimate(
        groups=tuple(found),
        workspace_bytes=measured.opening.cached_bytes,
        spent_bytes=spent_bytes,
        buffer_bytes=buffer_bytes,
        buffers_exist=buffers_exist,
        seconds=seconds,
        keys=tuple(captured),
        pool=pool,
    )


NOTHING_ESTIMATED = estimate_of({}, Measured({}))
"""Of a ladder without keys."""
