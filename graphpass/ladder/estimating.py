"""Measures the memory of a ladder: captures a few of its keys in throwaway pools.

The driver's memory for graph executables adds up over keys, but the driver first reuses memory of destroyed
executables. So each group instantiates copies of its largest sample, as many as the group has keys.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graphpass.capture.runtime import GraphRuntime
from graphpass.ladder.estimate import Groups, Key, Measured, MemoryEstimate, Sample, estimate_of, keys_to_sample
from graphpass.ladder.meter import NOTHING, Copies, MemoryGrowth, MemoryMeter

__all__ = ["estimated"]

_DRIVER_BYTES_TO_SEE = 64 << 20
"""No more copies are instantiated above this many bytes of driver memory; the bytes of the rest are extrapolated."""


def estimated(
    groups: Groups,
    runtime: GraphRuntime,
    meter: MemoryMeter,
    capture: Callable[[Key], MemoryGrowth],
    surroundings: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    buffer_bytes: int,
    buffers_exist: bool = True,
) -> MemoryEstimate:
    """Capture the keys of :func:`keys_to_sample`, each group in a throwaway pool, and estimate the whole ladder.

    Args:
        groups: all keys of the ladder.
        runtime: owner of the captures.
        meter: reads the device's memory.
        capture: captures a key in the open capture scope and returns the growth of the device's memory.
        surroundings: the context in which the ladder is captured; its memory is part of the estimate.
        buffer_bytes: see :class:`MemoryEstimate`.
        buffers_exist: see :class:`MemoryEstimate`.
    """
    started = time.perf_counter()
    meter.settle()
    at_first = meter.reading()
    with surroundings():
        around = meter.reading() - at_first
        measured = _Measurement(runtime, meter, capture).of(groups, around)
    meter.settle()
    spent_bytes = max(meter.reading().taken - at_first.taken, 0)
    seconds = time.perf_counter() - started
    return estimate_of(
        groups,
        measured,
        spent_bytes=spent_bytes,
        buffer_bytes=buffer_bytes,
        buffers_exist=buffers_exist,
        seconds=seconds,
    )


class _Measurement:
    """Captures samples in throwaway pools; for the arguments see :func:`estimated`."""

    def __init__(self, runtime: GraphRuntime, meter: MemoryMeter, capture: Callable[[Key], MemoryGrowth]) -> None:
        self._runtime, self._meter, self._capture = runtime, meter, capture
        self._openings: list[MemoryGrowth] = []

    def of(self, groups: Groups, around: MemoryGrowth) -> Measured:
        """Measure the samples of each group in a separate pool, then the largest sample of every group in one pool."""
        chosen = keys_to_sample(groups)
        measured: dict[str, list[Sample]] = {}
        driver_bytes: dict[str, int] = {}
        with self._meter.copies() as copies:
            for name, samples in chosen.items():
                before = self._meter.driver_bytes()
                with self._pool_opened():
                    measured[name] = [self._sample(samples[0])]
                    recordings = self._runtime.lease.recordings()
                    measured[name] += [self._sample(key) for key in samples[1:]]
                    driver_bytes[name] = self._driver_bytes(copies, recordings, len(groups[name]), before)
        together: list[Sample] = []
        if len(measured) > 1:
            with self._pool_opened():
                together = [self._sample(samples[0]) for samples in chosen.values()]
        opening = self._openings[0] if self._openings else NOTHING
        return Measured(measured, driver_bytes, together, around, opening)

    @contextlib.contextmanager
    def _pool_opened(self) -> Iterator[None]:
        with self._runtime.throwaway():
            unopened = self._meter.reading()
            self._meter.open_pool()
            self._openings.append(self._meter.reading() - unopened)
            yield

    def _sample(self, key: Key) -> Sample:
        kept = self._meter.kept_bytes()
        growth = self._capture(key)
        return Sample(key, growth, max(self._meter.kept_bytes() - kept, 0))

    def _driver_bytes(self, copies: Copies, recordings: Sequence[Any], num_keys: int, before: int) -> int:
        """Driver memory for ``num_keys`` keys like the one of ``recordings``, in bytes.

        The copies stay alive until the last group is measured. The executables of the samples are destroyed with their
        pool, and the next group reuses their driver memory. So the sum of all groups is too high by the executables of
        the last group's samples only.
        """
        grown: list[tuple[int, int]] = []
        num_copies = 0
        while True:
            taken = max(self._meter.driver_bytes() - before, 0)
            if taken and (not grown or taken > grown[-1][1]):
                grown.append((num_copies, taken))
            # guard: estimate_driver
            if num_copies == num_keys or taken >= _DRIVER_BYTES_TO_SEE or not copies.add(recordings):
                break
            num_copies += 1
        if num_copies == num_keys or not grown:
            return taken
        # Until the first growth the driver reused free memory; the growth after it shows the bytes of one key.
        (first_copies, first_taken), (last_copies, last_taken) = grown[0], grown[-1]
        steps = last_copies - first_copies
        bytes_of_key = (last_taken - first_taken) / steps if steps else taken / (num_copies + 1)
        return taken + round(bytes_of_key * (num_keys - num_copies))
