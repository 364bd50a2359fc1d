"""Statistics of an encoder manager, as tables and as figures of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from graphpass.capture.runtime import GraphRuntime
from graphpass.encoder.budgets import CapturedEncoder
from graphpass.encoder.protocol import EncoderGraphKey
from graphpass.ledger import CountedReason, Ledger, Reason, Row
from graphpass.report import Problem, ReportFigures, SizeTraffic, Table
from graphpass.report.drawing import counted, text_of
from graphpass.report.figures import key_sizes, padding_share
from graphpass.serving.traffic import Traffic, captured_group, traffic_table

REPLAYED, EAGER, REQUEST, OTHER_SETTING = "replayed", "ran eagerly", "request", "other setting"  # events of an encoder


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """A snapshot of the counters since the manager was created; ``print(stats)`` shows tables."""

    requests: int  #: calls of ``execute``
    hits: int  #: items encoded by a replay; items of no tokens are neither hits nor misses
    misses: int  #: items encoded eagerly
    eager_calls: int
    eager_tokens: int  #: output tokens of the items that were encoded eagerly
    replays: int  #: replays of all graphs, also of those released since
    replayed_tokens: int  #: output tokens of the items that were encoded by replays
    computed_tokens: int  #: output tokens of all replays, padding included
    budgets: tuple[Traffic, ...]  #: use of the current graphs, the largest budget first
    #: {output tokens of a replayed batch: number of batches}, from which :func:`graphpass.plan_sizes` computes budgets
    histogram: Mapping[int, int]
    #: {setting that differs from the capture: requests that ran eagerly because of it}
    other_settings: Mapping[str, int]
    #: (key, reason) of keys without a graph
    failed: tuple[tuple[EncoderGraphKey, Reason], ...]
    pool_bytes: int  #: size of the graph pool; 0 on the CPU tape
    buffer_bytes: int  #: size of the input buffers of graphs

    @classmethod
    def of(cls, ledger: Ledger, captured: CapturedEncoder | None) -> EncoderStats:
        """The counts so far."""
        replays, eager = ledger.rows("encoder", REPLAYED), ledger.rows("encoder", EAGER).get("", Row())
        budgets = () if captured is None else captured.budgets.values()
        return cls(
            requests=ledger.rows("encoder", REQUEST).get("", Row()).n,
            hits=sum(row.items for row in replays.values()),
            misses=eager.items,
            eager_calls=eager.n,
            eager_tokens=eager.real,
            replays=sum(row.n for row in replays.values()),
            replayed_tokens=sum(row.real for row in replays.values()),
            computed_tokens=sum(row.n * descriptor.num_tokens for (_, descriptor), row in replays.items()),
            budgets=tuple(Traffic.of(graph, replays) for graph in budgets),
            histogram=dict(sorted(ledger.sizes["tokens"].items())),
            other_settings={setting: row.n for setting, row in ledger.rows("encoder", OTHER_SETTING).items()},
            failed=() if captured is None else captured.failed,
            pool_bytes=0 if captured is None else captured.graphs.runtime.pool_bytes(),
            buffer_bytes=0 if captured is None else captured.graphs.buffers.num_bytes(),
        )

    @property
    def hit_rate(self) -> float:
        """Share of the items that were encoded by a replay, 0 to 1."""
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
        failed = tuple((str(key), str(reason)) for key, reason in self.failed)
        settings = tuple((name, str(count)) for name, count in self.other_settings.items())
        tables = (
            traffic_table("Budgets", self.budgets, has_items=True),
            Table("Without a graph", ("budget", "reason"), failed),
            Table("Eager because a setting changed since the capture", ("setting", "requests"), settings),
        )
        return f"{self.summary()}\n{text_of(tables)}"

    def figures(
        self, compiled: GraphRuntime, graphs: GraphRuntime | None, subject: str, *, is_enabled: bool, adapts: bool
    ) -> ReportFigures:
        """The figures of a report, from the runtimes of the compiled encoder and of the graphs."""
        figures, captured = compiled.figures(subject), None if graphs is None else graphs.figures(subject)
        budgets = tuple(sorted({budget.captured.descriptor.num_tokens for budget in self.budgets}))
        largest = budgets[-1] if budgets else 0
        sizes = SizeTraffic("tokens", "token_budgets", self.histogram, budgets, at_least=largest, adapts=adapts)
        group = captured_group("encoder", [budget.captured for budget in self.budgets])
        return replace(
            figures,
            problems=(*figures.problems, *(() if captured is None else captured.problems), *self._problems()),
            keys=tuple(
                budget.use("encoder", {"tokens": key.num_tokens, "items": key.num_reqs, **key_sizes(key, ())})
                for budget in self.budgets
                for key in [budget.captured.descriptor]
            ),
            uncaptured=(*(use for use in figures.uncaptured if use.subject == "encoder"), *self._eager(is_enabled)),
            traffic=(sizes,) if self.histogram else (),
            costs=replace(
                figures.costs,
                graphs=len(self.budgets),
                capture_s=group.seconds,
                pool_bytes=self.pool_bytes,
                buffer_bytes=self.buffer_bytes,
                replays=self.replays,
                saved_s=None if captured is None else captured.costs.saved_s,
                groups=(group,) if self.budgets else (),
            ),
        )

    def _problems(self) -> Iterator[Problem]:
        keys: dict[Reason, list[str]] = {}
        for key, reason in self.failed:
            keys.setdefault(reason, []).append(f"tokens={key.tokens}")
        for reason, budgets in keys.items():
            yield Problem("not captured", str(reason), tuple(budgets), remedy=reason.remedy)
        for setting, requests in self.other_settings.items():
            what = f"{setting} changed since the capture, so requests ran eagerly"
            yield Problem("no graph", what, times=requests, remedy="call clear() and capture() under the new setting")

    def _eager(self, is_enabled: bool) -> tuple[CountedReason, ...]:
        if not self.eager_calls:
            return ()
        reason = Reason("an eager call was cheaper, or no budget holds the item", is_expected=True)
        if not is_enabled:
            reason = Reason("enable=False", is_expected=True)
        elif not self.budgets:
            reason = Reason("nothing is captured", "call capture()")
        return (CountedReason("encoder", reason, self.eager_calls),)
