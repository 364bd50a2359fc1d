"""The encoder manager: any images through a few whole-encoder graphs.

A request is packed into batches (:mod:`graphpass.encoder.planner`), each batch replays a graph or runs eagerly, and the
results come back in the order of the request. The manager owns what lasts; what it decides is decided elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from graphpass.capture.layout import storage_id
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.torchsettings import capture_settings
from graphpass.encoder.capture import CapturedLadder, EncoderLadder
from graphpass.encoder.graphs import check_outputs, eager_outputs
from graphpass.encoder.options import EncoderOptions, checked_config, keys_of
from graphpass.encoder.planner import BatchPlanner, EncoderBatch, checked_specs
from graphpass.encoder.protocol import (
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
    SupportsEncoderCompilation,
    SupportsEncoderCudaGraph,
)
from graphpass.encoder.sharding import encoded_by_all
from graphpass.encoder.stats import EncoderCounts, EncoderStats
from graphpass.errors import CaptureError, EncoderConfigError
from graphpass.ladder.estimate import NOTHING_ESTIMATED, MemoryEstimate
from graphpass.ranks.group import DataParallelAgreement

__all__ = ["EncoderCudaGraphManager"]

_log = logging.getLogger("graphpass")


class EncoderCudaGraphManager:
    """Captures an encoder for a ladder of budgets, and encodes items over the graphs.

    One request at a time: threads wait for each other.

    Args:
        model: the encoder; :meth:`from_model` makes one of a stock tower.
        options: see :class:`EncoderOptions`.
        device: where the encoder runs.
        dtype: of its inputs and outputs.
        group: a ``torch.distributed`` process group over which items are shared out; every rank makes a manager, and
            calls :meth:`execute` with the same items. None: this process encodes all.

    Attributes:
        runtime: counts what was compiled. Graphs have a runtime of their own.

    Raises:
        EncoderConfigError: the options contradict each other, or the model.
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
        self._model, self._options = model, options or EncoderOptions()
        self._device, self._dtype, self._group = torch.device(device), dtype, group
        self._config = checked_config(model.get_encoder_cudagraph_config())
        keys = keys_of(self._options, self._config, model.get_encoder_cudagraph_budget_range())
        self._ladder = EncoderLadder(model, self._config, keys, self._options, self._device, self._dtype)
        self._captured: CapturedLadder | None = None
        self._is_to_recapture, self._graph_pool = False, None
        self._eager_planner = self._ladder.planner()
        self._compiler = _compiler_of(model, self._options, self._device)
        self.runtime = GraphRuntime(device=self._device)
        self._is_compiled = False
        self._counts = EncoderCounts()
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
        """A manager for a stock Hugging Face tower, through the adapter of its class.

        Args:
            tower: the vision tower, ``model.visual`` or ``model.vision_model``.
            options: as for the class.
            device: None: where the tower's parameters are.
            dtype: None: that of the tower's parameters.
            group: as for the class.
            adapter_options: of the adapter.

        Raises:
            EncoderConfigError: no adapter is known for the class.
        """
        from graphpass.encoder.adapters import adapter_for

        model = adapter_for(tower, **adapter_options)
        weight = next(tower.parameters())
        return cls(model, options=options, device=device or weight.device, dtype=dtype or weight.dtype, group=group)

    # -- capturing --------------------------------------------------------------------------------------------------

    def get_num_graphs_to_capture(self) -> int:
        """How many graphs :meth:`capture` makes; 0 with ``enable=False``."""
        return len(self._ladder.keys) if self._options.enable else 0

    def is_captured(self) -> bool:
        """Whether some graph can be replayed."""
        return self._captured is not None and bool(self._captured.budgets)

    def capture(self, graph_pool: Any = None) -> None:
        """Capture every budget, the largest first, and time what they cost.

        A budget that cannot be captured is left out: batches take a larger one, or run eagerly.

        Args:
            graph_pool: a CUDA graph pool to share (``torch.cuda.graph_pool_handle()``); None for one of its own.

        Raises:
            CaptureError: there are graphs already.
            EncoderConfigError: the encoder does not keep to its configuration.
        """
        with self._lock, capture_settings():
            if self._captured is not None and self._captured.budgets:
                raise CaptureError(
                    "the encoder is captured already",
                    expected="a manager without graphs",
                    found=f"{len(self._captured.budgets)} graphs",
                    remedy="call clear() first",
                )
            if not self._options.enable:
                return
            self._drop_graphs()  # of a capture in which every budget failed
            self._compile()
            self._captured = self._ladder.capture(graph_pool)
            self._is_to_recapture = False

    def estimate(self) -> MemoryEstimate:
        """What :meth:`capture` will take, from at most three captures in a throwaway pool.

        Raises:
            CaptureError: one of them failed.
        """
        with self._lock, capture_settings():
            if not self._options.enable:
                return NOTHING_ESTIMATED
            self._compile()
            return self._ladder.estimate()

    def clear(self) -> None:
        """Drop all graphs, buffers and the pool. Statistics go on; everything runs eagerly, or is captured again."""
        with self._lock:
            self._drop_graphs()
            self._is_to_recapture, self._graph_pool = False, None

    def _drop_graphs(self) -> None:
        if self._captured is not None:
            self._captured.close()
        self._captured = None

    def _compile(self) -> None:
        if self._compiler is not None and not self._is_compiled:
            assert isinstance(self._model, SupportsEncoderCompilation)
            self._model.compile_encoder(self._compiler, self.runtime)
            self._is_compiled = True

    # -- running ----------------------------------------------------------------------------------------------------

    def execute(self, items: EncoderItems) -> list[EncoderOutput]:
        """Encode items; the result of each one, in their order.

        Results are independent of later calls. Where weights of the model were replaced, or have moved, since the
        capture, everything is captured anew first. Under other settings than at the capture (autocast, training mode,
        precision of float32 products, default dtype, determinism) it runs eagerly, under those that hold now.

        Args:
            items: one mapping of everything, as the model's processor returns it.

        Raises:
            AgreementError: another rank failed in its share, was given other items, or is gone.
            EncoderConfigError: the model does not keep to its configuration.
            ShapeError: what it prepares does not fit the buffers.
        """
        with self._lock, capture_settings():
            results = self._encoded(items) if self._agreement is None else self._encoded_by_all(items, self._agreement)
            if self._counts.requests % self._options.log_every == 0:
                _log.info("%s", self.get_cumulative_stats().summary())
            return results

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The memory of each buffer, flat, which all budgets share; empty before the capture.

        Every replay writes it: items that lie in it are overwritten before they are read.
        """
        return {} if self._captured is None else self._captured.graphs.buffers.tensors

    def get_cumulative_stats(self) -> EncoderStats:
        """Hits, misses and padding so far, of each budget and in all."""
        captured = self._captured
        if captured is None:
            return self._counts.snapshot((), (), pool_bytes=0, buffer_bytes=0)
        graphs = captured.graphs
        return self._counts.snapshot(
            tuple(captured.budgets.values()),
            captured.failed,
            pool_bytes=graphs.runtime.pool_bytes(),
            buffer_bytes=graphs.buffers.num_bytes(),
        )

    def _encoded(self, items: EncoderItems) -> list[EncoderOutput]:
        specs = self._specs_of(items)
        results: dict[int, EncoderOutput] = {}
        for batch, outputs in self._runs(items, specs) if specs else ():
            found = self._postprocessed(outputs, [specs[item] for item in batch.items])
            lent = set() if batch.key is None else {storage_id(output) for output in outputs}
            for item, result in zip(batch.items, found, strict=True):
                results[item] = _owned(result, lent)
        return [results[item] for item in range(len(specs))]

    def _encoded_by_all(self, items: EncoderItems, agreement: DataParallelAgreement) -> list[EncoderOutput]:
        """This rank encodes its share; everybody gets everything."""

        def encoded(
            specs: Sequence[EncoderItemSpec], share: Sequence[int]
        ) -> Iterator[tuple[Sequence[int], Sequence[torch.Tensor]]]:
            of_share = self._model.select_encoder_cudagraph_items(items, share)
            for batch, outputs in self._runs(of_share, [specs[item] for item in share]):
                yield batch.items, outputs

        widths = self._config.output_widths
        like = [torch.empty(0, width, dtype=self._dtype, device=self._device) for width in widths]
        specs, outputs = encoded_by_all(lambda: self._specs_of(items), like, self._group, agreement, encoded)
        return list(self._postprocessed(outputs, specs)) if specs else []

    def _specs_of(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """The sizes of a request's items, which counts the request."""
        specs = checked_specs(self._model.get_encoder_cudagraph_item_specs(items), self._config)
        self._counts.requests += 1
        return specs

    def _runs(
        self, items: EncoderItems, specs: Sequence[EncoderItemSpec]
    ) -> Iterator[tuple[EncoderBatch, tuple[torch.Tensor, ...]]]:
        """Batch after batch with its outputs, those of a replay valid until the next one."""
        self._follow_weights()
        everything = tuple(range(len(specs)))
        for batch in self._planner().plan(specs):
            of_batch = items
            if batch.items != everything:
                of_batch = self._model.select_encoder_cudagraph_items(items, batch.items)
            num_tokens = sum(specs[item].output_tokens for item in batch.items)
            yield batch, self._outputs(of_batch, batch, num_tokens)

    def _follow_weights(self) -> None:
        """Capture anew what was captured with other weights, as soon as the settings are those of that capture."""
        captured = self._captured
        if captured is not None and not captured.state.has_weights() and captured.state.setting_changed() is None:
            _log.warning("weights of the encoder were replaced or moved: its graphs are captured anew")
            self._drop_graphs()
            self._is_to_recapture, self._graph_pool = True, captured.graph_pool
        if self._is_to_recapture:  # by this request, or an earlier one in which that failed
            self.capture(self._graph_pool)

    def _planner(self) -> BatchPlanner:
        """The captured ladder's; where its graphs would answer under settings that hold no more, the eager one.

        Asked after :meth:`_follow_weights`: weights that differ still differ together with a setting.
        """
        if self._captured is None:
            return self._eager_planner
        setting = self._captured.state.setting_changed()
        if setting is None:
            return self._captured.planner
        if self._counts.under_another(setting):
            remedy = "clear() and capture() under it for graphs"
            _log.warning("%s is not what it was when the encoder was captured: it runs eagerly; %s", setting, remedy)
        return self._eager_planner

    def _outputs(self, items: EncoderItems, batch: EncoderBatch, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The rows of a batch's items, without padding; of a replay in the pool."""
        if batch.key is None:
            outputs = eager_outputs(self._model, items)
            check_outputs(outputs, num_tokens, self._config, "encoder_eager_forward")
            self._counts.ran_eagerly(len(batch.items), num_tokens)
            return outputs
        assert self._captured is not None
        outputs = self._captured.graphs.replay(batch.key, items)
        self._counts.replayed(batch.key, len(batch.items), num_tokens)
        return tuple(output[:num_tokens] for output in outputs)

    def _postprocessed(
        self, outputs: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> Sequence[EncoderOutput]:
        found = self._model.postprocess_encoder_output(outputs, specs)
        if len(found) != len(specs):
            raise EncoderConfigError(
                "postprocess_encoder_output returned another number of results",
                expected=f"{len(specs)}, one an item",
                found=str(len(found)),
                remedy="return one result for each of the specs",
            )
        return found


def _compiler_of(model: SupportsEncoderCudaGraph, options: EncoderOptions, device: torch.device) -> str | None:
    can_be_compiled = isinstance(model, SupportsEncoderCompilation)
    if options.compile and not can_be_compiled:
        raise EncoderConfigError(
            "the encoder cannot be compiled",
            expected="a model with compile_encoder(compiler, runtime)",
            found=f"compile=True and {type(model).__name__}",
            remedy="leave compile out to capture the eager encoder",
        )
    if options.compile is False or not can_be_compiled:
        return None
    return options.compiler or ("inductor" if device.type == "cuda" else "aot_eager")


def _owned(result: EncoderOutput, lent: set[int]) -> EncoderOutput:
    """``result`` with a copy of everything that lies in memory of ``lent``."""
    if isinstance(result, torch.Tensor):
        return result.clone() if storage_id(result) in lent else result
    return tuple(part.clone() if storage_id(part) in lent else part for part in result)
