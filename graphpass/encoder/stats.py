"""What a manager has run: counted in every request, read when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpass.encoder.protocol import EncoderGraphKey
from graphpass.ladder.traffic import CapturedGraph, Traffic, TrafficCounts, padding_share
from graphpass.modes import CUDAGraphMode
from graphpass.report import Report, Table

__all__ = ["EncoderCounts", "EncoderStats"]


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """A snapshot, from the manager's beginning on; ``print`` it.

    Attributes:
        requests: calls of ``execute``.
        hits: items that were served by a graph.
        misses: items that ran eagerly: before the capture, too large for every graph, under other settings, or
            cheaper so.
        eager_calls: in how many calls.
        eager_tokens: output tokens of those items.
        replays: of all graphs, those that were dropped since included.
        replayed_tokens: output tokens of the items that they served.
        computed_tokens: what they computed, padding included.
        budgets: the graphs that there are now, the largest budget first.
        histogram: output tokens of a replayed batch → how many such batches there were, ascending; batches of no
            tokens are left out. What :func:`graphpass.plan_sizes` makes budgets of.
        other_settings: setting that was another than at the capture → requests that ran eagerly for it.
        failed: keys that could not be captured, or were left out for ``max_pool_bytes``, with the reason.
        pool_bytes: of the graph pool; 0 on the CPU tape.
        buffer_bytes: of the buffers that graphs read.
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
    failed: tuple[tuple[EncoderGraphKey, str], ...]
    pool_bytes: int
    buffer_bytes: int

    @property
    def hit_rate(self) -> float:
        """The share of the items that was served by a graph; 0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    @property
    def padding_waste(self) -> float:
        """The share of the tokens computed by replays that was padding."""
        return padding_share(self.replayed_tokens, self.computed_tokens)

    def summary(self) -> str:
        """One line, as it is logged."""
        return (
            f"encoder graphs: {self.requests} requests, {self.hits} items replayed and {self.misses} run eagerly "
            f"(hit rate {100 * self.hit_rate:.1f} %), {self.replays} replays, {100 * self.padding_waste:.1f} % padding"
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
        failed = tuple((str(key), reason) for key, reason in self.failed)
        settings = tuple((name, str(count)) for name, count in self.other_settings.items())
        tables = (
            Table("Budgets", columns, rows),
            Table("Without a graph", ("budget", "reason"), failed),
            Table("Eager, for another setting than at the capture", ("setting", "requests"), settings),
        )
        return f"{self.summary()}\n{Report(tables)}"


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
        if num_tokens:  # a batch of empty items fits every budget, and asks for none
            self._histogram[num_tokens] += 1

    def ran_eagerly(self, num_items: int, num_tokens: int) -> None:
        """Count one eager call."""
        self.misses += num_items
        self.eager_calls += 1
        self.eager_tokens += num_tokens

    def under_another(self, setting: str) -> bool:
        """Count one request that runs eagerly since the setting is not that of the capture; whether it is the first."""
        self._other_settings[setting] += 1
        return self._other_settings[setting] == 1

    def snapshot(
        self,
        captured: Sequence[CapturedGraph],
        failed: Sequence[tuple[EncoderGraphKey, str]],
        *,
        pool_bytes: int,
        buffer_bytes: int,
    ) -> EncoderStats:
        """The counts as of now, with what is captured now; hits of graphs that were cleared still count."""
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
