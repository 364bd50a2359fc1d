"""The input buffers of encoder graphs: one allocation for each buffer, of which every key uses a prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from graphpass.capture.staging import copy_each
from graphpass.encoder.protocol import EncoderCudaGraphConfig, EncoderGraphKey
from graphpass.errors import EncoderConfigError, ShapeError
from graphpass.paddedmemory import PaddedBuffer, PaddedMemory

__all__ = ["EncoderBuffers"]


class EncoderBuffers(PaddedMemory[str]):
    """Flat memory for the buffers of the largest keys; the buffers of each key are views of its start.

    Buffers are padded in dimension 0; the size field of a buffer is its name.

    Args:
        config: names the buffers and their padding rules.
        largest: example buffers of each key with the largest budget, which determine the size of the memory.

    Raises:
        EncoderConfigError: the names of buffers differ from the configuration, or the dtype or device of a buffer
            differs between keys.
    """

    def __init__(self, config: EncoderCudaGraphConfig, largest: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._config = config
        self._padded: dict[EncoderGraphKey, dict[str, PaddedBuffer]] = {}
        self._views: dict[EncoderGraphKey, dict[str, torch.Tensor]] = {}
        allocated: dict[str, torch.Tensor] = {}
        for example in largest:
            _refuse_other_names(example, config, "prepare_encoder_cudagraph_capture_inputs")
        for name in config.buffer_keys:
            examples = [example[name] for example in largest]
            kinds = {(example.dtype, example.device) for example in examples}
            if len(kinds) > 1:
                raise EncoderConfigError(
                    f"buffer {name!r} differs between keys",
                    expected="one dtype and device for all keys",
                    found=", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)),
                    remedy="return the same dtype and device for every path and axis value",
                )
            allocated[name] = torch.zeros(
                max(example.numel() for example in examples), dtype=examples[0].dtype, device=examples[0].device
            )
        super().__init__(allocated)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The whole memory of each buffer, flat."""
        return self._memory

    def add(self, key: EncoderGraphKey, example: Mapping[str, torch.Tensor]) -> None:
        """Create the buffers of ``key`` with the shapes of ``example`` and copy its contents.

        Raises:
            EncoderConfigError: ``example`` has other names, or a buffer is larger than that of the largest key.
        """
        _refuse_other_names(example, self._config, "prepare_encoder_cudagraph_capture_inputs")
        padded = {}
        for name in self._config.buffer_keys:
            memory, shape = self._memory[name], example[name].shape
            if math.prod(shape) > memory.numel() or example[name].dtype != memory.dtype:
                raise EncoderConfigError(
                    f"buffer {name!r} of {key} does not fit into that of the largest key",
                    expected=f"at most {memory.numel()} elements of {memory.dtype}",
                    found=f"{tuple(shape)} of {example[name].dtype}",
                    remedy="let buffers grow with the key, in dimension 0 only",
                )
            tensor = memory[: math.prod(shape)].view(shape)
            tensor.copy_(example[name])
            padded[name] = PaddedBuffer(name, tensor, {0: name} if shape else {}, self._config.padding.get(name, 0))
        self._padded[key] = padded
        self._views[key] = {name: buffer.tensor for name, buffer in padded.items()}

    def clear(self) -> None:
        """Release the memory and the buffers of all keys."""
        self._memory.clear()
        self._padded.clear()
        self._views.clear()

    def of(self, key: EncoderGraphKey) -> Mapping[str, torch.Tensor]:
        """{name: buffer} of a key for which :meth:`add` was called."""
        return self._views[key]

    def fill(self, key: EncoderGraphKey, values: Mapping[str, torch.Tensor | None]) -> None:
        """Copy ``values`` into the buffers of ``key`` and fill the padding after them.

        Args:
            key: a key for which :meth:`add` was called.
            values: {name: contents}; None leaves a buffer unchanged. Floating-point dtypes are converted.

        Raises:
            EncoderConfigError: a buffer has no value, or a value has no buffer.
            ShapeError: a value has more rows than its buffer, other columns, or another dtype that is not converted.
        """
        _refuse_other_names(values, self._config, "prepare_encoder_cudagraph_replay_buffers")
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        partly: list[PaddedBuffer] = []
        rows: dict[str, int] = {}
        for name, buffer in self._padded[key].items():
            value = values[name]
            if value is None:
                continue
            _check(name, value, buffer.tensor, key)
            rows[name] = value.shape[0] if buffer.dims else 1
            target = buffer.real(rows)
            if target is not buffer.tensor:
                partly.append(buffer)
            if value.device == target.device and value.dtype == target.dtype:
                targets.append(target)
                sources.append(value)
            else:
                # Pinned memory may be refilled by its owner at any time: only what is staged is copied without waiting.
                target.copy_(value, non_blocking=not value.is_pinned())
        copy_each(targets, sources)
        for buffer in partly:  # guard: encoder_padding_rows
            buffer.fill_padding(rows)


def _refuse_other_names(values: Mapping[str, object], config: EncoderCudaGraphConfig, method: str) -> None:
    missing = [name for name in config.buffer_keys if name not in values]
    unknown = [name for name in values if name not in config.buffer_keys]
    if missing or unknown:
        raise EncoderConfigError(
            f"{method} returned no buffer {missing[0]!r}"
            if missing
            else f"{method} returned {unknown[0]!r}, which is no buffer",
            expected=f"the buffer_keys {list(config.buffer_keys)}",
            found=repr(list(values)),
            remedy="return None for an unchanged buffer" if missing else "add it to buffer_keys",
        )


def _check(name: str, value: object, buffer: torch.Tensor, key: EncoderGraphKey) -> None:
    if not isinstance(value, torch.Tensor):
        raise ShapeError(
            f"the value for buffer {name!r} is not a tensor",
            expected=f"a tensor of at most {tuple(buffer.shape)} of {buffer.dtype}",
            found=type(value).__name__,
            remedy="let the processor return tensors: return_tensors='pt'",
        )
    casts = value.dtype == buffer.dtype or (value.is_floating_point() and buffer.is_floating_point())
    fits = value.dim() == buffer.dim() and value.shape[1:] == buffer.shape[1:]
    if fits and value.dim():
        fits = value.shape[0] <= buffer.shape[0]
    if not (casts and fits):
        raise ShapeError(
            f"the value for buffer {name!r} does not fit the key {key}",
            expected=f"at most {tuple(buffer.shape)} of {buffer.dtype}",
            found=f"{tuple(value.shape)} of {value.dtype}",
            remedy="return at most as many rows as the key has, with the other dimensions and the dtype of the capture "
            "inputs",
        )
