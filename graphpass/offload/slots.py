"""Memory of offloaded weights: the layout of a layer in one flat buffer, copies to the device, and their schedule.

Layers of equal structure share a layout, so one copy moves any layer to any slot. Slots and host buffers are uint8
tensors; a layer's parameters are views of them.

Layer ``i`` uses slot ``i % num_slots``. When it begins, layer ``i - 1`` has ended, so the copy of the next layer into
that layer's slot starts. Layer ``i`` waits for its own copy, launched at least one layer earlier.

Between forwards the state is *home*: layers ``0 .. num_slots - 2`` are in their slots, or their copies are in flight.
So forwards of all kinds can follow each other, and the copies in a graph are right in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import override

from graphpass.compat.subclasses import plain_state
from graphpass.errors import OffloadError, OptionError

_ALIGNMENT = 256
"""Alignment of a parameter in bytes; at least that of an allocation by the CUDA allocator."""


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The place of one parameter in a layer's buffer."""

    name: str  #: name within the layer, such as ``attention.q.weight``
    offset: int  #: in bytes
    shape: torch.Size
    stride: tuple[int, ...]  #: dense, in elements
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of a layer's buffer, uint8 (bytes,)."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        elements = memory.narrow(0, self.offset, num_bytes).view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())


def layout_of(layers: Sequence[nn.Module]) -> tuple[tuple[WeightPlace, ...], int]:
    """The place of each parameter, or plain tensor in it, in a layer's buffer, and its bytes.

    Refuses layers that differ or share a parameter.
    """
    _refuse_shared(layers)
    places, num_bytes = [], 0
    for name, parameter in plain_state(layers[0]).items():
        stride = torch.empty_like(parameter, device="meta").stride()
        places.append(WeightPlace(name, num_bytes, parameter.shape, stride, parameter.dtype))
        num_bytes += -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
    wanted = [(place.name, tuple(place.shape), place.dtype) for place in places]
    for index, layer in enumerate(layers):
        found = [(name, tuple(weight.shape), weight.dtype) for name, weight in plain_state(layer).items()]
        if found == wanted and num_bytes:
            continue
        differing = next((pair for pair in zip(wanted, found, strict=False) if pair[0] != pair[1]), None)
        raise OptionError(
            f"layer {index} does not fit the slots of layer 0",
            expected=str(differing[0]) if differing else f"{len(wanted)} parameters, as in layer 0, and at least one",
            found=str(differing[1]) if differing else f"{len(found)} parameters",
            remedy="offload layers of equal structure; keep the others on the device",
        )
    return tuple(places), num_bytes


def _refuse_shared(layers: Sequence[nn.Module]) -> None:
    """Refuse parameters that share memory: separate copies would untie them."""
    owners: dict[int, tuple[str, int]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in plain_state(layer).items():
            if not parameter.data_ptr():
                continue
            other, tensor_id = owners.setdefault(parameter.data_ptr(), (f"{index}.{name}", id(parameter)))
            if other != f"{index}.{name}":
                what = "one parameter" if tensor_id == id(parameter) else "views of the same memory"
                raise OffloadError(
                    f"layers share the weight {other!r}",
                    expected="layers without shared parameters, since they are on the device at different times",
                    found=f"{other!r} and {index}.{name!r} are {what}",
                    remedy="untie them (`layer.weight = torch.nn.Parameter(layer.weight.clone())`)",
                )


class HostCopies:
    """Copies from host memory to slots, concurrent with the compute stream, the current stream of each call.

    On the CPU a copy is done when :meth:`launch` returns, so the other methods have nothing to do.
    """

    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy that starts after all work that is enqueued on the compute stream now."""
        target.copy_(source)

    def wait(self, slot: int) -> None:
        """Make the compute stream wait for the last copy that was launched into ``slot``."""

    def settle(self) -> None:
        """Make the compute stream wait for all copies."""

    def follow_last(self) -> None:
        """Make the compute stream wait for the compute stream of the last call, if they differ."""

    def is_recording(self) -> bool:
        """Whether the compute stream is captured; never on a tape."""
        return False

    def finish(self) -> None:
        """Block the host until all copies, also those of graphs, have read the host memory."""


class CudaCopies(HostCopies):
    """Copies from pinned memory on a separate CUDA stream.

    Inside a capture the events make this stream a branch of the graph, and the copies become memcpy nodes.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in range(num_slots)]
        self._last_compute: torch.cuda.Stream | None = None

    @override
    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._arrived[slot].record(self._stream)

    @override
    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])

    @override
    def settle(self) -> None:
        # Not for the events, which may belong to a capture.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @override
    def follow_last(self) -> None:
        compute = torch.cuda.current_stream(self._device)
        if self._last_compute is not None and self._last_compute != compute:
            compute.wait_stream(self._last_compute)
        self._last_compute = compute

    @override
    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def finish(self) -> None:
        torch.cuda.synchronize(self._device)  # the whole device, because graphs copy on other streams


def copies_to(device: torch.device, num_slots: int) -> HostCopies:
    """The copies to slots on this device."""
    return CudaCopies(device, num_slots) if device.type == "cuda" else HostCopies()


class SlotRotation:
    """Copies the weights of layers into slots, as the layers begin one after the other.

    ``host`` has the weights of each layer, ``slots`` the device memory, each as uint8 (bytes,).
    """

    def __init__(self, host: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], copies: HostCopies) -> None:
        self._host, self._slots, self._copies = host, slots, copies
        self._num_slots = len(slots)
        self._next = 0
        self._in_flight: dict[int, bool] = {}
        #: The first layers are in their slots, or their copies are in flight. False after a write of weights or a
        #: failed forward: the next :meth:`reset_to_start` fills the slots again.
        self.is_home = False

    def is_under_way(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._next > 0

    def reset_to_start(self) -> None:
        """Make the current stream wait for the copies in flight, and fill the first slots if the state is not home."""
        self._copies.follow_last()
        if self._next == len(self._host):
            self.end()
        if self._next or not self.is_home:  # guard: offload_home_again
            self._copies.settle()
            for slot in range(self._num_slots - 1):
                self._slots[slot].copy_(self._host[slot], non_blocking=True)
            self._next, self.is_home = 0, True
            self._in_flight.clear()
        self._wait_for_all()  # guard: offload_sync_before_capture

    def begin(self, index: int) -> None:
        """Begin layer ``index``: start the copy into the slot of the layer before, and wait for its weights."""
        if not self.is_home:
            raise OffloadError(
                "the weights of the first layers are not on the device",
                expected="sync_prev_onload() before a forward",
                found="a forward without it, after weights were offloaded or written, or after a failed forward",
                remedy="run the model with CudaGraphManager, or call sync_prev_onload() first",
            )
        if index == 0 and self._next == len(self._host):
            self.end()
        if index != self._next:  # guard: offload_turns
            raise self._out_of_turn(f"layer {index}")
        if index:
            self._refill((index - 1) % self._num_slots, index - 1 + self._num_slots)
        else:
            self._launch(self._num_slots - 1, self._num_slots - 1)
        self._wait(index % self._num_slots)  # guard: offload_waits
        self._next = index + 1

    def join(self) -> None:
        """End a forward, and make the current stream wait for all copies in flight."""
        self.end()
        self._wait_for_all()

    def end(self) -> None:
        """End a forward, whose layers must all have run: launch the copy that resets the slot of the last layer."""
        if self._next != len(self._host):
            raise self._out_of_turn("the end of the forward")
        last = self._next - 1
        self._refill(last % self._num_slots, last + self._num_slots)
        self._next = 0

    def _refill(self, slot: int, layer: int) -> None:
        """Launch the copy of the next layer into a free slot, at the end that of its first layer."""
        if layer < len(self._host):
            self._launch(slot, layer)
        elif slot < self._num_slots - 1:
            self._launch(slot, slot)

    def _launch(self, slot: int, layer: int) -> None:
        # Check before the launch: a capture with a launched copy fails if it does not join the copy stream.
        is_recording = self._copies.is_recording()
        for other in self._in_flight:
            self._refuse_across(other, is_recording)
        self._copies.launch(slot, self._slots[slot], self._host[layer])
        self._in_flight[slot] = is_recording

    def _wait(self, slot: int) -> None:
        if slot in self._in_flight:
            self._refuse_across(slot, self._copies.is_recording())
            self._copies.wait(slot)
            del self._in_flight[slot]

    def _refuse_across(self, slot: int, is_recording: bool) -> None:
        if self._in_flight[slot] != is_recording:
            raise OffloadError(
                f"the copy into slot {slot} would cross the border of a capture",
                expected="sync_prev_onload() before a capture, and join_after_forward() at its end",
                found="a copy launched outside of this capture" if is_recording else "a copy launched in a capture",
                remedy="capture with CudaGraphManager, or call both methods",
            )

    def _wait_for_all(self) -> None:
        for slot in tuple(self._in_flight):
            self._wait(slot)

    def _out_of_turn(self, found: str) -> OffloadError:
        is_end = self._next == len(self._host)
        return OffloadError(
            "the forward does not run all offloaded layers in order",
            expected="the end of the forward, or layer 0" if is_end else f"layer {self._next}",
            found=found,
            remedy="offload only layers that every forward runs, in the order in which they are listed",
        )
