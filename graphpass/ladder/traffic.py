"""What the graphs of a ladder cost at capture, and their use since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.ladder.estimate import Key
from graphpass.ledger import Row
from graphpass.modes import CUDAGraphMode
from graphpass.report.records import MemoryGrowth


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Time and memory of the capture of one key."""

    mode: CUDAGraphMode  #: PIECEWISE or FULL; always FULL for an encoder
    descriptor: BatchDescriptor  #: the padded shape
    seconds: float  #: duration of the capture, warm-up included
    memory: MemoryGrowth  #: growth of the device's memory; keys that are captured later reuse memory of earlier keys

    @property
    def key(self) -> Key:
        """Mode and padded shape."""
        return (self.mode, self.descriptor)

    @property
    def pool_bytes(self) -> int:
        """Growth of the graph pool in bytes."""
        return self.memory.pool_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Use of the graph of one key."""

    captured: CapturedGraph  #: the key, and time and memory of its capture
    replays: int  #: number of batches that replayed the graph
    items: int  #: images and clips of those batches; for a text model the number of batches
    real_tokens: int  #: tokens of those batches without padding
    padded_tokens: int  #: tokens of those batches with padding

    @classmethod
    def of(cls, captured: CapturedGraph, replays: Mapping[Key, Row]) -> Traffic:
        """The use of a graph among the replays of all keys."""
        row = replays.get(captured.key, Row())
        return cls(captured, row.n, row.items, row.real, row.n * captured.descriptor.num_tokens)

    @property
    def padding(self) -> float:
        """Share of padding among the computed tokens, 0 to 1."""
        return padding_share(self.real_tokens, self.padded_tokens)


def padding_share(real_tokens: int, padded_tokens: int) -> float:
    """Share of padding among the computed tokens; 0 if no tokens were computed."""
    return 1 - real_tokens / padded_tokens if padded_tokens else 0.0
