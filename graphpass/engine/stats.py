"""Statistics of a manager: counters that every step increments, and snapshots of them as tables or Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from graphpass.dispatch.keys import Dispatch, DispatchReason
from graphpass.keys import BatchDescriptor
from graphpass.ladder.estimate import NOTHING, Key, MemoryGrowth
from graphpass.ladder.prometheus import Metric, prometheus_text
from graphpass.ladder.traffic import Traffic, TrafficCounts
from graphpass.modes import CUDAGraphMode
from graphpass.report.console import text_of
from graphpass.report.parts import Table

__all__ = ["CapturedGroup", "ManagerStats", "StepCounts", "keys_by_group"]


@dataclass(frozen=True, slots=True)
class CapturedGroup:
    """Time and memory of the captures of one group of keys.

    Attributes:
        name: ``mixed PIECEWISE``, ``mixed FULL`` or ``decode FULL``.
        num_keys: number of captured keys.
        seconds: total duration of their captures.
        memory: total device memory that their captures allocated.
    """

    name: str
    num_keys: int
    seconds: float
    memory: MemoryGrowth


def keys_by_group(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """{group name: its keys in the given order}; for the names see :class:`CapturedGroup`."""
    groups: dict[str, list[Key]] = {}
    for key in keys:
        mode, descriptor = key
        groups.setdefault(f"{'decode' if descriptor.uniform else 'mixed'} {mode}", []).append(key)
    return groups


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """A snapshot of a manager's counters: ``print(stats)``, ``stats["Dispatches"]`` or :meth:`prometheus`.

    Attributes:
        keys: capture and traffic of every captured key, in the order of capture.
        fallbacks: {reason: number of batches without a graph}.
        fallback_tokens: real tokens of these batches.
        left_out: (mode, key) of each key that was not captured because of ``capture(max_bytes=...)``.
        pool_bytes: bytes of the graph pool; 0 on the CPU, which has no pool.
        buffer_bytes: bytes of the manager's input and output buffers.
        histogram: {tokens of a batch: number of batches}, with or without a graph; empty batches are left out.
            :func:`graphpass.plan_sizes` computes capture sizes from it.
    """

    keys: tuple[Traffic, ...]
    fallbacks: Mapping[DispatchReason, int]
    fallback_tokens: int
    left_out: tuple[tuple[CUDAGraphMode, BatchDescriptor], ...]
    pool_bytes: int
    buffer_bytes: int
    histogram: Mapping[int, int]

    @property
    def replays(self) -> int:
        """Batches that replayed graphs."""
        return sum(key.replays for key in self.keys)

    @property
    def groups(self) -> tuple[CapturedGroup, ...]:
        """Time and memory of the captured keys by group, in the order of capture."""
        captured = {key.captured.key: key.captured for key in self.keys}
        return tuple(
            CapturedGroup(
                name,
                len(keys),
                sum(captured[key].seconds for key in keys),
                MemoryGrowth.sum_of(captured[key].memory for key in keys),
            )
            for name, keys in keys_by_group(captured).items()
        )

    def tables(self) -> tuple[Table, ...]:
        """The tables ``Dispatches``, ``Without a graph``, ``Left out``, ``Captured`` and ``Memory``."""
        rows = tuple(
            (
                str(key.captured.mode),
                str(key.captured.descriptor),
                str(key.replays),
                str(key.real_tokens),
                str(key.padded_tokens),
                f"{100 * key.padding:.1f} %",
                f"{1000 * key.captured.seconds:.1f}",
                str(key.captured.pool_bytes),
            )
            for key in self.keys
        )
        columns = ("mode", "key", "hits", "real tokens", "padded tokens", "padding", "capture ms", "pool bytes")
        memory = ((str(self.pool_bytes), str(self.buffer_bytes)),)
        groups = tuple(
            (group.name, str(group.num_keys), f"{group.seconds:.3f}", *map(str, _parts(group.memory).values()))
            for group in self.groups
        )
        return (
            Table("Dispatches", columns, rows),
            Table("Without a graph", ("reason", "batches"), tuple((str(r), str(n)) for r, n in self.fallbacks.items())),
            Table("Left out", ("mode", "key"), tuple((str(mode), str(key)) for mode, key in self.left_out)),
            Table("Captured", ("group", "keys", "seconds", *(f"{kind} bytes" for kind in _parts(NOTHING))), groups),
            Table("Memory", ("pool bytes", "buffer bytes"), memory),
        )

    def __str__(self) -> str:
        return text_of(self.tables())

    def __getitem__(self, title: str) -> Table:
        return {table.title: table for table in self.tables()}[title]

    def prometheus(self) -> str:
        """The snapshot in Prometheus' text format, to serve from an endpoint.

        Raises:
            OptionError: the package ``prometheus-client`` is not installed.
        """
        return prometheus_text(self._metrics())

    def _metrics(self) -> tuple[Metric, ...]:
        labels = ("mode", "key")
        of_keys = [((str(key.captured.mode), str(key.captured.descriptor)), key) for key in self.keys]
        replays = [(names, key.replays) for names, key in of_keys]
        real = [(names, key.real_tokens) for names, key in of_keys]
        padded = [(names, key.padded_tokens) for names, key in of_keys]
        seconds = [(names, key.captured.seconds) for names, key in of_keys]
        fallbacks = [((str(reason),), times) for reason, times in self.fallbacks.items()]
        group_seconds = [((group.name,), group.seconds) for group in self.groups]
        group_bytes = [((g.name, kind), size) for g in self.groups for kind, size in _parts(g.memory).items()]
        allocated = "Device memory that a group's captures allocated"
        return (
            Metric("graphpass_replays", "Batches that replayed a key", replays, labels, is_counter=True),
            Metric("graphpass_real_tokens", "Tokens of those batches", real, labels, is_counter=True),
            Metric("graphpass_padded_tokens", "Tokens of those batches with padding", padded, labels, is_counter=True),
            Metric("graphpass_capture_seconds", "Seconds of a key's capture", seconds, labels),
            Metric("graphpass_fallbacks", "Batches without a graph", fallbacks, ("reason",), is_counter=True),
            Metric("graphpass_group_seconds", "Seconds of a group's captures", group_seconds, ("group",)),
            Metric("graphpass_group_bytes", allocated, group_bytes, ("group", "kind")),
            Metric("graphpass_pool_bytes", "Bytes of the graph pool", [((), self.pool_bytes)]),
            Metric("graphpass_buffer_bytes", "Bytes of the buffers", [((), self.buffer_bytes)]),
        )


def _parts(memory: MemoryGrowth) -> dict[str, int]:
    """{kind of memory: bytes}."""
    return {"pool": memory.pool_bytes, "cached": memory.cached_bytes, "driver": memory.driver_bytes}


@dataclass(slots=True)
class StepCounts:
    """Counters that every step increments."""

    traffic: TrafficCounts = field(default_factory=TrafficCounts)
    fallbacks: Counter[DispatchReason] = field(default_factory=Counter)
    fallback_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def replayed(self, key: Key, num_tokens: int) -> None:
        """Count a batch that replayed ``key``."""
        self.traffic.replayed(key, num_tokens)
        self.histogram[num_tokens] += 1

    def fell_back(self, step: Dispatch, num_tokens: int) -> None:
        """Count a batch without a graph."""
        self.fallbacks[step.reason] += 1
        self.fallback_tokens += num_tokens
        if num_tokens:
            self.histogram[num_tokens] += 1

    def by_reason(self) -> Mapping[DispatchReason, int]:
        """Batches without a graph, by reason."""
        return MappingProxyType(dict(self.fallbacks))
