"""Which layer's weights are in which slot of device memory, and when they are copied there.

Layer ``i`` always computes in slot ``i % num_slots``. When it begins, layer ``i - 1`` has been passed, and the copy of
the slot's next layer starts, to run while layer ``i`` computes; layer ``i`` itself waits for its own copy, launched a
layer or more before.

What holds between forwards (*home*): layers ``0 .. num_slots - 2`` are in their slots, or on their way. Every forward
finds it so and leaves it so, whether it runs eagerly, in pieces or as one graph; hence they can follow each other in
any order, and a graph's copies can be recorded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpass.errors import OffloadError
from graphpass.offload.slots import Copies

__all__ = ["SlotRotation"]


class SlotRotation:
    """Brings the weights of layers into slots, as layers begin one after the other.

    Args:
        host: the weights of each layer in host memory, uint8 [bytes].
        slots: device memory, uint8 [bytes] each.
        copies: copies from one to the other.

    Attributes:
        is_home: the first layers are in their slots, or on their way there. False after weights were written, or after
            a forward that failed: the next :meth:`come_home` fills the slots anew.
    """

    def __init__(self, host: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], copies: Copies) -> None:
        self._host, self._slots, self._copies = host, slots, copies
        self._num_slots = len(slots)
        self._next = 0
        self._in_flight: dict[int, bool] = {}
        self.is_home = False

    def is_under_way(self) -> bool:
        """Whether a forward has begun, and has not been ended."""
        return self._next > 0

    def come_home(self) -> None:
        """Order the current stream behind the copies in flight, and fill the first slots where they are not home."""
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
        """Layer ``index`` begins: start the copy into the slot that the last one has left, and wait for its own.

        Raises:
            OffloadError: it is another layer's turn, or the first layers are not home.
        """
        if not self.is_home:
            raise OffloadError(
                "the weights of the first layers are not on the device",
                expected="sync_prev_onload() before a forward",
                found="a forward without it, after the weights were moved or written, or a forward failed",
                remedy="run it through CudaGraphManager, or call sync_prev_onload() first",
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
        """All layers have run: home is complete once the last one's slot is, should it have a place there."""
        if self._next != len(self._host):
            raise self._out_of_turn("the end of the forward")
        last = self._next - 1
        self._refill(last % self._num_slots, last + self._num_slots)
        self._next = 0

    def _refill(self, slot: int, layer: int) -> None:
        """The next layer into a slot that is free: after the last one, that which has it at home."""
        if layer < len(self._host):
            self._launch(slot, layer)
        elif slot < self._num_slots - 1:
            self._launch(slot, slot)

    def _launch(self, slot: int, layer: int) -> None:
        # Asked first: a capture that has launched something cannot be left without a join.
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
        """Refuse to wait, in a capture, for what was launched outside of it, and the other way round."""
        if self._in_flight[slot] != is_recording:
            raise OffloadError(
                f"slot {slot} is being filled by a copy that was launched on the other side of a capture",
                expected="sync_prev_onload() before a capture, and join_after_forward() at its end",
                found="a copy launched outside of this capture" if is_recording else "one launched in a capture",
                remedy="capture through CudaGraphManager, or call both",
            )

    def _wait_for_all(self) -> None:
        for slot in tuple(self._in_flight):
            self._wait(slot)

    def _out_of_turn(self, found: str) -> OffloadError:
        is_end = self._next == len(self._host)
        return OffloadError(
            "the forward does not run the offloaded layers one after the other, all of them",
            expected="the end of the forward, or layer 0" if is_end else f"layer {self._next}",
            found=found,
            remedy="offload only layers that every forward runs, in the order in which they are listed",
        )
