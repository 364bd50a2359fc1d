"""What a manager has run: counted in every step, read when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from graphpass.dispatch import Dispatch, DispatchReason
from graphpass.engine.groups import keys_by_group
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor
from graphpass.ladder import MemoryGrowth
from graphpass.ladder.meter import NOTHING
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report, Table

__all__ = ["CapturedGroup", "CapturedKey", "KeyTraffic", "ManagerStats", "StepCounts"]


@dataclass(frozen=True, slots=True)
class CapturedKey:
    """What one key's capture took.

    Attributes:
        mode: PIECEWISE or FULL.
        descriptor: the padded shape.
        seconds: of its capture, the warm-up included.
        memory: by which the device's memory grew; keys captured later reuse what earlier ones have.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    seconds: float
    memory: MemoryGrowth

    @property
    def pool_bytes(self) -> int:
        """By which the graph pool grew."""
        return self.memory.pool_bytes


@dataclass(frozen=True, slots=True)
class CapturedGroup:
    """What the captures of one kind of keys took together.

    Attributes:
        name: ``mixed PIECEWISE``, ``mixed FULL`` or ``decode FULL``.
        num_keys: keys that have a graph.
        seconds: of their captures.
        memory: by which they grew the device's memory.
    """

    name: str
    num_keys: int
    seconds: float
    memory: MemoryGrowth


@dataclass(frozen=True, slots=True)
class KeyTraffic:
    """How one key was used.

    Attributes:
        captured: the key, and what its capture took.
        hits: batches that replayed it.
        real_tokens: tokens of those batches.
        padded_tokens: tokens that were computed for them.
    """

    captured: CapturedKey
    hits: int
    real_tokens: int
    padded_tokens: int

    @property
    def padding(self) -> float:
        """The share of the computed tokens that was padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """A snapshot. ``print`` it, index it with ``stats["Dispatches"]``, or ask for :meth:`prometheus`.

    Attributes:
        keys: every captured key, in the order of capture.
        fallbacks: batches without a graph, by reason.
        fallback_tokens: their tokens.
        left_out: keys that were not captured, as ``capture(max_bytes=...)`` was reached.
        pool_bytes: of the graph pool; 0 on the CPU tape.
        buffer_bytes: of the manager's input and output buffers.
    """

    keys: tuple[KeyTraffic, ...]
    fallbacks: Mapping[DispatchReason, int]
    fallback_tokens: int
    left_out: tuple[tuple[CUDAGraphMode, BatchDescriptor], ...]
    pool_bytes: int
    buffer_bytes: int

    @property
    def replays(self) -> int:
        """Batches that replayed graphs."""
        return sum(key.hits for key in self.keys)

    @property
    def groups(self) -> tuple[CapturedGroup, ...]:
        """The captured keys by kind, in the order of capture."""
        captured = {(key.captured.mode, key.captured.descriptor): key.captured for key in self.keys}
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
        """The dispatch table, the fallbacks and the memory, by group of keys and in all."""
        rows = tuple(
            (
                str(key.captured.mode),
                str(key.captured.descriptor),
                str(key.hits),
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
        return str(Report(self.tables()))

    def __getitem__(self, title: str) -> Table:
        return Report(self.tables())[title]

    def prometheus(self) -> str:
        """The same in Prometheus' text format, for an endpoint to serve.

        Raises:
            OptionError: the package ``prometheus-client`` is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError as error:
            raise OptionError(
                "Prometheus text needs a package that is not here",
                expected="prometheus-client",
                found=str(error),
                remedy="pip install 'graphpass[prometheus]'",
            ) from error
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        return generate_latest(registry).decode()


def _parts(memory: MemoryGrowth) -> dict[str, int]:
    """The bytes of each kind."""
    return {"pool": memory.pool_bytes, "cached": memory.cached_bytes, "driver": memory.driver_bytes}


@dataclass(frozen=True, slots=True, eq=False)
class _Collector:
    """Hands one snapshot to prometheus-client."""

    stats: ManagerStats

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ("mode", "key")
        hits = CounterMetricFamily("graphpass_replays", "Batches that replayed a key", labels=labels)
        real = CounterMetricFamily("graphpass_real_tokens", "Tokens of those batches", labels=labels)
        padded = CounterMetricFamily("graphpass_padded_tokens", "Tokens computed for them", labels=labels)
        seconds = GaugeMetricFamily("graphpass_capture_seconds", "Seconds of a key's capture", labels=labels)
        for key in self.stats.keys:
            of_key = (str(key.captured.mode), str(key.captured.descriptor))
            hits.add_metric(of_key, key.hits)
            real.add_metric(of_key, key.real_tokens)
            padded.add_metric(of_key, key.padded_tokens)
            seconds.add_metric(of_key, key.captured.seconds)
        yield from (hits, real, padded, seconds)
        fallbacks = CounterMetricFamily("graphpass_fallbacks", "Batches without a graph", labels=("reason",))
        for reason, times in self.stats.fallbacks.items():
            fallbacks.add_metric((str(reason),), times)
        yield fallbacks
        yield from self._groups()
        yield GaugeMetricFamily("graphpass_pool_bytes", "Bytes of the graph pool", value=self.stats.pool_bytes)
        yield GaugeMetricFamily("graphpass_buffer_bytes", "Bytes of the buffers", value=self.stats.buffer_bytes)

    def _groups(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        seconds = GaugeMetricFamily("graphpass_group_seconds", "Seconds of a group's captures", labels=("group",))
        memory = GaugeMetricFamily(
            "graphpass_group_bytes", "Device memory that a group's captures took", labels=("group", "kind")
        )
        for group in self.stats.groups:
            seconds.add_metric((group.name,), group.seconds)
            for kind, num_bytes in _parts(group.memory).items():
                memory.add_metric((group.name, kind), num_bytes)
        yield from (seconds, memory)


@dataclass(slots=True)
class StepCounts:
    """Counts as they happen: an addition or two in each step."""

    hits: Counter[tuple[CUDAGraphMode, BatchDescriptor]] = field(default_factory=Counter)
    real_tokens: Counter[tuple[CUDAGraphMode, BatchDescriptor]] = field(default_factory=Counter)
    fallbacks: Counter[DispatchReason] = field(default_factory=Counter)
    fallback_tokens: int = 0

    def replayed(self, key: tuple[CUDAGraphMode, BatchDescriptor], num_tokens: int) -> None:
        """Count a batch that replays."""
        self.hits[key] += 1
        self.real_tokens[key] += num_tokens

    def fell_back(self, step: Dispatch, num_tokens: int) -> None:
        """Count a batch that does not."""
        self.fallbacks[step.reason] += 1
        self.fallback_tokens += num_tokens

    def of(self, captured: CapturedKey) -> KeyTraffic:
        """How one key was used."""
        key = (captured.mode, captured.descriptor)
        hits = self.hits[key]
        return KeyTraffic(captured, hits, self.real_tokens[key], hits * captured.descriptor.num_tokens)

    def by_reason(self) -> Mapping[DispatchReason, int]:
        """Batches without a graph, by reason."""
        return MappingProxyType(dict(self.fallbacks))
