"""The encoder manager: any images through a few whole-encoder graphs.

A request is packed into batches (:mod:`graphpass.encoder.batches`), each batch replays a graph or runs eagerly, and the
results come back in the order of the request. The manager owns what lasts; what it decides is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from graphpass.capture import GraphRuntime
from graphpass.capture.ambient import AmbientState
from graphpass.capture.layout import storage_id
from graphpass.capture.loop import capture_progress, steadily
from graphpass.encoder.batches import BatchPlanner, EncoderBatch, checked_specs, grouped
from graphpass.encoder.costs import EncoderCosts, measured_costs
from graphpass.encoder.graphs import EncoderGraphs, outputs_of, without_graphs
from graphpass.encoder.options import EncoderOptions, checked_config, keys_of
from graphpass.encoder.packing import PackingCosts
from graphpass.encoder.protocol import (
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
    SupportsEncoderCompilation,
    SupportsEncoderCudaGraph,
    SupportsEncoderExamples,
)
from graphpass.encoder.sharding import balance_items, gather_rows
from graphpass.encoder.stats import CapturedBudget, EncoderCounts, EncoderStats
from graphpass.encoder.weights import EncoderWeights
from graphpass.errors import CaptureError, EncoderConfigError
from graphpass.memory import NOTHING_ESTIMATED, Key, KeyPool, MemoryEstimate, PoolModel, capture_within, estimated
from graphpass.modes import CUDAGraphMode

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
        group: a ``torch.distributed`` process group over which items are shared out; every rank calls
            :meth:`execute` with the same items. None: this process encodes all.

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
        self._keys = keys_of(self._options, self._config, model.get_encoder_cudagraph_budget_range())
        if isinstance(self._options.costs, PackingCosts):
            EncoderCosts.given(self._options.costs, grouped(self._config, self._keys))
        self._compiler = _compiler_of(model, self._options, self._device)
        self.runtime = GraphRuntime(device=self._device)
        self._is_compiled = False
        self._graphs: EncoderGraphs | None = None
        self._captured: list[CapturedBudget] = []
        self._failed: list[tuple[EncoderGraphKey, str]] = []
        self._counts = EncoderCounts()
        self._graph_pool: Any = None
        self._weights: EncoderWeights | None = None
        self._state: AmbientState | None = None
        self._lock = threading.RLock()
        self._planner = self._eager_planner = self._planner_of(None)

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
        return len(self._keys) if self._options.enable else 0

    def is_captured(self) -> bool:
        """Whether some graph can be replayed."""
        return bool(self._captured)

    def capture(self, graph_pool: Any = None) -> None:
        """Capture every budget, the largest first, and time what they cost.

        A budget that cannot be captured is left out: batches take a larger one, or run eagerly.

        Args:
            graph_pool: a CUDA graph pool to share (``torch.cuda.graph_pool_handle()``); None for one of its own.

        Raises:
            CaptureError: there are graphs already.
            EncoderConfigError: the encoder does not keep to its configuration.
        """
        with self._lock, steadily():
            if self._captured:
                raise CaptureError(
                    "the encoder is captured already",
                    expected="a manager without graphs",
                    found=f"{len(self._captured)} graphs",
                    remedy="call clear() first",
                )
            if not self._options.enable:
                return
            self.clear()  # of a capture in which every budget failed
            self._compile()
            fits = self._what_fits()
            self._graph_pool = graph_pool
            self._graphs = self._new_graphs(self._keys, graph_pool)
            try:
                with self._graphs.runtime.capturing():
                    self._capture_all(self._graphs, fits)
                self._planner = self._planner_of(self._costs(self._graphs))
                self._weights = EncoderWeights.of(self._model)
                self._state = AmbientState.now(self._weights.modules)
                self._graphs.memory.settle()  # nothing needs any more what warm-ups have left cached
            except BaseException:
                self.clear()
                raise

    def estimate(self) -> MemoryEstimate:
        """What :meth:`capture` will take, from at most three captures in a throwaway pool.

        Raises:
            CaptureError: one of them failed.
        """
        with self._lock, steadily():
            if not self._options.enable:
                return NOTHING_ESTIMATED
            self._compile()
            graphs = self._new_graphs(self._keys)
            keys = self._keys_by_descriptor()
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

    def clear(self) -> None:
        """Drop all graphs, buffers and the pool. Statistics go on; everything runs eagerly, or is captured again."""
        with self._lock:
            if self._graphs is not None:
                self._graphs.close()
            self._graphs = self._weights = self._state = None
            self._captured.clear()
            self._failed.clear()
            self._planner = self._eager_planner

    def _compile(self) -> None:
        if self._compiler is not None and not self._is_compiled:
            assert isinstance(self._model, SupportsEncoderCompilation)
            self._model.compile_encoder(self._compiler, self.runtime)
            self._is_compiled = True

    def _new_graphs(self, keys: Sequence[EncoderGraphKey], graph_pool: Any = None) -> EncoderGraphs:
        return EncoderGraphs(self._model, self._config, keys, self._device, self._dtype, graph_pool)

    def _capture_all(self, graphs: EncoderGraphs, fits: PoolModel) -> None:
        """Capture every key, or as many as ``max_pool_bytes`` has room for."""
        keys, most = self._keys_by_descriptor(), self._options.max_pool_bytes
        with capture_progress(self._keys) as progress:

            def capture(of: Key) -> None:
                progress.set_postfix_str(str(keys[of]))
                try:
                    self._captured.append(graphs.capture(keys[of]))
                except (CaptureError, torch.OutOfMemoryError) as error:
                    self._failed.append((keys[of], str(error)))
                    _log.warning("encoder budget %s has no graph: %s", keys[of], error)
                progress.update()

            def drop() -> None:
                graphs.runtime.close()
                self._captured.clear()
                self._failed.clear()

            pool = KeyPool(graphs.runtime.pool_bytes, capture, drop)
            left_out = capture_within(most, pool, (), list(keys), fits)
        self._failed += [(keys[of], f"the pool would be larger than max_pool_bytes={most}") for of in left_out]

    def _what_fits(self) -> PoolModel:
        """How the pool grows, as far as a limit makes it worth asking; else nothing is known."""
        if self._options.max_pool_bytes is not None:
            with contextlib.suppress(CaptureError):  # one that cannot be captured is left out
                return self.estimate().pool
        return NOTHING_ESTIMATED.pool

    def _keys_by_descriptor(self) -> dict[Key, EncoderGraphKey]:
        return {(CUDAGraphMode.FULL, key.descriptor): key for key in self._keys}

    def _planner_of(self, costs: EncoderCosts | None) -> BatchPlanner:
        most = self._options.max_eager_tokens or self._keys[0].tokens
        return BatchPlanner(self._config, [captured.key for captured in self._captured], costs, most)

    # -- costs ------------------------------------------------------------------------------------------------------

    def _costs(self, graphs: EncoderGraphs) -> EncoderCosts | None:
        """What packing goes by, for the graphs that there are."""
        groups = grouped(self._config, [captured.key for captured in self._captured])
        given = self._options.costs
        if given is None or not groups:
            return None
        if given != "measured":
            return EncoderCosts.given(given, groups)
        return measured_costs(
            groups,
            lambda key: self._replay_to_time(graphs, key),
            lambda key: self._eager_call_to_time(graphs, key),
            self._device,
        )

    def _replay_to_time(self, graphs: EncoderGraphs, key: EncoderGraphKey) -> Callable[[], object]:
        if isinstance(self._model, SupportsEncoderExamples):
            items = self._model.get_encoder_example_items(key, self._device, self._dtype)
            return lambda: graphs.replay(key, items)
        graphs.fill_with_example(key)
        return lambda: graphs.run(key)

    def _eager_call_to_time(self, graphs: EncoderGraphs, key: EncoderGraphKey) -> Callable[[], object]:
        if isinstance(self._model, SupportsEncoderExamples):
            items = self._model.get_encoder_example_items(key, self._device, self._dtype)
            return lambda: self._eager_outputs(items)
        graphs.fill_with_example(key)
        return lambda: graphs.run_eagerly(key)

    # -- running ----------------------------------------------------------------------------------------------------

    def execute(self, items: EncoderItems) -> list[EncoderOutput]:
        """Encode items; the result of each one, in their order.

        Results are independent of later calls. Where weights of the model were replaced, or have moved, since the
        capture, everything is captured anew first. Under other settings than at the capture (autocast, training mode,
        precision of float32 products, default dtype, determinism) it runs eagerly, under those that hold now.

        Args:
            items: one mapping of everything, as the model's processor returns it.

        Raises:
            EncoderConfigError: the model does not keep to its configuration.
            ShapeError: what it prepares does not fit the buffers.
        """
        with self._lock, steadily():
            specs = checked_specs(self._model.get_encoder_cudagraph_item_specs(items), self._config)
            self._counts.requests += 1
            if self._weights is not None and not self._weights.in_place():
                _log.warning("weights of the encoder were replaced or moved: its graphs are captured anew")
                self.clear()
                self.capture(self._graph_pool)
            encode = self._encoded if self._num_ranks() == 1 else self._encoded_by_all
            results = encode(items, specs) if specs else []
            if self._counts.requests % self._options.log_every == 0:
                _log.info("%s", self.get_cumulative_stats().summary())
            return results

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The memory of each buffer, flat, which all budgets share; empty before the capture.

        Every replay writes it: items that lie in it are overwritten before they are read.
        """
        return {} if self._graphs is None else self._graphs.buffers.tensors

    def get_cumulative_stats(self) -> EncoderStats:
        """Hits, misses and padding so far, of each budget and in all."""
        graphs = self._graphs
        return self._counts.snapshot(
            self._captured,
            self._failed,
            pool_bytes=0 if graphs is None else graphs.runtime.pool_bytes(),
            buffer_bytes=0 if graphs is None else graphs.buffers.num_bytes(),
        )

    def _encoded(self, items: EncoderItems, specs: Sequence[EncoderItemSpec]) -> list[EncoderOutput]:
        results: list[EncoderOutput | None] = [None] * len(specs)
        for batch in self._plan(specs):
            of_batch = [specs[item] for item in batch.items]
            outputs = self._outputs(items, batch, specs)
            found = self._postprocessed(outputs, of_batch)
            lent = set() if batch.key is None else {storage_id(output) for output in outputs}
            for item, result in zip(batch.items, found, strict=True):
                results[item] = _owned(result, lent)
        return [result for result in results if result is not None]

    def _plan(self, specs: Sequence[EncoderItemSpec]) -> tuple[EncoderBatch, ...]:
        """Batches for the graphs; where graphs would answer under settings that hold no more, eager ones."""
        if self._weights is None or self._state is None:
            return self._planner.plan(specs)
        setting = self._state.difference(AmbientState.now(self._weights.modules))
        if setting is None:
            return self._planner.plan(specs)
        if self._counts.under_another(setting):
            remedy = "clear() and capture() under it for graphs"
            _log.warning("%s is not what it was when the encoder was captured: it runs eagerly; %s", setting, remedy)
        return self._eager_planner.plan(specs)

    def _outputs(
        self, items: EncoderItems, batch: EncoderBatch, specs: Sequence[EncoderItemSpec]
    ) -> tuple[torch.Tensor, ...]:
        """The rows of a batch's items, without padding; of a replay in the pool."""
        num_tokens = sum(specs[item].output_tokens for item in batch.items)
        if batch.items != tuple(range(len(specs))):
            items = self._model.select_encoder_cudagraph_items(items, batch.items)
        if batch.key is None:
            outputs = self._eager_outputs(items)
            self._counts.ran_eagerly(len(batch.items), num_tokens)
            _check_rows(outputs, num_tokens)
            return outputs
        assert self._graphs is not None
        outputs = self._graphs.replay(batch.key, items)
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

    def _eager_outputs(self, items: EncoderItems) -> tuple[torch.Tensor, ...]:
        with without_graphs():
            return outputs_of(self._model.encoder_eager_forward(items))

    # -- data parallel ----------------------------------------------------------------------------------------------

    def _num_ranks(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    def _encoded_by_all(self, items: EncoderItems, specs: Sequence[EncoderItemSpec]) -> list[EncoderOutput]:
        """This rank encodes its share; everybody gets everything."""
        balance = balance_items([spec.input_size for spec in specs], self._num_ranks())
        share = balance.share(dist.get_rank(self._group))
        own = [
            torch.empty(sum(specs[item].output_tokens for item in share), width, dtype=self._dtype, device=self._device)
            for width in self._config.output_widths
        ]
        if share:
            self._encode_share(self._model.select_encoder_cudagraph_items(items, share), [specs[i] for i in share], own)
        outputs = gather_rows(own, balance, [spec.output_tokens for spec in specs], self._group)
        return list(self._postprocessed(outputs, specs))

    def _encode_share(self, items: EncoderItems, specs: Sequence[EncoderItemSpec], own: Sequence[torch.Tensor]) -> None:
        """Write the rows of all ``items``, one after the other, into ``own``."""
        tokens = [spec.output_tokens for spec in specs]
        rows = [output.split(tokens) for output in own]
        for batch in self._plan(specs):
            outputs = self._outputs(items, batch, specs)
            for target, output in zip(rows, outputs, strict=True):
                _check_dtype(output, self._dtype)
                parts = output.split([tokens[item] for item in batch.items])
                for item, part in zip(batch.items, parts, strict=True):
                    target[item].copy_(part)


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


def _check_rows(outputs: Sequence[torch.Tensor], num_tokens: int) -> None:
    if any(len(output) != num_tokens for output in outputs):
        raise EncoderConfigError(
            "encoder_eager_forward returned another number of rows than the item specs say",
            expected=f"{num_tokens} rows",
            found=", ".join(str(tuple(output.shape)) for output in outputs),
            remedy="correct output_tokens of the item specs",
        )


def _check_dtype(output: torch.Tensor, dtype: torch.dtype) -> None:
    if output.dtype != dtype:
        raise EncoderConfigError(
            "the encoder returns another dtype than the manager was made with, so that ranks cannot exchange it",
            expected=str(dtype),
            found=str(output.dtype),
            remedy=f"cast the output, or make the manager with dtype={output.dtype}",
        )


def _owned(result: EncoderOutput, lent: set[int]) -> EncoderOutput:
    """``result`` with a copy of everything that lies in memory of ``lent``."""
    if isinstance(result, torch.Tensor):
        return result.clone() if storage_id(result) in lent else result
    return tuple(part.clone() if storage_id(part) in lent else part for part in result)
