"""The encoder manager: encodes images of any size with a few whole-encoder graphs.

A request is packed into batches (:mod:`graphpass.encoder.planner`), each of which replays a graph or runs eagerly.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.settings import capture_settings
from graphpass.capture.staging import copy_each
from graphpass.dispatch.owngraphs import due
from graphpass.encoder.budgets import CapturedEncoder, EncoderLadder, check_outputs, eager_outputs
from graphpass.encoder.encoderstats import EAGER, OTHER_SETTING, REPLAYED, REQUEST, EncoderStats
from graphpass.encoder.options import EncoderOptions, checked_config, keys_of
from graphpass.encoder.planner import BatchPlanner, PackedBatch, runs_of
from graphpass.encoder.protocol import (
    Buffers,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
    Outputs,
    SupportsEncoderCompilation,
    SupportsEncoderCudaGraph,
    SupportsEncoderKernels,
    checked_specs,
    contradiction,
)
from graphpass.encoder.sharding import encoded_by_all
from graphpass.errors import CaptureError, EncoderConfigError, positive
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Ledger, Reason
from graphpass.ranks.group import DataParallelAgreement
from graphpass.report import Report
from graphpass.serving.estimate import NOTHING_ESTIMATED, MemoryEstimate

_log = logging.getLogger("graphpass")
_LARGER = (
    "pass token_budgets that hold them (and max_tokens, if the largest batch is smaller), or scale the images down"
)


class EncoderCudaGraphManager:
    """Captures an encoder for a ladder of token budgets, and encodes items by replaying the graphs.

    Threads may share a manager; their requests run one after the other.

    Args:
        model: the encoder; :meth:`from_model` creates one from a stock tower.
        options: see :class:`EncoderOptions`.
        device: device of the encoder.
        dtype: dtype of its inputs and outputs.
        group: a ``torch.distributed`` process group that distributes items over its ranks. Every rank creates a manager
            and calls :meth:`execute` with the same items. None: this process encodes all items.

    Attributes:
        model: the encoder.
        place: device and dtype of the encoder.
        runtime: counts compiled artifacts, and notes what runs without a graph. Graphs have a separate runtime.

    Raises:
        EncoderConfigError: an option contradicts another option or the model.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        *,
        options: EncoderOptions | None = None,
        device: torch.device | str,
        dtype: torch.dtype,
        group: Any = None,
    ) -> None:
        self.model = model
        self._options, self._group = options or EncoderOptions(), group
        self.place = torch.device(device), dtype
        self._config = checked_config(model.get_encoder_cudagraph_config())
        keys = keys_of(self._options, self._config, model.get_encoder_cudagraph_budget_range())
        self.runtime = GraphRuntime(device=self.place[0])
        self._kernels = (model.encoder_attention_kernel(),) if isinstance(model, SupportsEncoderKernels) else ()
        for use in self._kernels:
            if use.remedy:
                self.runtime.warn(f"attention runs a slower kernel, {use.kernel}: {use.why}", use.remedy)
        self._ladder = EncoderLadder(model, self._config, keys, self._options, *self.place, self.runtime)
        self._captured: CapturedEncoder | None = None
        self._is_to_recapture, self._graph_pool = False, None
        self._eager_planner = self._ladder.planner()
        self._is_to_compile = isinstance(model, SupportsEncoderCompilation) and self._options.compile is not False
        if self._options.compile and not self._is_to_compile:
            raise EncoderConfigError(
                "the encoder cannot be compiled",
                expected="a model with compile_encoder(compiler, runtime, **options)",
                found=f"compile=True and {type(model).__name__}",
                remedy="omit compile to capture the eager encoder",
            )
        self._ledger = Ledger()
        self._requests, self._eager = (self._ledger.rows("encoder", event)[""] for event in (REQUEST, EAGER))
        self._replays = self._ledger.rows("encoder", REPLAYED)
        has_ranks = group is not None and dist.get_world_size(group) > 1
        self._agreement = DataParallelAgreement(group) if has_ranks else None
        self._lock = threading.RLock()

    @classmethod
    def from_model(
        cls,
        tower: torch.nn.Module,
        *,
        options: EncoderOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Any = None,
        **adapter_options: Any,
    ) -> Self:
        """A manager for a stock Hugging Face tower, through its adapter.

        Args:
            tower: the vision tower, ``model.visual`` or ``model.vision_model``. Its weights are shared.
            options: see the class.
            device: None: that of the tower's parameters.
            dtype: None: that of the tower's parameters.
            group: see the class.
            adapter_options: options of the adapter.

        Raises:
            EncoderConfigError: there is no adapter for the tower.
        """
        from graphpass.encoder.adapters import adapter_for

        model = adapter_for(tower, **adapter_options)
        weight = next(tower.parameters())
        return cls(model, options=options, device=device or weight.device, dtype=dtype or weight.dtype, group=group)

    # -- capturing --------------------------------------------------------------------------------------------------

    def get_num_graphs_to_capture(self) -> int:
        """Number of graphs that :meth:`capture` captures; 0 with ``enable=False``."""
        return len(self._ladder.keys) if self._options.enable else 0

    def is_captured(self) -> bool:
        """Whether there is a captured graph."""
        return bool(self._budgets())

    def capture(self, graph_pool: Any = None) -> None:
        """Capture a graph for every budget, the largest first, and measure the costs of replays and eager calls.

        A budget whose capture fails gets no graph: its batches replay a larger budget or run eagerly.

        Args:
            graph_pool: a CUDA graph pool to share (``torch.cuda.graph_pool_handle()``), or if torch refuses it
                once its graphs are gone, with a warning a new one; None: a new pool.

        Raises:
            CaptureError: the encoder is already captured.
            EncoderConfigError: a method of the encoder contradicts its configuration.
        """
        with self._lock, capture_settings():
            if self.is_captured():
                raise CaptureError(
                    "the encoder is already captured",
                    expected="a manager without graphs",
                    found=f"{len(self._budgets())} graphs",
                    remedy="call clear() first",
                )
            if not self._options.enable:
                return
            self._drop_graphs()  # an earlier capture may have failed for every budget
            self._compile()
            self._graph_pool = graph_pool
            self._captured, self._is_to_recapture = self._ladder.capture(graph_pool), False
            self._ledger.rows("encoder", OTHER_SETTING).clear()

    def adapt(self, max_sizes: int = 8) -> tuple[int, ...]:
        """Capture a budget of its own for each batch size that padding has served at least three times.

        Call it between requests. The sizes with the most padding come first. The costs of all budgets are measured
        again. The new budgets stay when the encoder is captured again; if this fails, the next request captures the
        budgets of before.

        Args:
            max_sizes: most budgets to add now; a budget has a graph for each path and axis value.

        Returns:
            The output tokens of the new budgets, ascending.

        Raises:
            CaptureError: the encoder is not captured, or a setting differs from the capture.
            EncoderConfigError: ``max_sizes`` is below 1, the user's ``costs`` have none for a new budget, or a method
                of the encoder contradicts its configuration.
        """
        positive(max_sizes, "max_sizes", error=EncoderConfigError)
        with self._lock, capture_settings():
            self._follow_weights()  # guard: encoder_adapted_to_weights
            captured = self._captured
            setting = None if captured is None else captured.state.setting_changed()
            # guard: encoder_adapted_setting
            if captured is None or not captured.budgets or setting is not None:
                raise CaptureError(
                    "the encoder cannot adapt to its traffic",
                    expected="graphs, and the settings of their capture",
                    found="no graphs" if setting is None else f"{setting} has changed",
                    remedy="call capture() with enable=True, after clear() if a setting has changed",
                )
            more = self._recurring()[:max_sizes]
            if more:
                known = [*more, *(key.tokens for key in self._ladder.keys)]
                of_range = self.model.get_encoder_cudagraph_budget_range()
                keys = keys_of(self._options, self._config, of_range, known)
                ladder = replace(self._ladder, keys=keys)
                try:
                    captured = ladder.capture(beside=captured)
                except BaseException:
                    self._drop_graphs()
                    self._is_to_recapture = True
                    raise
                self._captured, self._ladder = captured, ladder
            return tuple(sorted({*more}.intersection(self._budgets())))

    def _recurring(self) -> list[int]:
        """Sizes of batches that padding serves often, the most padding first."""
        ladder, budgets = {key.tokens for key in self._ladder.keys}, self._budgets()
        return due(
            (tokens, times, budgets[bisect_left(budgets, tokens)] - tokens)
            for tokens, times in list(self._ledger.sizes["tokens"].items())
            if tokens not in ladder and tokens <= max(budgets, default=0)
        )

    def _budgets(self) -> list[int]:
        """The tokens of captured keys, ascending."""
        return [] if self._captured is None else sorted(key.tokens for key in self._captured.budgets)

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory that :meth:`capture` needs, from at most three captures in a throwaway pool.

        Raises:
            CaptureError: one of these captures failed.
        """
        with self._lock, capture_settings():
            if not self._options.enable:
                return NOTHING_ESTIMATED
            self._compile()
            return self._ladder.estimate()

    def clear(self) -> None:
        """Release all graphs, buffers and the pool, but no counters. Requests run eagerly until the next capture."""
        with self._lock:
            self._drop_graphs()
            self._is_to_recapture, self._graph_pool = False, None

    def _drop_graphs(self) -> None:
        if self._captured is not None:
            self._captured.graphs.close()
        self._captured = None

    def _compile(self) -> None:
        if self._is_to_compile:
            assert isinstance(self.model, SupportsEncoderCompilation)
            compiler = self._options.compiler or ("inductor" if self.place[0].type == "cuda" else "aot_eager")
            self.model.compile_encoder(compiler, self.runtime, **self._options.of_backend())
            self._is_to_compile = False

    # -- running ----------------------------------------------------------------------------------------------------

    def execute(self, items: EncoderItems) -> list[EncoderOutput]:
        """Encode items.

        If weights of the model were replaced or moved since the capture, all graphs are captured again first. If a
        setting differs from the capture (autocast, training mode, precision of float32 products, default dtype,
        determinism), the items run eagerly.

        Args:
            items: all items in one mapping, as the model's processor returns them.

        Returns:
            The result of each item, in order. The caller owns them. They lie in one tensor for each output of the
            encoder.

        Raises:
            AgreementError: another rank failed, has ended, or called it with other items.
            EncoderConfigError: a method of the encoder contradicts its configuration.
            ShapeError: the contents that the encoder prepared do not fit the buffers.
        """
        with self._lock, capture_settings():
            outputs, specs = self._encoded(items)
            results = self.model.postprocess_encoder_output(outputs, specs) if specs else ()
            if len(results) != len(specs):
                expected = f"{len(specs)}, one for each item"
                raise contradiction("number of results from postprocess_encoder_output", expected, len(results))
            return list(results)

    def execute_together(self, items: EncoderItems) -> Outputs:
        """Like :meth:`execute`, but not split by item."""
        with self._lock, capture_settings():
            return self._encoded(items)[0]

    @property
    def buffers(self) -> Buffers:
        """{name: flat memory}, which every replay overwrites; empty before the capture."""
        return {} if self._captured is None else self._captured.graphs.buffers.tensors

    def get_cumulative_stats(self) -> EncoderStats:
        """Hits, misses and padding since the manager was created, for each budget and in total."""
        return EncoderStats.of(self._ledger, self._captured)

    def report(self) -> Report:
        """What is slow or missing, which budgets replay, and where padding goes; ``print`` it."""
        graphs = None if self._captured is None else self._captured.graphs.runtime
        name, is_enabled = type(self.model).__name__, self._options.enable
        stats, adapts = self.get_cumulative_stats(), bool(self._recurring())
        figures = stats.figures(self.runtime, graphs, name, is_enabled=is_enabled, adapts=adapts)
        return Report(replace(figures, kernels=self._kernels))

    def count_stock_call(self, reason: Reason) -> None:
        """Count a call that an attached model's own tower has to run; the first one of each reason is a warning."""
        if self.runtime.ledger.without_graph("encoder", reason).count_call(reason) and not reason.is_expected:
            self.runtime.warn(f"the stock tower runs: {reason.why}", reason.remedy, at="encoder", is_recorded=True)

    def _encoded(self, items: EncoderItems) -> tuple[Outputs, Sequence[EncoderItemSpec]]:
        if self._agreement is None:
            specs: Sequence[EncoderItemSpec] = self._specs_of(items)
            outputs = self._rows(items, specs)
        else:

            def encode(specs: Sequence[EncoderItemSpec], share: Sequence[int]) -> Outputs:
                of_share = self.model.select_encoder_cudagraph_items(items, share)
                return self._rows(of_share, [specs[item] for item in share])

            like = self._empty_outputs()
            specs, outputs = encoded_by_all(lambda: self._specs_of(items), like, self._group, self._agreement, encode)
        if self._requests.n % self._options.log_every == 0:
            _log.info("%s", self.get_cumulative_stats().summary())
        return outputs, specs

    def _rows(self, items: EncoderItems, specs: Sequence[EncoderItemSpec]) -> Outputs:
        ends = list(itertools.accumulate((spec.output_tokens for spec in specs), initial=0))
        if not ends[-1]:
            return self._empty_outputs()
        self._follow_weights()
        everything, own = tuple(range(len(specs))), list[torch.Tensor]()
        for batch in self._planner().plan(specs):
            is_all = batch.items == everything
            part = items if is_all else self.model.select_encoder_cudagraph_items(items, batch.items)
            outputs = self._outputs(part, batch)
            if batch.budget is None and is_all:  # guard: encoder_outputs_copied
                return outputs
            own = own or [output.new_empty(ends[-1], output.shape[1]) for output in outputs]
            consecutive = runs_of(batch.items)  # guard: encoder_request_order
            runs = [(ends[first], ends[last + 1]) for first, last in consecutive]
            parts = (rows for output in outputs for rows in output.split([end - start for start, end in runs]))
            copy_each([rows[start:end] for rows in own for start, end in runs], list(parts))
        return tuple(own)

    def _empty_outputs(self) -> Outputs:
        device, dtype = self.place
        return tuple(torch.empty(0, width, dtype=dtype, device=device) for width in self._config.output_widths)

    def _specs_of(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """Counts the request."""
        specs = checked_specs(self.model.get_encoder_cudagraph_item_specs(items), self._config)
        self._requests.n += 1
        return specs

    def _follow_weights(self) -> None:
        """Capture again if weights changed, under the settings of the capture."""
        captured = self._captured
        # guard: encoder_recapture_setting, encoder_weights
        if captured is not None and not captured.state.has_weights() and captured.state.setting_changed() is None:
            self.runtime.warn(
                "weights of the encoder were replaced or moved: its graphs are captured again",
                "copy new weights into the old parameters (`parameter.copy_(new)`), or call clear() and capture() "
                "yourself",
            )
            self._drop_graphs()
            self._is_to_recapture = True
        if self._is_to_recapture:  # also since an earlier request
            self.capture(self._graph_pool)

    def _planner(self) -> BatchPlanner:
        """Of eager calls, if a setting differs from the capture."""
        if self._captured is None:
            return self._eager_planner
        setting = self._captured.state.setting_changed()
        if setting is None:  # guard: encoder_settings
            return self._captured.planner
        self._ledger.rows("encoder", OTHER_SETTING)[setting].n += 1
        self.runtime.warn(
            f"{setting} changed since the encoder was captured: it runs eagerly",
            "call clear() and capture() under the new setting to use graphs",
            is_recorded=True,
        )
        return self._eager_planner

    def _outputs(self, items: EncoderItems, batch: PackedBatch) -> Outputs:
        """The rows of a batch without padding, of a replay in the graph pool."""
        if batch.budget is None:
            outputs = eager_outputs(self.model, items)
            check_outputs(outputs, batch.tokens, self._config, "encoder_eager_forward")
            row = self._eager
            if self._options.enable:
                self._report_eager(batch.tokens)
        else:
            assert self._captured is not None
            outputs = tuple(rows[: batch.tokens] for rows in self._captured.graphs.replay(batch.budget, items))
            row = self._replays[CUDAGraphMode.FULL, batch.budget.descriptor]
            self._ledger.sizes["tokens"][batch.tokens] += 1
        row.n += 1
        row.items += len(batch.items)
        row.real += batch.tokens
        return outputs

    def _report_eager(self, num_tokens: int) -> None:
        """Warn of an eager call, unless it is cheaper than a replay."""
        captured = self._captured
        if captured is None:
            what = "the encoder runs eagerly: it has not been captured"
            self.runtime.warn(what, "call capture() first", is_recorded=True)
            return
        largest = max(self._budgets(), default=0)
        if num_tokens > largest and captured.state.setting_changed() is None:
            failed = next((reason for key, reason in captured.failed if key.tokens >= num_tokens), None)
            self.runtime.warn(
                f"items have more output tokens than the largest captured budget, {largest}: they run eagerly",
                _LARGER if failed is None else failed.remedy,
                at=f"{num_tokens} tokens",
            )
