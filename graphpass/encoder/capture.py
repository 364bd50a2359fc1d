"""Capturing an encoder's ladder: every key that can be captured and fits, timed, with what its graphs depend on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.encoder.costs import EncoderCosts, measured_costs
from graphpass.encoder.graphs import EncoderGraphs, eager_outputs
from graphpass.encoder.options import EncoderOptions
from graphpass.encoder.packing import PackingCosts
from graphpass.encoder.planner import BatchPlanner, grouped
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    SupportsEncoderCudaGraph,
    SupportsEncoderExamples,
)
from graphpass.errors import CaptureError
from graphpass.ladder.estimate import NOTHING_ESTIMATED, Key, MemoryEstimate, PoolModel
from graphpass.ladder.estimating import estimated
from graphpass.ladder.limit import KeyPool, capture_within
from graphpass.ladder.modelstate import ModelState
from graphpass.ladder.progress import capture_progress
from graphpass.ladder.traffic import CapturedGraph
from graphpass.modes import CUDAGraphMode

__all__ = ["CapturedLadder", "EncoderLadder"]

_log = logging.getLogger("graphpass")


@dataclass(frozen=True, slots=True)
class CapturedLadder:
    """What one capture has made, until :meth:`close`.

    Attributes:
        graphs: buffers, pool and graphs.
        budgets: the captured keys, the largest budget first, with what each capture took.
        failed: keys without a graph, with the reason.
        planner: packs items into the captured keys.
        state: of the encoder at capture: weights and settings.
        graph_pool: the pool that it shares with others; None for one of its own.
    """

    graphs: EncoderGraphs
    budgets: Mapping[EncoderGraphKey, CapturedGraph]
    failed: tuple[tuple[EncoderGraphKey, str], ...]
    planner: BatchPlanner
    state: ModelState
    graph_pool: Any

    def close(self) -> None:
        """Drop graphs and buffers, and give the pool back."""
        self.graphs.close()


@dataclass(frozen=True, slots=True)
class EncoderLadder:
    """What is to be captured. All of it is done in :func:`graphpass.capture.torchsettings.capture_settings`.

    Attributes:
        model: the encoder, compiled if it is to be.
        config: what it said of itself.
        keys: the largest budget first.
        options: costs and limits.
        device: where it runs.
        dtype: of its inputs.

    Raises:
        EncoderConfigError: the costs that were given miss a budget.
    """

    model: SupportsEncoderCudaGraph
    config: EncoderCudaGraphConfig
    keys: Sequence[EncoderGraphKey]
    options: EncoderOptions
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if isinstance(self.options.costs, PackingCosts):  # refused now rather than after the capture
            EncoderCosts.given(self.options.costs, grouped(self.config, self.keys))

    def planner(self, keys: Sequence[EncoderGraphKey] = (), costs: EncoderCosts | None = None) -> BatchPlanner:
        """Packs items into those of the keys that have graphs."""
        return BatchPlanner(self.config, keys, costs, self.options.max_eager_tokens or self.keys[0].tokens)

    def capture(self, graph_pool: Any) -> CapturedLadder:
        """Capture the keys in their order, or as many as ``max_pool_bytes`` has room for, and time what they cost.

        A key that cannot be captured is left out.

        Raises:
            EncoderConfigError: the encoder does not keep to its configuration.
        """
        fits = self._what_fits()
        graphs = self._new_graphs(graph_pool)
        try:
            with graphs.runtime.capturing():
                budgets, failed = self._capture_keys(graphs, fits)
            captured = list(budgets)
            planner = self.planner(captured, self._costs(graphs, captured))
            state = ModelState.of_object(self.model)
            graphs.memory.settle()  # nothing needs any more what warm-ups have left cached
        except BaseException:
            graphs.close()
            raise
        return CapturedLadder(graphs, budgets, tuple(failed), planner, state, graph_pool)

    def estimate(self) -> MemoryEstimate:
        """What :meth:`capture` will take, from at most three captures in a throwaway pool.

        Raises:
            CaptureError: one of them failed.
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
        """How the pool grows, as far as a limit makes it worth asking; else nothing is known."""
        if self.options.max_pool_bytes is not None:
            with contextlib.suppress(CaptureError):  # one that cannot be captured is left out
                return self.estimate().pool
        return NOTHING_ESTIMATED.pool

    def _capture_keys(
        self, graphs: EncoderGraphs, fits: PoolModel
    ) -> tuple[dict[EncoderGraphKey, CapturedGraph], list[tuple[EncoderGraphKey, str]]]:
        """The budgets that have graphs now, and the keys that have none, with the reason."""
        keys, most = self._by_descriptor(), self.options.max_pool_bytes
        budgets: dict[EncoderGraphKey, CapturedGraph] = {}
        failed: list[tuple[EncoderGraphKey, str]] = []
        with capture_progress(self.keys) as progress:

            def capture(of: Key) -> None:
                progress.set_postfix_str(str(keys[of]))
                try:
                    budgets[keys[of]] = graphs.capture(keys[of])
                except (CaptureError, torch.OutOfMemoryError) as error:
                    failed.append((keys[of], str(error)))
                    _log.warning("encoder budget %s has no graph: %s", keys[of], error)
                progress.update()

            def drop() -> None:
                graphs.runtime.close()
                budgets.clear()
                failed.clear()

            pool = KeyPool(graphs.runtime.pool_bytes, capture, drop)
            left_out = capture_within(most, pool, (), list(keys), fits)
        failed += [(keys[of], f"the pool would be larger than max_pool_bytes={most}") for of in left_out]
        return budgets, failed

    # -- costs ------------------------------------------------------------------------------------------------------

    def _costs(self, graphs: EncoderGraphs, captured: Sequence[EncoderGraphKey]) -> EncoderCosts | None:
        """What packing goes by, for the graphs that there are."""
        groups, given = grouped(self.config, captured), self.options.costs
        if given is None or not groups:
            return None
        if given != "measured":
            return EncoderCosts.given(given, groups)
        return measured_costs(
            groups,
            lambda key: self._replay_to_time(graphs, key),
            lambda key: self._eager_call_to_time(graphs, key),
            self.device,
        )

    def _replay_to_time(self, graphs: EncoderGraphs, key: EncoderGraphKey) -> Callable[[], object]:
        if isinstance(self.model, SupportsEncoderExamples):
            items = self.model.get_encoder_example_items(key, self.device, self.dtype)
            return lambda: graphs.replay(key, items)
        graphs.fill_with_example(key)
        return lambda: graphs.run(key)

    def _eager_call_to_time(self, graphs: EncoderGraphs, key: EncoderGraphKey) -> Callable[[], object]:
        if isinstance(self.model, SupportsEncoderExamples):
            items = self.model.get_encoder_example_items(key, self.device, self.dtype)
            return lambda: eager_outputs(self.model, items)
        graphs.fill_with_example(key)
        return lambda: graphs.run_eagerly(key)
