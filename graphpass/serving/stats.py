"""Statistics of a manager as tables, as Prometheus text and as figures of its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

from graphpass.capture.runtime import GraphRuntime
from graphpass.dispatch.dispatchkeys import DispatchReason
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import UNCOMPILED, CountedReason, Reason
from graphpass.report import KeyUse, Problem, ReportFigures, SizeTraffic, Table
from graphpass.report.drawing import text_of
from graphpass.report.figures import captured_sizes, key_sizes
from graphpass.report.records import CapturedGroup, RegionUse
from graphpass.serving.estimate import Key
from graphpass.serving.traffic import Traffic, captured_group, traffic_table

_EXPECTED = (DispatchReason.EMPTY, DispatchReason.DISABLED)  # nothing to run, and as the user asked


def keys_by_group(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """{group name: its keys in the given order}; for the names see :class:`CapturedGroup`."""
    groups: dict[str, list[Key]] = {}
    for key in keys:
        mode, descriptor = key
        groups.setdefault(f"{'decode' if descriptor.uniform else 'mixed'} {mode}", []).append(key)
    return groups


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """A snapshot of a manager's counters: ``print(stats)``, ``stats["Dispatches"]`` or :meth:`prometheus`."""

    keys: tuple[Traffic, ...]  #: capture and traffic of every captured key, in the order of capture
    fallbacks: Mapping[DispatchReason, int]  #: {reason: number of batches without a graph}
    fallback_tokens: int  #: real tokens of these batches
    #: (mode, key) of each key that was not captured because of ``capture(max_bytes=...)``
    left_out: tuple[tuple[CUDAGraphMode, BatchDescriptor], ...]
    pool_bytes: int  #: bytes of the graph pool; 0 on the CPU, which has no pool
    buffer_bytes: int  #: bytes of the manager's input and output buffers
    #: {tokens of a batch: number of batches}, with or without a graph; empty batches are left out.
    #: :func:`graphpass.plan_sizes` computes capture sizes from it.
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
            captured_group(name, [captured[key] for key in keys]) for name, keys in keys_by_group(captured).items()
        )

    def tables(self) -> tuple[Table, ...]:
        """The tables ``Dispatches``, ``Without a graph``, ``Left out``, ``Captured`` and ``Memory``."""
        groups = tuple(
            (group.name, str(group.num_keys), f"{group.seconds:.3f}", *map(str, asdict(group.memory).values()))
            for group in self.groups
        )
        kinds = ("pool bytes", "cached bytes", "driver bytes")
        return (
            traffic_table("Dispatches", self.keys),
            Table("Without a graph", ("reason", "batches"), tuple((str(r), str(n)) for r, n in self.fallbacks.items())),
            Table("Left out", ("mode", "key"), tuple((str(mode), str(key)) for mode, key in self.left_out)),
            Table("Captured", ("group", "keys", "seconds", *kinds), groups),
            Table("Memory", ("pool bytes", "buffer bytes"), ((str(self.pool_bytes), str(self.buffer_bytes)),)),
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
        try:
            from prometheus_client import generate_latest
            from prometheus_client.core import CounterMetricFamily as Counter
            from prometheus_client.core import GaugeMetricFamily as Gauge
        except ImportError as error:
            raise OptionError(
                "Prometheus text needs a package that is not installed",
                expected="prometheus-client",
                found=str(error),
                remedy="pip install 'graphpass[prometheus]'",
            ) from error
        families: list[Any] = []

        def add(
            kind: Any, name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[object, ...]]
        ) -> None:
            family = kind(f"graphpass_{name}", text, labels=labels)
            for *values, number in samples:
                family.add_metric(list(map(str, values)), number)
            families.append(family)

        of_key, graphs = ("mode", "key"), [(key.captured.mode, key.captured.descriptor, key) for key in self.keys]
        memory = [(g.name, asdict(g.memory)) for g in self.groups]
        add(Counter, "replays", "Batches that replayed a key", of_key, [(*at, key.replays) for *at, key in graphs])
        add(Counter, "real_tokens", "Tokens of those batches", of_key, [(*at, key.real_tokens) for *at, key in graphs])
        text = "Tokens of those batches with padding"
        add(Counter, "padded_tokens", text, of_key, [(*at, key.padded_tokens) for *at, key in graphs])
        text = "Seconds of a key's capture"
        add(Gauge, "capture_seconds", text, of_key, [(*at, key.captured.seconds) for *at, key in graphs])
        add(Counter, "fallbacks", "Batches without a graph", ("reason",), self.fallbacks.items())
        text = "Seconds of a group's captures"
        add(Gauge, "group_seconds", text, ("group",), [(group.name, group.seconds) for group in self.groups])
        text = "Device memory that a group's captures allocated"
        bytes_of = [(name, kind.removesuffix("_bytes"), size) for name, of in memory for kind, size in of.items()]
        add(Gauge, "group_bytes", text, ("group", "kind"), bytes_of)
        add(Gauge, "pool_bytes", "Bytes of the graph pool", (), [(self.pool_bytes,)])
        add(Gauge, "buffer_bytes", "Bytes of the buffers", (), [(self.buffer_bytes,)])

        return generate_latest(SimpleNamespace(collect=lambda: families)).decode()

    def figures(self, runtime: GraphRuntime, subject: str, *, adapts: bool = False) -> ReportFigures:
        """The figures of a report: those of the runtime, with the keys, batches and captures that the manager counted.

        Args:
            runtime: the manager's runtime.
            subject: the model's name.
            adapts: whether ``adapt()`` would capture graphs for this traffic.
        """
        of_runtime = runtime.figures(subject)
        keys = tuple(self._key_uses(runtime.uses()))
        known = captured_sizes(keys, "num_tokens")
        sizes = SizeTraffic("num_tokens", "capture_sizes", self.histogram, known, adapts=adapts)
        places = tuple(f"{mode} {key}" for mode, key in self.left_out)
        remedy = "raise max_bytes, or leave sizes out of capture_sizes"
        left_out = Problem("not captured", "the graph pool would exceed max_bytes", places, remedy=remedy)
        return replace(
            of_runtime,
            problems=(*of_runtime.problems, left_out) if places else of_runtime.problems,
            keys=keys,
            uncaptured=(
                *(calls for calls in of_runtime.uncaptured if calls.subject == UNCOMPILED),
                *(
                    CountedReason("steps", Reason(why.explanation, why.remedy, is_expected=why in _EXPECTED), batches)
                    for why, batches in self.fallbacks.items()
                ),
            ),
            traffic=(sizes,) if self.histogram else (),
            costs=replace(
                of_runtime.costs,
                capture_s=sum(group.seconds for group in self.groups),
                buffer_bytes=self.buffer_bytes,
                groups=self.groups,
            ),
        )

    def _key_uses(self, uses: Sequence[RegionUse]) -> Iterator[KeyUse]:
        for key in self.keys:
            counts = [use.counts for use in uses if (use.mode, use.key) == key.captured.key]
            sizes = key_sizes(key.captured.descriptor)
            yield replace(
                key.use("mixed" if sizes.pop("uniform", None) is None else "decode", sizes),
                graphs=sum(of_region.captured for of_region in counts),
                replays=sum(of_region.replayed for of_region in counts),
                copied=sum(of_region.copied for of_region in counts),
            )
