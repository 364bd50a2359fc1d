"""The graphs of an encoder: captures, replays of single keys, and the buffers that they read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from graphpass.capture import CapturePolicy
from graphpass.capture.modelstate import ModelState
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.staging import copy_each
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.context import ForwardContext, entered, set_forward_context
from graphpass.encoder.costs import EncoderCosts, Load, PackingCosts, TimedExample, measured_costs
from graphpass.encoder.options import EncoderOptions
from graphpass.encoder.planner import BatchPlanner
from graphpass.encoder.protocol import (
    Buffers,
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderOutput,
    Outputs,
    SupportsEncoderCudaGraph,
    SupportsEncoderExamples,
    checked_specs,
    contradiction,
    grouped,
)
from graphpass.errors import CaptureError, ShapeError
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Reason, why_failed
from graphpass.paddedcalls import PaddedMemory, fill_padding
from graphpass.progress import capture_progress
from graphpass.serving.estimate import (
    NOTHING_ESTIMATED,
    DeviceMemory,
    Key,
    MemoryEstimate,
    PoolModel,
    capture_within,
    estimated,
)
from graphpass.serving.traffic import CapturedGraph

_log = logging.getLogger("graphpass")


@dataclass(frozen=True, slots=True)
class CapturedEncoder:
    """The result of one capture. It owns the graphs."""

    graphs: EncoderGraphs
    #: {captured key: time and memory of its capture}, the largest budget first
    budgets: Mapping[EncoderGraphKey, CapturedGraph]
    failed: tuple[tuple[EncoderGraphKey, Reason], ...]  #: (key, reason) of keys without a graph
    planner: BatchPlanner
    state: ModelState


@dataclass(frozen=True, slots=True)
class EncoderLadder:
    """The keys of an encoder, and what their capture needs. The caller enters ``capture_settings`` before."""

    model: SupportsEncoderCudaGraph
    config: EncoderCudaGraphConfig
    keys: Sequence[EncoderGraphKey]  #: the largest budget first
    options: EncoderOptions
    device: torch.device
    dtype: torch.dtype
    notes: GraphRuntime  #: its report says which keys have no graph

    def __post_init__(self) -> None:
        if isinstance(self.options.costs, PackingCosts):  # raises before the capture if a cost is missing
            EncoderCosts.of_user(self.options.costs, grouped(self.config, self.keys))

    def planner(self, keys: Sequence[EncoderGraphKey] = (), costs: EncoderCosts | None = None) -> BatchPlanner:
        """A planner for the captured ``keys``; without keys, of eager calls."""
        return BatchPlanner(self.config, keys, costs, self.options.max_eager_tokens or self.keys[0].tokens)

    def capture(self, graph_pool: Any = None, beside: CapturedEncoder | None = None) -> CapturedEncoder:
        """Capture the keys, within ``max_pool_bytes``, and measure costs.

        A key whose capture fails gets no graph. The graphs of ``beside`` stay. If this raises, none is left.
        """
        fits = self._what_fits()
        graphs = EncoderGraphs(self, graph_pool) if beside is None else beside.graphs
        try:
            with graphs.runtime.capturing():
                budgets, failed = self._capture_keys(graphs, fits, beside)
            captured = {key: budgets[key] for key in self.keys if key in budgets}
            planner = self.planner(list(captured), self._costs(graphs, list(captured)))  # guard: encoder_failed_budget
            graphs.memory.settle()  # release what warm-ups left in the allocator's cache
            return CapturedEncoder(graphs, captured, failed, planner, ModelState.of_object(self.model))
        except BaseException:
            graphs.close()
            raise

    def estimate(self) -> MemoryEstimate:
        """See :meth:`EncoderCudaGraphManager.estimate`."""
        graphs, keys = EncoderGraphs(self), self._by_descriptor()
        try:
            return estimated(
                {"encoder": list(keys)},
                graphs.memory,
                lambda key: graphs.capture(keys[key]).memory,
                contextlib.nullcontext,
                buffer_bytes=graphs.buffers.num_bytes(),
                buffers_exist=False,
            )
        finally:
            graphs.close()

    def _by_descriptor(self) -> dict[Key, EncoderGraphKey]:
        return {_named(key): key for key in self.keys}

    def _what_fits(self) -> PoolModel:
        if self.options.max_pool_bytes is not None:
            with contextlib.suppress(CaptureError):
                return self.estimate().pool
        return NOTHING_ESTIMATED.pool

    def _capture_keys(
        self, graphs: EncoderGraphs, fits: PoolModel, beside: CapturedEncoder | None
    ) -> tuple[dict[EncoderGraphKey, CapturedGraph], tuple[tuple[EncoderGraphKey, Reason], ...]]:
        """Capture what ``beside`` lacks; all budgets, and (key, reason) of keys without a graph."""
        keys, most = self._by_descriptor(), self.options.max_pool_bytes
        budgets, without = ({}, ()) if beside is None else (dict(beside.budgets), beside.failed)
        failed: list[tuple[EncoderGraphKey, Reason]] = []
        captured = list(map(_named, budgets))
        known = {*captured, *(_named(key) for key, _ in without)}
        wanted = [of for of in keys if of not in known]
        with capture_progress(wanted, self.options.progress) as progress:

            def leave_out(of: Key, why: Reason) -> None:
                failed.append((keys[of], why))
                text = f"an encoder budget has no graph: {why}"
                self.notes.warn(text, why.remedy, at=str(keys[of]), is_recorded=True)

            def capture(of: Key) -> None:
                progress.set_postfix_str(str(keys[of]))
                try:
                    budgets[keys[of]] = graphs.capture(keys[of])
                except (CaptureError, torch.OutOfMemoryError) as error:
                    _log.debug("encoder budget %s: %s", keys[of], error)
                    leave_out(of, why_failed(error, otherwise="capture fewer budgets, or set max_pool_bytes"))
                progress.update()

            def drop() -> None:
                graphs.runtime.close()
                budgets.clear()
                failed.clear()

            num_bytes = graphs.runtime.pool_bytes
            # guard: encoder_pool_bound
            left_out = capture_within(most, captured, wanted, fits, num_bytes=num_bytes, capture=capture, drop=drop)
        too_much = Reason(
            f"the pool would be larger than max_pool_bytes={most}",
            "raise max_pool_bytes, or pass fewer token_budgets: their items replay a larger budget or run eagerly",
        )
        for of in left_out:
            leave_out(of, too_much)
        return budgets, (*without, *failed)

    # -- costs ------------------------------------------------------------------------------------------------------

    def _costs(self, graphs: EncoderGraphs, captured: Sequence[EncoderGraphKey]) -> EncoderCosts | None:
        groups, costs = grouped(self.config, captured), self.options.costs
        if costs is None or not groups:
            return None
        if costs != "measured":
            return EncoderCosts.of_user(costs, groups)
        return measured_costs(groups, lambda key, num_items: self._example(graphs, key, num_items), self.device)

    def _example(self, graphs: EncoderGraphs, key: EncoderGraphKey, num_items: int | None) -> TimedExample:
        """Items that fill ``key``; without examples of the encoder, its full buffers."""
        if isinstance(self.model, SupportsEncoderExamples):
            items = self.model.get_encoder_example_items(key, self.device, self.dtype, num_items)
            specs = checked_specs(self.model.get_encoder_cudagraph_item_specs(items), self.config)
            load, replay = Load.of(specs), partial(graphs.replay, key, items)
            eager: Callable[[], object] = partial(self.model.encoder_eager_forward, items)
        else:
            graphs.fill_with_example(key)
            load, replay = Load(key.tokens, key.items, 0.0), partial(graphs.run, key)
            eager = partial(self.model.encoder_cudagraph_forward, graphs.buffers.of(key), key)

        def eager_if_there_is_memory() -> object:
            try:
                with set_forward_context():
                    return eager()
            except torch.OutOfMemoryError:
                self.notes.warn(
                    "no memory for an eager call beside the graphs: it is not chosen",
                    "set max_pool_bytes, so that the graphs leave memory for eager calls",
                    at=str(key),
                )
                raise

        return load, replay, eager_if_there_is_memory


def _named(key: EncoderGraphKey) -> Key:
    return (CUDAGraphMode.FULL, key.descriptor)


class EncoderGraphs:
    """Owns the graphs of one encoder, which share one pool and one set of buffers.

    The caller enters ``capture_settings`` around every method, and ``runtime.capturing()`` around :meth:`capture`.
    """

    def __init__(self, ladder: EncoderLadder, graph_pool: Any = None) -> None:
        self._ladder, config = ladder, ladder.config
        self.runtime = GraphRuntime(graph_pool, device=ladder.device)
        self.memory = DeviceMemory(ladder.device, self.runtime)
        largest = [self._example(key) for key in ladder.keys if key.tokens == ladder.keys[0].tokens]
        self.buffers = EncoderBuffers(config, largest)
        self._wrapper = CUDAGraphWrapper(
            self._forward,
            CUDAGraphMode.FULL,
            runtime=self.runtime,
            name="encoder",
            static_inputs=range(1, 1 + len(config.buffer_keys)),
            input_names=("key", *config.buffer_keys),
            policy=CapturePolicy(outputs="view"),
        )

    def capture(self, key: EncoderGraphKey) -> CapturedGraph:
        """Capture one key."""
        started, before = time.perf_counter(), self.memory.reading()
        self.fill_with_example(key)
        check_outputs(self.run(key), key.tokens, self._ladder.config, f"encoder_cudagraph_forward, at {key},")
        elapsed = time.perf_counter() - started
        return CapturedGraph(CUDAGraphMode.FULL, key.descriptor, elapsed, self.memory.reading() - before)

    def replay(self, key: EncoderGraphKey, items: EncoderItems) -> Outputs:
        """The outputs with padding, which the next replay overwrites."""
        values = self._ladder.model.prepare_encoder_cudagraph_replay_buffers(items, key)
        # An earlier replay on another stream may still read the buffers.
        self.runtime.lease.order_after_last_forward()  # guard: cuda_encoder_follows
        self.buffers.fill(key, values)
        return self.run(key)

    def fill_with_example(self, key: EncoderGraphKey) -> None:
        """Fill the buffers of ``key`` with its capture inputs."""
        self.buffers.add(key, self._example(key))

    def run(self, key: EncoderGraphKey) -> Outputs:
        """Replay ``key`` over its buffers, or capture it if it has no graph."""
        context = ForwardContext(None, CUDAGraphMode.FULL, key.descriptor, None, None, None, None, None)
        with entered(context):
            return _outputs_of(self._wrapper.call_flat(context, (key, *self.buffers.of(key).values())))

    def close(self) -> None:
        """Release everything."""
        self.buffers.clear()
        self.runtime.close()

    def _example(self, key: EncoderGraphKey) -> Buffers:
        of = self._ladder
        return of.model.prepare_encoder_cudagraph_capture_inputs(key, of.device, of.dtype)

    def _forward(self, key: EncoderGraphKey, *buffers: torch.Tensor) -> EncoderOutput:
        named = dict(zip(self._ladder.config.buffer_keys, buffers, strict=True))
        return self._ladder.model.encoder_cudagraph_forward(named, key)


class EncoderBuffers(PaddedMemory[str]):
    """Flat memory for the largest keys; the buffers of each key are views of its start."""

    def __init__(self, config: EncoderCudaGraphConfig, largest: Sequence[Buffers]) -> None:
        self._config = config
        self._views: dict[EncoderGraphKey, dict[str, torch.Tensor]] = {}
        allocated: dict[str, torch.Tensor] = {}
        for example in largest:
            _refuse_other_names(example, config, "prepare_encoder_cudagraph_capture_inputs")
            for name, contents in example.items():
                if name not in allocated or allocated[name].numel() < contents.numel():
                    allocated[name] = contents.new_zeros(contents.numel())
        super().__init__(allocated)

    @property
    def tensors(self) -> Buffers:
        """The flat memory of each buffer."""
        return self._memory

    def add(self, key: EncoderGraphKey, example: Buffers) -> None:
        """Create the buffers of ``key``, with the contents of ``example``."""
        _refuse_other_names(example, self._config, "prepare_encoder_cudagraph_capture_inputs")
        views = {}
        for name in self._config.buffer_keys:
            memory, contents = self._memory[name], example[name]
            kind = (memory.dtype, memory.device)
            if contents.numel() > memory.numel() or (contents.dtype, contents.device) != kind:
                raise contradiction(
                    f"buffer {name!r} of {key} does not fit into that of the largest key",
                    f"at most {memory.numel()} elements of {memory.dtype} on {memory.device}",
                    (tuple(contents.shape), contents.dtype, contents.device),
                )
            views[name] = memory[: contents.numel()].view(contents.shape)
            views[name].copy_(contents)
        self._views[key] = views

    @override
    def clear(self) -> None:
        super().clear()
        self._views.clear()

    def of(self, key: EncoderGraphKey) -> Buffers:
        """{name: buffer} of an added key."""
        return self._views[key]

    def fill(self, key: EncoderGraphKey, values: Mapping[str, torch.Tensor | None]) -> None:
        """Copy ``values`` into the buffers of ``key`` and pad."""
        _refuse_other_names(values, self._config, "prepare_encoder_cudagraph_replay_buffers")
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        partly: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, buffer in self._views[key].items():
            value = values[name]
            if value is None:
                continue
            _check(name, value, buffer, key)
            target = buffer
            if value.shape != buffer.shape:
                target = buffer.narrow(0, 0, value.shape[0])
                partly.append((name, buffer, target))
            if value.device == target.device and value.dtype == target.dtype:
                targets.append(target)
                sources.append(value)
            else:
                # The owner of pinned memory may refill it at any time.
                target.copy_(value, non_blocking=not value.is_pinned())
        copy_each(targets, sources)
        for name, buffer, real in partly:  # guard: encoder_padding_rows
            fill_padding(buffer, real, self._config.padding.get(name, 0), name=f"input {name!r}")


def _refuse_other_names(values: Mapping[str, object], config: EncoderCudaGraphConfig, method: str) -> None:
    if set(values) != set(config.buffer_keys):
        expected = f"the buffer_keys {list(config.buffer_keys)}, None for an unchanged one"
        raise contradiction(f"other buffers from {method}", expected, list(values))


def _check(name: str, value: object, buffer: torch.Tensor, key: EncoderGraphKey) -> None:
    if isinstance(value, torch.Tensor):
        casts = value.dtype == buffer.dtype or (value.is_floating_point() and buffer.is_floating_point())
        fits = value.dim() == buffer.dim() and value.shape[1:] == buffer.shape[1:]
        if casts and fits and value.shape[:1] <= buffer.shape[:1]:
            return
    raise ShapeError(
        f"the value for buffer {name!r} does not fit the key {key}",
        expected=f"a tensor of at most {tuple(buffer.shape)} of {buffer.dtype}",
        found=f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__,
        remedy="return tensors like the capture inputs, of at most as many rows; from a processor with "
        "return_tensors='pt'",
    )


def eager_outputs(model: SupportsEncoderCudaGraph, items: EncoderItems) -> Outputs:
    """The encoder's outputs without a graph."""
    with set_forward_context():  # compiled code neither captures nor replays graphs
        return _outputs_of(model.encoder_eager_forward(items))


def _outputs_of(result: EncoderOutput) -> Outputs:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def check_outputs(
    outputs: Sequence[torch.Tensor], num_tokens: int, config: EncoderCudaGraphConfig, method: str
) -> None:
    """Check that each output is [num_tokens, width]."""
    found = [tuple(output.shape) for output in outputs]
    expected = [(num_tokens, width) for width in config.output_widths]
    if found != expected:
        raise contradiction(f"other shapes [tokens, output_width] from {method}", str(expected), found)
