"""Asking a device what a ladder will take, by capturing a few of its keys in throwaway pools.

What the driver takes for executables adds up, but only once it has used what it kept of earlier ones. So it is asked
for as many as the ladder will have.
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
"""Behind so many bytes of executables, the rest of a group is taken to be like what was seen."""


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
    """Capture what :func:`keys_to_sample` says, each group in a throwaway pool, and estimate.

    Args:
        groups: all of the ladder.
        runtime: what the captures belong to.
        meter: reads the device's memory.
        capture: captures a key in the open scope; what that took.
        surroundings: what a capture of the ladder is done in, and takes memory for.
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
    """Captures samples into throwaway pools; the arguments are those of :func:`estimated`."""

    def __init__(self, runtime: GraphRuntime, meter: MemoryMeter, capture: Callable[[Key], MemoryGrowth]) -> None:
        self._runtime, self._meter, self._capture = runtime, meter, capture
        self._openings: list[MemoryGrowth] = []

    def of(self, groups: Groups, around: MemoryGrowth) -> Measured:
        """The samples, each group by itself, and then the largest of all of them in one pool."""
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
        """What the driver takes for ``num_keys`` keys like the one of ``recordings``.

        The copies stay until the last group is measured. The samples' own executables go with their pool, and what they
        leave serves the next group: only those of the last group are counted though no key will take them.
        """
        seen: list[tuple[int, int]] = []
        made = 0
        while True:
            taken = max(self._meter.driver_bytes() - before, 0)
            if taken and (not seen or taken > seen[-1][1]):
                seen.append((made, taken))
            if made == num_keys or taken >= _DRIVER_BYTES_TO_SEE or not copies.add(recordings):
                break
            made += 1
        if made == num_keys or not seen:
            return taken
        # The first bytes that show stand for all that the driver had left; the rest tells what a key takes.
        (first_made, first_taken), (last_made, last_taken) = seen[0], seen[-1]
        steps = last_made - first_made
        a_key = (last_taken - first_taken) / steps if steps else taken / (made + 1)
        return taken + round(a_key * (num_keys - made))
