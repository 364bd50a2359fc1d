"""The graphs of an encoder: buffers, captures and replays. Decides nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.policy import CapturePolicy
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.context import set_forward_context
from graphpass.encoder.buffers import EncoderBuffers
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderOutput,
    SupportsEncoderCudaGraph,
)
from graphpass.errors import EncoderConfigError
from graphpass.ladder.meter import DeviceMemory
from graphpass.ladder.traffic import CapturedGraph
from graphpass.modes import CUDAGraphMode

__all__ = ["EncoderGraphs", "check_outputs", "eager_outputs"]


class EncoderGraphs:
    """Captures keys of one encoder and replays them over shared buffers. They share one pool.

    All of it runs in :func:`graphpass.capture.torchsettings.capture_settings`; :meth:`capture` also in
    ``runtime.capturing()``.

    Args:
        model: the encoder.
        config: what it said of itself.
        keys: all that may be captured, the largest budget first.
        device: where it runs.
        dtype: of its inputs.
        graph_pool: a CUDA graph pool to share with others; None for one of its own.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        config: EncoderCudaGraphConfig,
        keys: Sequence[EncoderGraphKey],
        device: torch.device,
        dtype: torch.dtype,
        graph_pool: Any = None,
    ) -> None:
        self._model, self._config, self._device, self._dtype = model, config, device, dtype
        self.runtime = GraphRuntime(graph_pool, device=device)
        self.memory = DeviceMemory(device, self.runtime)
        largest = [self._example(key) for key in keys if key.tokens == keys[0].tokens]
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
        """Capture one key over its part of the buffers.

        Raises:
            CaptureError: the encoder could not be captured at this size.
            EncoderConfigError: the encoder does not keep to its configuration.
        """
        started, before = time.perf_counter(), self.memory.reading()
        self.fill_with_example(key)
        check_outputs(self.run(key), key.tokens, self._config, f"encoder_cudagraph_forward, at {key},")
        elapsed = time.perf_counter() - started
        return CapturedGraph(CUDAGraphMode.FULL, key.descriptor, elapsed, self.memory.reading() - before)

    def replay(self, key: EncoderGraphKey, items: EncoderItems) -> tuple[torch.Tensor, ...]:
        """The outputs for ``items`` with the padding behind them: in the pool, valid until the next replay."""
        values = self._model.prepare_encoder_cudagraph_replay_buffers(items, key)
        # An earlier replay, on another stream, may still be reading what is filled now.
        self.runtime.lease.order_after_last_forward()
        self.buffers.fill(key, values)
        return self.run(key)

    def fill_with_example(self, key: EncoderGraphKey) -> None:
        """Fill the buffers of ``key`` with what it is captured with; smaller keys' buffers are a part of them."""
        self.buffers.add(key, self._example(key))

    def run(self, key: EncoderGraphKey) -> tuple[torch.Tensor, ...]:
        """Replay ``key``, or capture it, over what its buffers hold."""
        with set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=key.descriptor) as context:
            return _outputs_of(self._wrapper.call_flat(context, (key, *self.buffers.of(key).values())))

    def run_eagerly(self, key: EncoderGraphKey) -> EncoderOutput:
        """:meth:`run` without a graph."""
        with _without_graphs():
            return self._model.encoder_cudagraph_forward(self.buffers.of(key), key)

    def close(self) -> None:
        """Drop all graphs and buffers, and give the pool back."""
        self.buffers.clear()
        self.runtime.close()

    def _example(self, key: EncoderGraphKey) -> Mapping[str, torch.Tensor]:
        return self._model.prepare_encoder_cudagraph_capture_inputs(key, self._device, self._dtype)

    def _forward(self, key: EncoderGraphKey, *buffers: torch.Tensor) -> EncoderOutput:
        named = dict(zip(self._config.buffer_keys, buffers, strict=True))
        return self._model.encoder_cudagraph_forward(named, key)


def eager_outputs(model: SupportsEncoderCudaGraph, items: EncoderItems) -> tuple[torch.Tensor, ...]:
    """What the encoder returns for ``items`` without padding and graphs."""
    with _without_graphs():
        return _outputs_of(model.encoder_eager_forward(items))


def _outputs_of(result: EncoderOutput) -> tuple[torch.Tensor, ...]:
    """What an encoder returned, always as several tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _without_graphs() -> contextlib.AbstractContextManager[Any]:
    """A forward context in which compiled code captures and replays nothing."""
    return set_forward_context(runtime_mode=CUDAGraphMode.NONE)


def check_outputs(
    outputs: Sequence[torch.Tensor], num_tokens: int, config: EncoderCudaGraphConfig, method: str
) -> None:
    """Refuse what is not a row for each token, as wide as the configuration says, for each output.

    Raises:
        EncoderConfigError: ``method`` returned other shapes.
    """
    found = [tuple(output.shape) for output in outputs]
    expected = [(num_tokens, width) for width in config.output_widths]
    if found != expected:
        raise EncoderConfigError(
            f"{method} returned other shapes than the configuration says",
            expected=str(expected),
            found=str(found),
            remedy="return a row for each token, and correct output_width, or output_tokens of the item specs",
        )
