"""Graphs for padded sizes that recur, of one callable: its counts, times and bytes for the policy, and their drop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple

from cgpass.keyrules import AutoRules
from cgpass.wrappers import CallableGraphs
from graphpass.capture.cuda import total_bytes
from graphpass.dispatch.owngraphs import (
    MOST_LOSSES,
    NO_ROOM,
    OwnGraphs,
    RecurringSize,
    RecurringSizes,
    bytes_allowed,
)
from graphpass.dispatch.recurring import RecurringKey
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Row, named_sizes
from graphpass.ranks.lockstep import Lockstep
from graphpass.report.figures import PADDING_BEFORE


class ExactGraphs(RecurringSizes):
    """The graphs of one callable for sizes that recur."""

    def __init__(self, rules: AutoRules, graphs: CallableGraphs) -> None:
        self._graphs, self._name, self._runtime = graphs, graphs.name, graphs.runtime
        self._mode, self._keys, settings = rules.mode, rules.keys, graphs.settings
        # The runs of single regions do not tell how long the whole takes without a graph.
        never_without = settings.on_fallback == "error" or settings.padding_check == "strict"
        self._runs_alone = rules.mode is CUDAGraphMode.FULL and not never_without
        is_timed = graphs.device.type != "cpu"
        self._ranks: Lockstep | None = self._runtime.lockstep.get(self._name)
        compiled = [record.seconds for record in self._runtime.callables() if record.name == self._name]
        super().__init__(
            OwnGraphs.on(graphs.device),
            bytes_allowed(settings.graph_bytes, total_bytes(graphs.device), has_ladder=bool(settings.capture_sizes)),
            is_timed=is_timed,
            spent=sum(map(sum, map(astuple, compiled))) * is_timed,
            plain_s=sum(one.compile for one in compiled) if graphs.plain and is_timed else None,
            most=None if self._ranks is None else self._ranks.most,
        )

    def record(self, key: RecurringKey, real: tuple[int, ...]) -> RecurringSize | None:
        """The record of calls with these sizes, which ``key`` serves; None if it is no larger than they are."""
        if self._graphs.settings.graph_bytes == 0:
            return None
        if key.is_exact:
            return self.find(real)
        (real_rows, group), (key_rows, _) = self._rows(real), self._rows(key.sizes)
        return self.size_of(real, group, real_rows, key_rows) if key_rows != real_rows else None

    def captured(self, key: RecurringKey, size: RecurringSize | None, calls: Row | None, seconds: float) -> None:
        """Record the first capture of a key; its calls count if they may be padded."""
        of_regions = self._graphs.entries_at(self._mode, key.descriptor)
        latest = [entries[-1] for entries in of_regions if entries]
        rows, group = self._rows(key.sizes)
        if calls is not None:
            self.count_calls(key.descriptor, calls, group, rows)
        replayed, run = self.times_of(group)
        timed = functools.partial(_sum_of, [entry.seconds for entry in latest])
        if self._ranks is None:
            replayed.add(rows, timed if self._is_timed else lambda: rows)
        if self._runs_alone and self._ranks is None:
            run.add(rows, latest[0].run_seconds)
        num_bytes = sum(entry.pool_bytes for entry in latest), sum(entry.driver_bytes for entry in latest)
        self.captured_any(seconds, *num_bytes)
        if key.is_exact and size is not None:
            before = self._runtime.ledger.rows(self._name, PADDING_BEFORE)[self._mode, key.descriptor]
            before.seconds += size.cost()
            if not self.captured_own(size, seconds, *num_bytes):
                self.drop(size, MOST_LOSSES)
                self.leave_out(size)

    def recount(self) -> None:
        """Pad the sizes again whose graphs have died."""
        for size in list(self._sizes.values()):
            if size.own_bytes is not None and not self._keys.exact_key(size.real).is_captured:
                self.dropped(size)

    def drop(self, size: RecurringSize, losses: int = 0) -> None:
        """Drop the graph of a size now, or in the thread that ends the present forward of the pool."""

        def drop() -> None:
            if size.own_bytes is not None:
                key = self._keys.exact_key(size.real)
                key.num_graphs = 0
                self.dropped(size, losses)
                self._runtime.lease.drop(
                    [entry.graph for of in self._graphs.wrappers(self._mode) for entry in of.table.take(key.descriptor)]
                )

        self._runtime.lease.turn.when_unused(drop)

    def leave_out(self, size: RecurringSize) -> None:
        """Note a size for whose graph there is no room."""
        at = f"{self._name} {named_sizes(self._keys.named(size.real))}"
        self._runtime.ledger.note(NO_ROOM, at=at, is_problem=True)

    def _rows(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        padded, exact = self._keys.padded_sizes(sizes)
        return math.prod(padded), exact


def _sum_of(timed: Sequence[Callable[[], float | None]]) -> float | None:
    seconds = [one() for one in timed]
    return None if None in seconds else sum(filter(None, seconds))
