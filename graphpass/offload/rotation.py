"""Schedules the copies of layers' weights into slots of device memory.

Layer ``i`` always uses slot ``i % num_slots``. When layer ``i`` begins, layer ``i - 1`` has ended, so the copy of the
next layer into the slot of layer ``i - 1`` starts and overlaps with the compute of layer ``i``. Layer ``i`` waits for
its own copy, which was launched at least one layer earlier.

Between forwards the state is *home*: layers ``0 .. num_slots - 2`` are in their slots, or their copies are in flight.
Every forward starts and ends with this state, whether it runs eagerly, in PIECEWISE mode or as one graph. So forwards
of all kinds can follow each other in any order, and the copies in a graph are right in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpass.errors import OffloadError
from graphpass.offload.slots import Copies

__all__ = ["SlotRotation"]


class SlotRotation:
    """Copies the weights of layers into slots, as the layers begin one after the other.

    Args:
        host: the weights of each layer in host memory, uint8 (bytes,) each.
        slots: device memory, uint8 (bytes,) each.
        copies: launches copies and waits for them.

    Attributes:
        is_home: the first layers are in their slots, or their copies are in flight. False after a write of weights or a
            failed forward: the next :meth:`come_home` fills the slots again.
    """

    def __init__(self, host: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], copies: Copies) -> None:
        self._host, self._slots, self._copies = host, slots, copies
        self._num_slots = len(slots)
        self._next = 0
        self._in_flight: dict[int, bool] = {}
        self.is_home = False

    def is_under_way(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._next > 0

    def come_home(self) -> None:
        """Make the current stream wait for the copies in flight, and fill the first slots if the state is not home."""
        self._copies.follow_last()
        if self._next == len(self._host):
            self.end()
        if self._next or not self.is_home:
            self._copies.settle()
            for slot in range(self._num_slots - 1):
                self._slots[slot].copy_(self._host[slot], non_blocking=True)
            self._next, self.is_home = 0, True
            self._in_flight.clear()
        self._wait_for_all()

    def begin(self, index: int) -> None:
        """Begin layer ``index``: start the copy into the slot of the layer before, and wait for this layer's weights.

        Raises:
            OffloadError: another layer must run next, or the state is not home.
        """
        if not self.is_home:
            raise OffloadError(
                "the weights of the first layers are not on the device",
                expected="sync_prev_onload() before a forward",
                found="a forward without it, after weights were offloaded or written, or after a failed forward",
                remedy="run the model with CudaGraphManager, or call sync_prev_onload() first",
            )
        if index == 0 and self._next == len(self._host):
            self.end()
        if index != self._next:
            raise self._out_of_turn(f"layer {index}")
        if index:
            self._refill((index - 1) % self._num_slots, index - 1 + self._num_slots)
        else:
            self._launch(self._num_slots - 1, self._num_slots - 1)
        self._wait(index % self._num_slots)
        self._next = index + 1

    def join(self) -> None:
        """End a forward, and make the current stream wait for all copies in flight.

        Raises:
            OffloadError: not all layers ran.
        """
        self.end()
        self._wait_for_all()

    def end(self) -> None:
        """End a forward: launch the copy that brings the slot of the last layer home.

        Raises:
            OffloadError: not all layers ran.
        """
        if self._next != len(self._host):
            raise self._out_of_turn("the end of the forward")
        last = self._next - 1
        self._refill(last % self._num_slots, last + self._num_slots)
        self._next = 0

    def _refill(self, slot: int, layer: int) -> None:
        """Launch the copy of the next layer into a free slot; if no layer follows, of the slot's first layer."""
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
        """Refuse to wait inside a capture for a copy that was launched outside of it, and the reverse."""
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
