"""The device memory that the capture of a ladder needs: measured, estimated from a few keys, and limited.

See Note [Memory of a ladder].
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from graphpass.capture.cuda import device_bytes, executable_copies
from graphpass.capture.runtime import GraphRuntime
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.report.drawing import Table, text_of
from graphpass.report.records import MemoryGrowth

Key = tuple[CUDAGraphMode, BatchDescriptor]
Groups = Mapping[str, Sequence[Key]]
"""{name of a group: its keys}, both in the order of capture."""

# -- measuring --------------------------------------------------------------------------------------------------------


NOTHING = MemoryGrowth()


class DeviceMemory:
    """Reads the memory of a device. There is no pool on the CPU, so the runtime's own count of bytes is used."""

    def __init__(self, device: torch.device, runtime: GraphRuntime) -> None:
        self._device, self.runtime = device, runtime

    def reading(self) -> MemoryGrowth:
        """The device's memory now; the driver's is that of all processes."""
        pool, (reserved, driver_bytes) = self.runtime.pool_bytes(), device_bytes(self._device)
        return MemoryGrowth(pool, max(reserved - pool, 0), driver_bytes)

    def driver_bytes(self) -> int:
        """Bytes of the device in use outside torch's allocator."""
        return device_bytes(self._device)[1]

    copies = staticmethod(executable_copies)

    def kept_bytes(self) -> int:
        """Bytes of all graph pools that later captures cannot reuse."""
        if self._device.type != "cuda":
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(segment["active_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))

    def open_pool(self) -> None:
        """Allocate what a pool allocates once, for any capture: the workspaces of matrix products."""
        self.runtime.lease.device_for([torch.empty(0, device=self._device)]).open()

    def settle(self) -> None:
        """Release the allocator's cached memory, so that readings are comparable."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


_DRIVER_BYTES_TO_SEE = 64 << 20
"""No more copies are instantiated above this many bytes of driver memory; the bytes of the rest are extrapolated."""
_FULL_RETRIES = 2
_MOST_SAMPLES_A_MODE = 3
# Samples are the slowest keys, and releasing their pool takes time. One sample for six keys keeps an estimate below a
# quarter of the time of the capture.
_KEYS_A_SAMPLE = 6


# -- groups and samples -----------------------------------------------------------------------------------------------


def _size_of(key: Key) -> int:
    """The size that a key's memory depends on: its tokens times its integer extras (such as the longest sequence)."""
    sizes = (value for _, value in key[1].extra if isinstance(value, int) and value > 1)
    return math.prod(sizes, start=key[1].num_tokens)


def keys_to_sample(groups: Groups) -> dict[str, list[Key]]:
    """The keys of each group to capture as samples: the largest, the smallest, the median, in this order.

    One for every six keys, at least one a group, at most three a mode.
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
    """The measured memory of one captured key. Earlier samples of the same pool are still in it."""

    key: Key  #: the captured key
    growth: MemoryGrowth  #: growth of the device's memory during the capture
    kept_bytes: int  #: bytes of the pool that later captures cannot reuse


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements for the estimate of a ladder."""

    #: the samples of each group, captured in a separate pool for each group, the largest key first
    groups: Mapping[str, Sequence[Sample]]
    driver_bytes: Mapping[str, int] = field(default_factory=dict)  #: driver memory for all keys of each group
    #: the largest key of each group, captured in one pool; empty if there is only one group
    largest_in_one_pool: Sequence[Sample] = ()
    baseline: MemoryGrowth = NOTHING  #: memory that is allocated before the first key and released after the last one
    #: memory that each pool allocates once, and torch's workspaces for the matrix products of warm-ups
    pool_setup: MemoryGrowth = NOTHING


# -- from samples to a ladder -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Predicts how each captured key grows the pool."""

    #: {key: bytes of an empty pool after its capture}. Later keys can reuse them except for ``kept``.
    needs: Mapping[Key, int]
    kept: Mapping[Key, int]  #: {key: bytes that no later key can reuse}
    #: {key: additional growth in a pool with enough free bytes, because no free block has the needed size}
    extra: Mapping[Key, int]
    pool_setup: int = 0  #: bytes that a pool allocates once, for any capture

    def after(self, pool_bytes: int, captured: Iterable[Key], key: Key) -> int:
        """Bytes of a pool of ``pool_bytes`` with the keys ``captured`` after the capture of ``key``."""
        kept = sum(self.kept.get(other, 0) for other in captured)
        return max(pool_bytes, self.pool_setup + kept + self.needs.get(key, 0)) + self.extra.get(key, 0)

    @classmethod
    def of(cls, groups: Groups, measured: Measured) -> PoolModel:
        """A model that predicts at least the measured bytes of every sample.

        ``kept`` is linear in the size of a key; ``needs - kept`` is proportional to it.
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
            extra |= cls(needs, kept, {}).underestimates(known)
        # The free memory that other groups leave may be too fragmented for a key.
        for key, missed in cls(needs, kept, extra).underestimates(measured.largest_in_one_pool).items():
            extra[key] = extra.get(key, 0) + missed
        return cls(needs, kept, extra, measured.pool_setup.pool_bytes)

    def underestimates(self, samples: Sequence[Sample]) -> dict[Key, int]:
        """{key: measured minus predicted bytes, at least 0} of samples captured one after the other in one pool."""
        pool_bytes, missed = 0, {}
        for position, sample in enumerate(samples):
            expected = self.after(pool_bytes, [other.key for other in samples[:position]], sample.key)
            pool_bytes += sample.growth.pool_bytes
            missed[sample.key] = max(pool_bytes - expected, 0)
        return missed


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """Estimated memory of the keys of one group."""

    name: str  #: such as ``mixed PIECEWISE``, ``decode FULL`` or ``encoder``
    num_keys: int  #: number of keys in the group
    sampled: tuple[BatchDescriptor, ...]  #: descriptors of the keys that were captured as samples
    #: estimated bytes. ``pool_bytes`` is the growth of the pool after the groups before this one.
    growth: MemoryGrowth


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated device memory of the capture of a whole ladder; ``print(estimate)`` shows tables."""

    groups: tuple[GroupEstimate, ...]  #: one estimate for each kind of keys, in the order of capture
    workspace_bytes: int  #: torch's workspaces for the matrix products of warm-ups
    keys: tuple[Key, ...]  #: all keys of the ladder, in the order of capture
    pool: PoolModel  #: predicts the growth of the pool
    #: memory that the estimate itself has already used up (loaded kernels, metadata). The capture does not allocate
    #: it again.
    spent_bytes: int = 0
    buffer_bytes: int = 0  #: size of the input and output buffers
    #: whether the buffers are already allocated. The buffers of a ``CudaGraphManager`` are; the buffers of an encoder
    #: are allocated by the capture.
    buffers_exist: bool = True
    seconds: float = 0.0  #: duration of the estimate

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
        rows = []
        for group in self.groups:
            of = group.growth
            parts = (of.pool_bytes, of.cached_bytes, of.driver_bytes, of.total_bytes)
            sampled = ", ".join(map(str, group.sampled))
            rows.append((group.name, str(group.num_keys), sampled, *map(str, parts)))
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


def estimate_of(groups: Groups, measured: Measured) -> MemoryEstimate:
    """Estimate the memory of a ladder from measured samples."""
    pool, baseline = PoolModel.of(groups, measured), measured.baseline
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
        in_order = [sample for sample in measured.largest_in_one_pool if sample.key == known[0].key] or [known[0]]
        cached_bytes = sum(sample.growth.cached_bytes for sample in (*in_order, *known[1:]))
        growth = MemoryGrowth(pool_bytes - before, cached_bytes, measured.driver_bytes.get(name, 0))
        growth, baseline = MemoryGrowth.sum_of([growth, baseline]), NOTHING
        estimates.append(GroupEstimate(name, len(group), tuple(sample.key[1] for sample in known), growth))
    return MemoryEstimate(
        groups=tuple(estimates),
        workspace_bytes=measured.pool_setup.cached_bytes,
        keys=tuple(captured),
        pool=pool,
    )


NOTHING_ESTIMATED = estimate_of({}, Measured({}))
"""The estimate for a ladder without keys."""


# -- capturing samples -------------------------------------------------------------------------------------------------


def estimated(
    groups: Groups,
    meter: DeviceMemory,
    capture: Callable[[Key], MemoryGrowth],
    surroundings: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    buffer_bytes: int,
    buffers_exist: bool = True,
) -> MemoryEstimate:
    """Capture the keys of :func:`keys_to_sample`, each group in a throwaway pool, and estimate the whole ladder.

    ``capture`` captures a key in the open scope. The memory of ``surroundings``, in which the ladder is captured, is
    part of the estimate.
    """
    started = time.perf_counter()
    meter.settle()
    at_first = meter.reading()
    with surroundings():
        baseline = meter.reading() - at_first
        measured = _measured(groups, baseline, meter, capture)
    meter.settle()
    return replace(
        estimate_of(groups, measured),
        spent_bytes=max((meter.reading() - at_first).total_bytes, 0),
        buffer_bytes=buffer_bytes,
        buffers_exist=buffers_exist,
        seconds=time.perf_counter() - started,
    )


def _measured(
    groups: Groups, baseline: MemoryGrowth, meter: DeviceMemory, capture: Callable[[Key], MemoryGrowth]
) -> Measured:
    """Measure the samples of each group in a separate pool, then the largest sample of every group in one pool."""
    chosen = keys_to_sample(groups)
    measured: dict[str, list[Sample]] = {}
    driver_bytes: dict[str, int] = {}
    setups: list[MemoryGrowth] = []

    @contextlib.contextmanager
    def pool_opened() -> Iterator[None]:
        with meter.runtime.throwaway():
            unopened = meter.reading()
            meter.open_pool()
            setups.append(meter.reading() - unopened)
            yield

    def sample(key: Key) -> Sample:
        kept = meter.kept_bytes()
        growth = capture(key)
        return Sample(key, growth, max(meter.kept_bytes() - kept, 0))

    with meter.copies() as copy:
        for name, samples in chosen.items():
            before = meter.driver_bytes()
            with pool_opened():
                measured[name] = [sample(samples[0])]
                copied = partial(copy, meter.runtime.lease.recordings())
                measured[name] += [sample(key) for key in samples[1:]]
                driver_bytes[name] = _driver_bytes(meter, copied, len(groups[name]), before)
    largest_in_one_pool: list[Sample] = []
    if len(measured) > 1:
        with pool_opened():
            largest_in_one_pool = [sample(samples[0]) for samples in chosen.values()]
    return Measured(measured, driver_bytes, largest_in_one_pool, baseline, setups[0] if setups else NOTHING)


def _driver_bytes(meter: DeviceMemory, copied: Callable[[], bool], num_keys: int, before: int) -> int:
    """Driver memory for ``num_keys`` keys like the one that ``copied`` makes executables of.

    The copies live until the last group is measured. Executables of samples go with their pool, and the next group
    reuses their memory: the sum of all groups is too high by those of the last one.
    """
    grown: list[tuple[int, int]] = []
    for num_copies in range(num_keys + 1):
        taken = max(meter.driver_bytes() - before, 0)
        if taken and (not grown or taken > grown[-1][1]):
            grown.append((num_copies, taken))
        # guard: estimate_driver
        if num_copies == num_keys or taken >= _DRIVER_BYTES_TO_SEE or not copied():
            break
    if num_copies == num_keys or not grown:
        return taken
    # Until the first growth the driver reused free memory; the growth after it shows the bytes of one key.
    (first_copies, first_taken), (last_copies, last_taken) = grown[0], grown[-1]
    steps = last_copies - first_copies
    bytes_of_key = (last_taken - first_taken) / steps if steps else taken / (num_copies + 1)
    return taken + round(bytes_of_key * (num_keys - num_copies))


# -- capturing within a limit ------------------------------------------------------------------------------------------


def capture_within(
    max_bytes: int | None,
    present: Sequence[Key],
    missing: Sequence[Key],
    model: PoolModel,
    *,
    num_bytes: Callable[[], int],
    capture: Callable[[Key], None],
    drop: Callable[[], None],
    on_some_rank: Callable[[bool], bool] = bool,
) -> tuple[Key, ...]:
    """Capture the ``missing`` keys, in this order, and skip keys that would grow the pool above ``max_bytes``.

    A pool that is larger already, with the keys ``present``, is not reduced. ``on_some_rank`` says whether a condition
    is true on any rank that captures the same keys. Returns the keys of both that have no graph afterwards.
    """
    captured, wanted, retries = list(present), list(missing), 0

    def exceeds(size: int) -> bool:
        return on_some_rank(max_bytes is not None and size > max_bytes)

    def fill() -> Key | None:
        for key in wanted:
            if exceeds(model.after(num_bytes(), captured, key)):
                continue
            capture(key)
            if exceeds(num_bytes()):  # guard: memory_limit_kept
                return key
            captured.append(key)
        return None

    while (too_large := fill()) is not None:
        drop()
        rest = wanted[wanted.index(too_large) + 1 :]
        if captured:
            retries += 1
            # These keys fitted before the key that did not. If they do not fit again, retry with half of them.
            again = captured if retries <= _FULL_RETRIES else captured[: len(captured) // 2]
            rest = [*again, *(rest if retries == 1 else ())]  # guard: memory_limit_bounded
        captured, wanted = [], rest
    return tuple(key for key in (*present, *missing) if key not in captured)
