"""What the graphs of a ladder took to capture, and how they were used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.ladder.estimate import Key
from graphpass.ladder.meter import MemoryGrowth
from graphpass.modes import CUDAGraphMode

__all__ = ["CapturedGraph", "Traffic", "TrafficCounts", "padding_share"]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What the capture of one key took.

    Attributes:
        mode: PIECEWISE or FULL; of an encoder always FULL.
        descriptor: the padded shape.
        seconds: of its capture, the warm-up included.
        memory: by which the device's memory grew; keys captured later reuse what earlier ones have.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    seconds: float
    memory: MemoryGrowth

    @property
    def key(self) -> Key:
        """Mode and padded shape."""
        return (self.mode, self.descriptor)

    @property
    def pool_bytes(self) -> int:
        """By which the graph pool grew."""
        return self.memory.pool_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """How the graph of one key was used.

    Attributes:
        captured: the key, and what its capture took.
        replays: batches that replayed it.
        items: images or clips of those batches; of a text model the batches themselves.
        real_tokens: tokens of those batches.
        padded_tokens: tokens that were computed for them.
    """

    captured: CapturedGraph
    replays: int
    items: int
    real_tokens: int
    padded_tokens: int

    @property
    def padding(self) -> float:
        """The share of the computed tokens that was padding."""
        return padding_share(self.real_tokens, self.padded_tokens)


def padding_share(real_tokens: int, padded_tokens: int) -> float:
    """The share of padding among computed tokens; 0 where none were computed."""
    return 1 - real_tokens / padded_tokens if padded_tokens else 0.0


@dataclass(slots=True)
class _Counts:
    replays: int = 0
    items: int = 0
    real_tokens: int = 0


class TrafficCounts:
    """Running counts of replays. Keys that were dropped are still counted."""

    def __init__(self) -> None:
        self._of_key: defaultdict[Key, _Counts] = defaultdict(_Counts)

    def replayed(self, key: Key, num_tokens: int, num_items: int = 1) -> None:
        """Count a batch that replays ``key``."""
        counts = self._of_key[key]  # looked up once: a descriptor's hash costs more than all of the rest
        counts.replays += 1
        counts.items += num_items
        counts.real_tokens += num_tokens

    def of(self, captured: CapturedGraph) -> Traffic:
        """How one graph was used."""
        counts = self._of_key.get(captured.key, _Counts())
        padded_tokens = counts.replays * captured.descriptor.num_tokens
        return Traffic(captured, counts.replays, counts.items, counts.real_tokens, padded_tokens)

    @property
    def replays(self) -> int:
        """Of all keys."""
        return sum(counts.replays for counts in self._of_key.values())

    @property
    def items(self) -> int:
        """That all keys served."""
        return sum(counts.items for counts in self._of_key.values())

    @property
    def real_tokens(self) -> int:
        """Of the batches of all keys."""
        return sum(counts.real_tokens for counts in self._of_key.values())

    @property
    def padded_tokens(self) -> int:
        """That all replays computed."""
        return sum(counts.replays * descriptor.num_tokens for (_, descriptor), counts in self._of_key.items())
