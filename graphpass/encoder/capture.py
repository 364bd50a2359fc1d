"""Captures an encoder's ladder: all keys that fit into the memory limit, with costs and the state of the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.encoder.costs import EncoderCosts, Load, TimedExample, measured_costs
from graphpass.encoder.graphs import EncoderGraphs, eager_outputs
from graphpass.encoder.options import EncoderOptions
from graphpass.encoder.planner import BatchPlanner, PackingCosts
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    SupportsEncoderCudaGraph,
    SupportsEncoderExamples,
    checked_specs,
    grouped,
)
from graphpass.encoder.stats import EncoderCounts, EncoderStats
from graphpass.errors import CaptureError
from graphpass.ladder.estimate import NOTHING_ESTIMATED, Key, MemoryEstimate, PoolModel
from graphpass.ladder.estimating import estimated
from graphpass.ladder.limit import KeyPool, capture_within
from graphpass.ladder.modelstate import ModelState
from graphpass.ladder.progress import capture_progress
from graphpass.ladder.traffic import CapturedGraph
from graphpass.ledger import Reason, why_failed
from graphpass.modes import CUDAGraphMode

__all__ = ["CapturedLadder", "EncoderLadder"]

_log = logging.getLogger("graphpass")


@dataclass(frozen=True, slots=True)
class CapturedLadder:
    """The result of one capture. It owns the graphs; :meth:`close` releases them.

    Attributes:
        graphs: graphs, buffers and pool.
        budgets: {captured key: time and memory of its capture}, the largest budget first.
        failed: (key, reason) of keys without a graph.
        planner: packs items into the captured keys.
        state: weights and settings of the encoder at capture.
        graph_pool: the shared graph pool; None if the pool is not shared.
    """

    graphs: EncoderGraphs
    budgets: Mapping[EncoderGraphKey, CapturedGraph]
    failed: tuple[tuple[EncoderGraphKey, Reason], ...]
    planner: BatchPlanner
    state: ModelState
    graph_pool: Any

    def stats(self, counts: EncoderCounts) -> EncoderStats:
        """A snapshot of ``counts`` with the budgets and the memory of these graphs."""
        return counts.snapshot(
            tuple(self.budgets.values()),
            self.failed,
            pool_bytes=self.graphs.runtime.pool_bytes(),
            buffer_bytes=self.graphs.buffers.num_bytes(),
        )

    def close(self) -> None:
        """Release graphs, buffers and the pool."""
        self.graphs.close()


@dataclass(frozen=True, slots=True)
class EncoderLadder:
    """The keys of an encoder and everything that their capture needs.

    The caller enters :func:`graphpass.capture.torchsettings.capture_settings` around every method.

    Attributes:
        model: the encoder; compiled before the capture if the options say so.
        config: the encoder's configuration.
        keys: the keys to capture, the largest budget first.
        options: costs and limits.
        device: device of the encoder.
        dtype: dtype of its inputs.
        notes: the runtime whose report says which keys have no graph.

    Raises:
        EncoderConfigError: ``options.costs`` has no cost for a budget.
    """

    model: SupportsEncoderCudaGraph
    config: EncoderCudaGraphConfig
    keys: Sequence[EncoderGraphKey]
    options: EncoderOptions
    device: torch.device
    dtype: torch.dtype
    notes: GraphRuntime

    def __post_init__(self) -> None:
        if isinstance(self.options.costs, PackingCosts):  # raises before the capture if a cost is missing
            EncoderCosts.of_user(self.options.costs, grouped(self.config, self.keys))

    def planner(self, keys: Sequence[EncoderGraphKey] = (), costs: EncoderCosts | None = None) -> BatchPlanner:
        """A planner for the captured ``keys``; without keys it plans eager calls only."""
        return BatchPlanner(self.config, keys, costs, self.options.max_eager_tokens or self.keys[0].tokens)

    def capture(self, graph_pool: Any) -> CapturedLadder:
        """Capture the keys in their order, within ``max_pool_bytes``, and measure costs if the options say so.

        A key whose capture fails gets no graph.

        Args:
            graph_pool: a CUDA graph pool to share; None: a new pool.

        Raises:
            EncoderConfigError: a method of the encoder contradicts its configuration.
        """
        fits = self._what_fits()
        graphs = self._new_graphs(graph_pool)
        try:
            with graphs.runtime.capturing():
                budgets, failed = self._capture_keys(graphs, fits)
            captured = list(budgets)
            planner = self.planner(captured, self._costs(graphs, captured))  # guard: encoder_failed_budget
            state = ModelState.of_object(self.model)
            graphs.memory.settle()  # release memory that warm-ups left in the allocator's cache
        except BaseException:
            graphs.close()
            raise
        return CapturedLadder(graphs, budgets, tuple(failed), planner, state, graph_pool)

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory that :meth:`capture` needs, from at most three captures in a throwaway pool.

        Raises:
            CaptureError: one of these captures failed.
        """
        graphs, keys = self._new_graphs(), self._by_descriptor()
        try:
            return estimated(
                {"encoder": list(keys)},
                graphs.runtime,
                graphs.memory,
                lambda key: graphs.capture(keys[key]).memory,
                contextlib.nullcontext,
                buffer_bytes=graphs.buffers.num_bytes(),
                buffers_exist=False,
            )
        finally:
            graphs.close()

    def _new_graphs(self, graph_pool: Any = None) -> EncoderGraphs:
        return EncoderGraphs(self.model, self.config, self.keys, self.device, self.dtype, graph_pool)

    def _by_descriptor(self) -> dict[Key, EncoderGraphKey]:
        return {(CUDAGraphMode.FULL, key.descriptor): key for key in self.keys}

    def _what_fits(self) -> PoolModel:
        """An estimate of the pool's growth if there is a limit on it, else an empty estimate."""
        if self.options.max_pool_bytes is not None:
            with contextlib.suppress(CaptureError):  # a key whose capture fails gets no graph
                return self.estimate().pool
        return NOTHING_ESTIMATED.pool

    def _capture_keys(
        self, graphs: EncoderGraphs, fits: PoolModel
    ) -> tuple[dict[EncoderGraphKey, CapturedGraph], list[tuple[EncoderGraphKey, Reason]]]:
        """Capture the keys. Returns the captured budgets, and (key, reason) of the keys without a graph."""
        keys, most = self._by_descriptor(), self.options.max_pool_bytes
        budgets: dict[EncoderGraphKey, CapturedGraph] = {}
        failed: list[tuple[EncoderGraphKey, Reason]] = []
        with capture_progress(self.keys, self.options.progress) as progress:

            def capture(of: Key) -> None:
                progress.set_postfix_str(str(keys[of]))
                try:
                    budgets[keys[of]] = graphs.capture(keys[of])
                except (CaptureError, torch.OutOfMemoryError) as error:
                    _log.debug("encoder budget %s: %s", keys[of], error)
                    why = why_failed(error, otherwise="capture fewer budgets, or set max_pool_bytes")
                    failed.append((keys[of], why))
                    text, at = f"an encoder budget has no graph: {why}", str(keys[of])
                    self.notes.warn(text, why.remedy, at=at, is_recorded=True)
                progress.update()

            def drop() -> None:
                graphs.runtime.close()
                budgets.clear()
                failed.clear()

            pool = KeyPool(graphs.runtime.pool_bytes, capture, drop)
            left_out = capture_within(most, pool, (), list(keys), fits)  # guard: encoder_pool_bound
        too_much = Reason(
            f"the pool would be larger than max_pool_bytes={most}",
            "raise max_pool_bytes, or pass fewer token_budgets: their items replay a larger budget or run eagerly",
        )
        for key in (keys[of] for of in left_out):
            failed.append((key, too_much))
            text = f"an encoder budget has no graph: {too_much}"
            self.notes.warn(text, too_much.remedy, at=str(key), is_recorded=True)
        return budgets, failed

    # -- costs ------------------------------------------------------------------------------------------------------

    def _costs(self, graphs: EncoderGraphs, captured: Sequence[EncoderGraphKey]) -> EncoderCosts | None:
        """Costs of the captured keys, from the options or measured; None to pack greedily."""
        groups, costs = grouped(self.config, captured), self.options.costs
        if costs is None or not groups:
            return None
        if costs != "measured":
            return EncoderCosts.of_user(costs, groups)
        return measured_costs(groups, lambda key, num_items: self._example(graphs, key, num_items), self.device)

    def _example(self, graphs: EncoderGraphs, key: EncoderGraphKey, num_items: int | None) -> TimedExample:
        """Items that fill ``key``; without examples of the encoder, its full buffers, valid until the next call."""
        if isinstance(self.model, SupportsEncoderExamples):
            items = self.model.get_encoder_example_items(key, self.device, self.dtype, num_items)
            specs = checked_specs(self.model.get_encoder_cudagraph_item_specs(items), self.config)
            load = Load.of(specs)
            eager = self._saying_no_memory(key, lambda: eager_outputs(self.model, items))
            return TimedExample(load, lambda: graphs.replay(key, items), eager)
        graphs.fill_with_example(key)
        load = Load(key.tokens, key.items, 0.0)
        return TimedExample(load, lambda: graphs.run(key), self._saying_no_memory(key, lambda: graphs.run_eagerly(key)))

    def _saying_no_memory(self, key: EncoderGraphKey, eager: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            try:
                return eager()
            except torch.OutOfMemoryError as error:
                _log.debug("no memory for an eager call of %s: %s", key, error)
                self.notes.warn(
                    "no memory for an eager call beside the graphs: it is not chosen",
                    "set max_pool_bytes, so that the graphs leave memory for eager calls",
                    at=str(key),
                )
                raise

        return run
