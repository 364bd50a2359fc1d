"""Estimates the device memory that the capture of a ladder needs, from captures of a few of its keys.

All keys share one graph pool, so the pool is smaller than the sum of its keys: later graphs reuse memory of earlier
ones. Only the bytes that each graph keeps add up. :class:`PoolModel` has three numbers for each key, fitted to sample
captures in throwaway pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphpass.keys import BatchDescriptor
from graphpass.ladder.meter import NOTHING, MemoryGrowth
from graphpass.modes import CUDAGraphMode
from graphpass.report.console import text_of
from graphpass.report.parts import Table

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
"""{name of a group: its keys}, both in the order of capture."""
_MOST_SAMPLES_A_MODE = 3
# Samples are the slowest keys, and releasing their pool takes time. One sample for six keys keeps an estimate below a
# quarter of the time of the capture.
_KEYS_A_SAMPLE = 6


# -- groups and samples -----------------------------------------------------------------------------------------------


def _size_of(key: Key) -> int:
    """The size that a key's memory depends on: its tokens times its integer extras (such as the longest sequence)."""
    size = key[1].num_tokens
    for _, value in key[1].extra:
        if isinstance(value, int) and value > 1:
            size *= value
    return size


def keys_to_sample(groups: Groups) -> dict[str, list[Key]]:
    """The keys of each group to capture as samples, from the largest to the smallest.

    The first sample is the largest key, the second the smallest, the third the median. A mode has at most three
    samples. A group has one sample for every six keys, and at least its largest key.
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
    """The measured memory of one captured key. Earlier samples of the same pool are still in it.

    Attributes:
        key: the captured key.
        growth: growth of the device's memory during the capture.
        kept_bytes: bytes of the pool that later captures cannot reuse.
    """

    key: Key
    growth: MemoryGrowth
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements for the estimate of a ladder.

    Attributes:
        groups: the samples of each group, captured in a separate pool for each group, the largest key first.
        driver_bytes: driver memory for all keys of each group.
        together: the largest key of each group, captured in one pool; empty if there is only one group.
        around: memory that is allocated before the first key and released after the last one.
        opening: memory that each pool allocates once, and torch's workspaces for the matrix products of warm-ups.
    """

    groups: Mapping[str, Sequence[Sample]]
    driver_bytes: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[Sample] = ()
    around: MemoryGrowth = NOTHING
    opening: MemoryGrowth = NOTHING


# -- from samples to a ladder -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Predicts how each captured key grows the pool.

    Attributes:
        needs: {key: bytes of an empty pool after its capture}. Later keys can reuse them except for ``kept``.
        kept: {key: bytes that no later key can reuse}.
        extra: {key: additional growth in a pool with enough free bytes, because no free block has the needed size}.
        opening: bytes that a pool allocates once, for any capture.
    """

    needs: Mapping[Key, int]
    kept: Mapping[Key, int]
    extra: Mapping[Key, int]
    opening: int = 0

    def after(self, pool_bytes: int, captured: Iterable[Key], key: Key) -> int:
        """Size of the pool after the capture of ``key``, in bytes.

        Args:
            pool_bytes: size before the capture.
            captured: keys in the pool before the capture.
            key: the key to capture.
        """
        kept = sum(self.kept.get(other, 0) for other in captured)
        return max(pool_bytes, self.opening + kept + self.needs.get(key, 0)) + self.extra.get(key, 0)

    @classmethod
    def of(cls, groups: Groups, measured: Measured) -> PoolModel:
        """A model that predicts at least the measured bytes of every sample.

        ``kept`` is interpolated linearly in the size of a key. ``needs - kept`` is proportional to the size.
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
        # The free memory that other groups leave may be too fragmented for a key.
        for key, missed in cls(needs, kept, extra).misses(measured.together).items():
            extra[key] = extra.get(key, 0) + missed
        return cls(needs, kept, extra, measured.opening.pool_bytes)

    def misses(self, samples: Sequence[Sample]) -> dict[Key, int]:
        """{key: measured minus predicted bytes, at least 0} of samples captured one after the other in one pool."""
        pool_bytes, missed = 0, {}
        for position, sample in enumerate(samples):
            expected = self.after(pool_bytes, [other.key for other in samples[:position]], sample.key)
            pool_bytes += sample.growth.pool_bytes
            missed[sample.key] = max(pool_bytes - expected, 0)
        return missed


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """Estimated memory of the keys of one group.

    Attributes:
        name: ``mixed PIECEWISE``, ``decode FULL``, ``encoder``, ...
        num_keys: number of keys in the group.
        sampled: descriptors of the keys that were captured as samples.
        growth: estimated bytes. ``pool_bytes`` is the growth of the pool after the groups before this one.
    """

    name: str
    num_keys: int
    sampled: tuple[BatchDescriptor, ...]
    growth: MemoryGrowth


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated device memory of the capture of a whole ladder; ``print(estimate)`` shows tables.

    Attributes:
        groups: one estimate for each kind of keys, in the order of capture.
        workspace_bytes: torch's workspaces for the matrix products of warm-ups.
        spent_bytes: memory that the estimate itself has already used up (loaded kernels, metadata). The capture does
            not allocate it again.
        buffer_bytes: size of the input and output buffers.
        buffers_exist: whether the buffers are already allocated. The buffers of a ``CudaGraphManager`` are; the buffers
            of an encoder are allocated by the capture.
        seconds: duration of the estimate.
        keys: all keys of the ladder, in the order of capture.
        pool: predicts the growth of the pool.
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
        """Size of the graph pool after the capture."""
        return sum(group.growth.pool_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Decrease of the device's free memory from now until the end of the capture."""
        driver_bytes = sum(group.growth.driver_bytes for group in self.groups)
        buffer_bytes = 0 if self.buffers_exist else self.buffer_bytes
        return max(self.pool_bytes + driver_bytes + self.workspace_bytes + buffer_bytes - self.spent_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        """Largest decrease of the device's free memory during the capture, warm-ups included."""
        return self.total_bytes + sum(group.growth.cached_bytes for group in self.groups)

    def tables(self) -> tuple[Table, ...]:
        """A table with a row for each group, and a table of the sums."""
        rows = [
            _row(group.name, str(group.num_keys), ", ".join(map(str, group.sampled)), group.growth)
            for group in self.groups
        ]
        sums = (self.workspace_bytes, self.buffer_bytes, -self.spent_bytes, self.total_bytes, self.peak_bytes)
        buffers = "buffers (already allocated)" if self.buffers_exist else "buffers"
        sum_columns = ("workspaces", buffers, "already used by the estimate", "total", "peak")
        columns = ("group", "keys", "sampled", "pool bytes", "cached bytes", "driver bytes", "bytes")
        return (
            Table("Memory of a capture", columns, tuple(rows)),
            Table("Sums in bytes", sum_columns, (tuple(map(str, sums)),)),
        )

    def __str__(self) -> str:
        return text_of(self.tables())


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
    """Estimate the memory of a ladder from measured samples.

    Args:
        groups: all keys of the ladder.
        measured: measurements of the keys that :func:`keys_to_sample` selects.
        spent_bytes: see :class:`MemoryEstimate`.
        buffer_bytes: see :class:`MemoryEstimate`.
        buffers_exist: see :class:`MemoryEstimate`.
        seconds: see :class:`MemoryEstimate`.
    """
    pool, around = PoolModel.of(groups, measured), measured.around
    estimates: list[GroupEstimate] = []
    pool_bytes = 0
    captured: list[Key] = []
    for name, group in groups.items():
        known, before = measured.groups[name], pool_bytes
        for key in group:
            pool_bytes = pool.after(pool_bytes, captured, key)
            captured.append(key)
        # The warm-up of the largest key of a group needs the most memory. It may reuse cached memory of earlier groups,
        # so the sample that was captured after the other groups counts.
        in_order = [sample for sample in measured.together if sample.key == known[0].key] or [known[0]]
        cached_bytes = sum(sample.growth.cached_bytes for sample in (*in_order, *known[1:]))
        growth = MemoryGrowth(pool_bytes - before, cached_bytes, measured.driver_bytes.get(name, 0))
        growth, around = MemoryGrowth.sum_of([growth, around]), NOTHING
        estimates.append(GroupEstimate(name, len(group), tuple(sample.key[1] for sample in known), growth))
    return MemoryEstimate(
        groups=tuple(estimates),
        workspace_bytes=measured.opening.cached_bytes,
        spent_bytes=spent_bytes,
        buffer_bytes=buffer_bytes,
        buffers_exist=buffers_exist,
        seconds=seconds,
        keys=tuple(captured),
        pool=pool,
    )


NOTHING_ESTIMATED = estimate_of({}, Measured({}))
"""The estimate for a ladder without keys."""
