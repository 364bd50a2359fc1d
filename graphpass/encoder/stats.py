"""Statistics of an encoder manager: hits, misses, padding, and time and memory of captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpass.encoder.protocol import EncoderGraphKey
from graphpass.ladder.traffic import CapturedGraph, Traffic, TrafficCounts, padding_share
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode
from graphpass.report.console import text_of
from graphpass.report.figures import counted
from graphpass.report.parts import Table

__all__ = ["EncoderCounts", "EncoderStats"]


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """A snapshot of the counters since the manager was created; ``print(stats)`` shows tables.

    Attributes:
        requests: calls of ``execute``.
        hits: items encoded by a replay. Items of no tokens need none; they are neither hits nor misses.
        misses: items encoded eagerly: before the capture, too large for every graph, under changed settings, or because
            an eager call was cheaper.
        eager_calls: number of eager calls.
        eager_tokens: output tokens of the items that were encoded eagerly.
        replays: replays of all graphs, including graphs that were released since.
        replayed_tokens: output tokens of the items that were encoded by replays.
        computed_tokens: output tokens of all replays, padding included.
        budgets: use of the current graphs, the largest budget first.
        histogram: {output tokens of a replayed batch: number of such batches}, ascending.
            :func:`graphpass.plan_sizes` computes budgets from it.
        other_settings: {setting that differs from the capture: requests since then that ran eagerly because of it}.
        failed: (key, reason) of keys whose capture failed or that did not fit into ``max_pool_bytes``.
        pool_bytes: size of the graph pool; 0 on the CPU tape.
        buffer_bytes: size of the input buffers of graphs.
    """

    requests: int
    hits: int
    misses: int
    eager_calls: int
    eager_tokens: int
    replays: int
    replayed_tokens: int
    computed_tokens: int
    budgets: tuple[Traffic, ...]
    histogram: Mapping[int, int]
    other_settings: Mapping[str, int]
    failed: tuple[tuple[EncoderGraphKey, Reason], ...]
    pool_bytes: int
    buffer_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the items that were encoded by a replay, 0 to 1; 0 before the first item."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    @property
    def padding_waste(self) -> float:
        """Share of padding among the tokens that replays computed, 0 to 1."""
        return padding_share(self.replayed_tokens, self.computed_tokens)

    def summary(self) -> str:
        """The line that the manager logs."""
        return (
            f"encoder graphs: {self.requests} requests, {self.hits} items replayed and {self.misses} run eagerly "
            f"(hit rate {100 * self.hit_rate:.1f} %), {counted(self.replays, 'replay')}, "
            f"{100 * self.padding_waste:.1f} % padding"
        )

    def __str__(self) -> str:
        rows = tuple(
            (
                str(budget.captured.descriptor),
                str(budget.replays),
                str(budget.items),
                str(budget.real_tokens),
                f"{100 * budget.padding:.1f} %",
                f"{1000 * budget.captured.seconds:.1f}",
                str(budget.captured.pool_bytes),
            )
            for budget in self.budgets
        )
        columns = ("budget", "replays", "items", "tokens", "padding", "capture ms", "pool bytes")
        failed = tuple((str(key), str(reason)) for key, reason in self.failed)
        settings = tuple((name, str(count)) for name, count in self.other_settings.items())
        tables = (
            Table("Budgets", columns, rows),
            Table("Without a graph", ("budget", "reason"), failed),
            Table("Eager because a setting changed since the capture", ("setting", "requests"), settings),
        )
        return f"{self.summary()}\n{text_of(tables)}"


class EncoderCounts:
    """The running counts behind :class:`EncoderStats`."""

    def __init__(self) -> None:
        self.requests = self.misses = self.eager_calls = self.eager_tokens = 0
        self._traffic = TrafficCounts()
        self._histogram: Counter[int] = Counter()
        self._other_settings: Counter[str] = Counter()

    def replayed(self, key: EncoderGraphKey, num_items: int, num_tokens: int) -> None:
        """Count one replay."""
        self._traffic.replayed((CUDAGraphMode.FULL, key.descriptor), num_tokens, num_items)
        self._histogram[num_tokens] += 1

    def ran_eagerly(self, num_items: int, num_tokens: int) -> None:
        """Count one eager call."""
        self.misses += num_items
        self.eager_calls += 1
        self.eager_tokens += num_tokens

    def captured_anew(self) -> None:
        """Forget the settings that differed from an earlier capture."""
        self._other_settings.clear()

    def under_another(self, setting: str) -> None:
        """Count a request that runs eagerly because ``setting`` changed since the capture."""
        self._other_settings[setting] += 1

    def snapshot(
        self,
        captured: Sequence[CapturedGraph],
        failed: Sequence[tuple[EncoderGraphKey, Reason]],
        *,
        pool_bytes: int,
        buffer_bytes: int,
    ) -> EncoderStats:
        """The current counts, which include replays of graphs that were released since.

        Args:
            captured: the current graphs.
            failed: (key, reason) of keys without a graph.
            pool_bytes: size of the graph pool.
            buffer_bytes: size of the input buffers.
        """
        return EncoderStats(
            requests=self.requests,
            hits=self._traffic.items,
            misses=self.misses,
            eager_calls=self.eager_calls,
            eager_tokens=self.eager_tokens,
            replays=self._traffic.replays,
            replayed_tokens=self._traffic.real_tokens,
            computed_tokens=self._traffic.padded_tokens,
            budgets=tuple(map(self._traffic.of, captured)),
            histogram=dict(sorted(self._histogram.items())),
            other_settings=dict(self._other_settings),
            failed=tuple(failed),
            pool_bytes=pool_bytes,
            buffer_bytes=buffer_bytes,
        )
