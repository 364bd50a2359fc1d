"""Memory of offloaded weights: how a layer lies in one flat buffer, and what copies buffers to the device.

Layers of equal structure share a layout, so that any of them fits any slot and a layer moves with one copy. Slots and
host buffers are bytes; a layer's parameters are views of them at offsets that any kernel's vector loads accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from graphpass.errors import OffloadError, OptionError

__all__ = ["Copies", "CudaCopies", "HostCopies", "LayerLayout", "WeightPlace", "copies_to", "host_memory"]

_ALIGNMENT = 256
"""Bytes; what the CUDA allocator gives a tensor of its own."""


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Where one parameter lies in a layer's bytes.

    Attributes:
        name: within the layer, ``attention.q.weight``.
        offset: in bytes.
        shape: of the parameter.
        stride: in elements, dense.
        dtype: of the parameter.
    """

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a layer's bytes."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        elements = memory.narrow(0, self.offset, num_bytes).view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """How the parameters of a layer lie in one flat buffer.

    Attributes:
        places: one for each parameter, in the order of ``named_parameters()``.
        num_bytes: of a buffer.
    """

    places: tuple[WeightPlace, ...]
    num_bytes: int

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> LayerLayout:
        """The layout that all these layers have.

        Raises:
            OptionError: a layer has other parameters than the first, or none at all.
            OffloadError: two layers share a parameter.
        """
        _refuse_shared(layers)
        places, offset = [], 0
        for name, parameter in layers[0].named_parameters():
            stride = torch.empty_like(parameter, device="meta").stride()
            places.append(WeightPlace(name, offset, parameter.shape, stride, parameter.dtype))
            offset += -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
        layout = cls(tuple(places), offset)
        for index, layer in enumerate(layers):
            layout.refuse_other(layer, index)
        return layout

    def refuse_other(self, layer: nn.Module, index: int) -> None:
        """Compare with the parameters that a layer has.

        Raises:
            OptionError: they are others.
        """
        wanted = [(place.name, tuple(place.shape), place.dtype) for place in self.places]
        found = [(name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters()]
        if found == wanted and self.num_bytes:
            return
        differing = next((pair for pair in zip(wanted, found, strict=False) if pair[0] != pair[1]), None)
        raise OptionError(
            f"layer {index} cannot take another layer's place in device memory",
            expected=str(differing[0]) if differing else f"{len(wanted)} parameters, as layer 0 has, and at least one",
            found=str(differing[1]) if differing else f"{len(found)} parameters",
            remedy="offload layers of equal structure; keep the others on the device",
        )


def _refuse_shared(layers: Sequence[nn.Module]) -> None:
    """A parameter of two layers, or two parameters of one memory, would be torn apart."""
    owners: dict[int, tuple[str, int]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if not parameter.data_ptr():
                continue
            other, tensor_id = owners.setdefault(parameter.data_ptr(), (f"{index}.{name}", id(parameter)))
            if other != f"{index}.{name}":
                what = "one parameter" if tensor_id == id(parameter) else "one memory"
                raise OffloadError(
                    f"layers share the weight {other!r}",
                    expected="layers that share no parameters: each has a turn of its own on the device",
                    found=f"{other!r} and {index}.{name!r} are {what}",
                    remedy="untie them (`layer.weight = torch.nn.Parameter(layer.weight.clone())`)",
                )


def host_memory(layout: LayerLayout, layer: nn.Module, *, is_pinned: bool) -> torch.Tensor:
    """A layer's weights in one buffer of host memory, uint8 [bytes]."""
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    parameters: Mapping[str, nn.Parameter] = dict(layer.named_parameters())
    for place in layout.places:
        place.view(memory).copy_(parameters[place.name])
    return memory


class Copies(Protocol):
    """Copies from host memory to slots, beside the compute stream: that which is current when a method is called."""

    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, not before what the compute stream has enqueued so far is done."""

    def wait(self, slot: int) -> None:
        """The compute stream goes on once the last copy launched into ``slot`` has arrived."""

    def settle(self) -> None:
        """The compute stream goes on once all that ever was enqueued here has run."""

    def follow_last(self) -> None:
        """Order the compute stream behind the one of the last call, should it be another."""

    def is_recording(self) -> bool:
        """Whether the compute stream is being captured."""

    def finish(self) -> None:
        """The host waits until no copy reads its memory, those inside graphs included."""


class HostCopies(Copies):
    """Device memory is host memory, and nothing runs beside anything: a copy is done when it is launched."""

    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def wait(self, slot: int) -> None:
        """It has arrived."""

    def settle(self) -> None:
        """All has run."""

    def follow_last(self) -> None:
        """There is one order."""

    def is_recording(self) -> bool:
        """A tape records copies in the order in which they are launched, whoever launches them."""
        return False

    def finish(self) -> None:
        """All is done."""


class CudaCopies(Copies):
    """Copies from pinned memory on a stream of its own.

    Inside a capture the events make the stream a branch of the graph, and the copies its memcpy nodes.

    Args:
        device: a CUDA device with an index.
        num_slots: on it.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in range(num_slots)]
        self._last_compute: torch.cuda.Stream | None = None

    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy behind an event that the compute stream records now."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._arrived[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """The compute stream waits for the copy's event."""
        torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])

    def settle(self) -> None:
        """The compute stream waits for the whole stream: its events may have been recorded inside a capture."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def follow_last(self) -> None:
        """The current stream waits for the last one that computed with the slots."""
        compute = torch.cuda.current_stream(self._device)
        if self._last_compute is not None and self._last_compute != compute:
            compute.wait_stream(self._last_compute)
        self._last_compute = compute

    def is_recording(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def finish(self) -> None:
        """Wait for the device: graphs copy on streams of their own."""
        torch.cuda.synchronize(self._device)


def copies_to(device: torch.device, num_slots: int) -> Copies:
    """What copies to a device."""
    return CudaCopies(device, num_slots) if device.type == "cuda" else HostCopies()
