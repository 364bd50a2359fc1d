"""The graphs of an encoder: buffers, captures and replays of single keys."""

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
    """Captures and replays the graphs of one encoder. All graphs share one pool and one set of buffers.

    It owns graphs and buffers; :meth:`close` releases them. The caller enters
    :func:`graphpass.capture.torchsettings.capture_settings` around every method, and ``runtime.capturing()`` around
    :meth:`capture`.

    Args:
        model: the encoder.
        config: the encoder's configuration.
        keys: all keys that may be captured, the largest budget first.
        device: device of the encoder.
        dtype: dtype of its inputs.
        graph_pool: a CUDA graph pool to share; None: a new pool.
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
        """Capture the graph of one key.

        Raises:
            CaptureError: the capture failed.
            EncoderConfigError: buffers or outputs of the encoder contradict its configuration.
        """
        started, before = time.perf_counter(), self.memory.reading()
        self.fill_with_example(key)
        check_outputs(self.run(key), key.tokens, self._config, f"encoder_cudagraph_forward, at {key},")
        elapsed = time.perf_counter() - started
        return CapturedGraph(CUDAGraphMode.FULL, key.descriptor, elapsed, self.memory.reading() - before)

    def replay(self, key: EncoderGraphKey, items: EncoderItems) -> tuple[torch.Tensor, ...]:
        """Replay ``key`` for ``items``.

        Returns:
            The outputs with padding, [key.tokens, width] each. They are in the graph pool and valid until the next
            replay.
        """
        values = self._model.prepare_encoder_cudagraph_replay_buffers(items, key)
        # An earlier replay on another stream may still read the buffers.
        self.runtime.lease.order_after_last_forward()  # guard: cuda_encoder_follows
        self.buffers.fill(key, values)
        return self.run(key)

    def fill_with_example(self, key: EncoderGraphKey) -> None:
        """Fill the buffers of ``key`` with its capture inputs, which overwrites the buffers of all other keys."""
        self.buffers.add(key, self._example(key))

    def run(self, key: EncoderGraphKey) -> tuple[torch.Tensor, ...]:
        """Replay ``key`` over the current contents of its buffers, or capture it if it has no graph."""
        with set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=key.descriptor) as context:
            return _outputs_of(self._wrapper.call_flat(context, (key, *self.buffers.of(key).values())))

    def run_eagerly(self, key: EncoderGraphKey) -> EncoderOutput:
        """Run the forward of ``key`` eagerly over the current contents of its buffers."""
        with _without_graphs():
            return self._model.encoder_cudagraph_forward(self.buffers.of(key), key)

    def close(self) -> None:
        """Release all graphs, buffers and the pool."""
        self.buffers.clear()
        self.runtime.close()

    def _example(self, key: EncoderGraphKey) -> Mapping[str, torch.Tensor]:
        return self._model.prepare_encoder_cudagraph_capture_inputs(key, self._device, self._dtype)

    def _forward(self, key: EncoderGraphKey, *buffers: torch.Tensor) -> EncoderOutput:
        named = dict(zip(self._config.buffer_keys, buffers, strict=True))
        return self._model.encoder_cudagraph_forward(named, key)


def eager_outputs(model: SupportsEncoderCudaGraph, items: EncoderItems) -> tuple[torch.Tensor, ...]:
    """The encoder's outputs for ``items``, computed eagerly and without padding."""
    with _without_graphs():
        return _outputs_of(model.encoder_eager_forward(items))


def _outputs_of(result: EncoderOutput) -> tuple[torch.Tensor, ...]:
    """An encoder's output as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _without_graphs() -> contextlib.AbstractContextManager[Any]:
    """A forward context in which compiled code neither captures nor replays graphs."""
    return set_forward_context(runtime_mode=CUDAGraphMode.NONE)


def check_outputs(
    outputs: Sequence[torch.Tensor], num_tokens: int, config: EncoderCudaGraphConfig, method: str
) -> None:
    """Check that each output is [num_tokens, width] with the width of the configuration.

    Raises:
        EncoderConfigError: an output has another shape, or their number is wrong; the error names ``method``.
    """
    found = [tuple(output.shape) for output in outputs]
    expected = [(num_tokens, width) for width in config.output_widths]
    if found != expected:
        raise EncoderConfigError(
            f"{method} returned shapes that contradict the configuration",
            expected=str(expected),
            found=str(found),
            remedy="return one row for each token, or correct output_width or the output_tokens of the item specs",
        )
