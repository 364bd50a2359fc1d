"""Graphs for padded sizes that recur, of one callable: the policy over its counts, times and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch

from cgpass.keyrules import AutoRules
from graphpass.capture.cuda import PROCESS_MEMORY, total_bytes
from graphpass.capture.replay import GraphEntry
from graphpass.capture.runtime import GraphRuntime
from graphpass.dispatch.recurring import (
    ExactSizes,
    OwnGraphs,
    RecurringKey,
    RecurringKeys,
    RecurringSize,
    Times,
    bytes_allowed,
)
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Row
from graphpass.options import Settings

_REPLAYS_A_CAPTURE = 16
"""On the CPU, where rows stand for time: a capture counts as so many replays of its size."""

_LAUNCHES_S = 1e-4
"""What a run without a graph costs the host beyond a replay, at least; its time on the device does not contain it."""


class ExactGraphs:
    """What one callable tells the policy, in seconds; on the CPU in rows."""

    def __init__(
        self, name: str, runtime: GraphRuntime, rules: AutoRules, settings: Settings, device: torch.device
    ) -> None:
        self._keys: RecurringKeys = rules.keys
        self._is_timed = device.type != "cpu"
        # The runs of single regions do not tell how long the whole takes without a graph.
        never_without = settings.on_fallback == "error" or settings.padding_check == "strict"
        self._runs_alone = rules.mode is CUDAGraphMode.FULL and not never_without
        #: {key: (its calls, the times of keys like it, its rows)}
        self._ran = ran = dict[BatchDescriptor, tuple[Row, Times, int]]()
        compiled = [astuple(record.seconds) for record in runtime.callables() if record.name == name]
        compile_s = sum(map(sum, compiled)) * self._is_timed
        self._captures = captures = Row()

        def spent() -> float:
            run = sum(row.n * (times.at(rows) or 0.0) for row, times, rows in list(ran.values()))
            return run + captures.seconds + compile_s

        # Neither function refers to this object: the graphs of all callables count as long as ``sizes`` lives.
        self.sizes = ExactSizes(
            PROCESS_MEMORY.shared(OwnGraphs, device),
            bytes_allowed(settings.graph_bytes, total_bytes(device), has_ladder=bool(settings.capture_sizes)),
            calls=lambda: sum(row.n for row, _, _ in list(ran.values())),
            spent=spent,
            captures_as=None if self._is_timed else _REPLAYS_A_CAPTURE.__mul__,
        )

    def size_of(self, key: RecurringKey, real: tuple[int, ...], counts: Row) -> RecurringSize | None:
        """The record of calls with these sizes, which ``key`` serves; None if it is no larger than they are."""
        real_rows, group = self._rows(real)
        key_rows, _ = self._rows(key.sizes)
        self._ran[key.descriptor] = counts, self.sizes.times_of(group)[0], key_rows
        if key.is_exact:
            return self.sizes.find(real)
        return self.sizes.size_of(real, group, real_rows, key_rows) if key_rows != real_rows else None

    def captured(self, key: RecurringKey, seconds: float, entries: Sequence[GraphEntry]) -> None:
        """Record the capture of a key."""
        rows, group = self._rows(key.sizes)
        replayed, run = self.sizes.times_of(group)
        timed = functools.partial(_sum_of, [entry.cost.seconds for entry in entries])
        replayed.add(rows, timed if self._is_timed else lambda: rows)
        if self._runs_alone:
            run.add(rows, functools.partial(_with_launches, entries[0].cost.run_seconds))
        self._captures.seconds += seconds * self._is_timed
        self.sizes.captured(seconds, sum(entry.cost.driver_bytes for entry in entries))

    def _rows(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        padded, exact = self._keys.padded_sizes(sizes)
        return math.prod(padded), exact


def _with_launches(timed: Callable[[], float | None]) -> float | None:
    seconds = timed()
    return None if seconds is None else seconds + _LAUNCHES_S


def _sum_of(timed: Sequence[Callable[[], float | None]]) -> float | None:
    seconds = [one() for one in timed]
    return None if None in seconds else sum(filter(None, seconds))
