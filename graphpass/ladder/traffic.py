"""Costs of the captures of a ladder, and counts of replays, items and tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.ladder.estimate import Key, MemoryGrowth
from graphpass.modes import CUDAGraphMode

__all__ = ["CapturedGraph", "Traffic", "TrafficCounts", "padding_share"]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Time and memory of the capture of one key.

    Attributes:
        mode: PIECEWISE or FULL; always FULL for an encoder.
        descriptor: the padded shape.
        seconds: duration of the capture, warm-up included.
        memory: growth of the device's memory. Keys that are captured later reuse memory of earlier keys.
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
        """Growth of the graph pool in bytes."""
        return self.memory.pool_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Use of the graph of one key.

    Attributes:
        captured: the key, and time and memory of its capture.
        replays: number of batches that replayed the graph.
        items: images and clips of those batches; for a text model the number of batches.
        real_tokens: tokens of those batches without padding.
        padded_tokens: tokens of those batches with padding.
    """

    captured: CapturedGraph
    replays: int
    items: int
    real_tokens: int
    padded_tokens: int

    @property
    def padding(self) -> float:
        """Share of padding among the computed tokens, 0 to 1."""
        return padding_share(self.real_tokens, self.padded_tokens)


def padding_share(real_tokens: int, padded_tokens: int) -> float:
    """Share of padding among the computed tokens; 0 if no tokens were computed."""
    return 1 - real_tokens / padded_tokens if padded_tokens else 0.0


@dataclass(slots=True)
class _Counts:
    replays: int = 0
    items: int = 0
    real_tokens: int = 0


class TrafficCounts:
    """Running counts of replays, which include keys whose graphs were dropped since."""

    def __init__(self) -> None:
        self._of_key: defaultdict[Key, _Counts] = defaultdict(_Counts)

    def replayed(self, key: Key, num_tokens: int, num_items: int = 1) -> None:
        """Count a batch that replays ``key``."""
        counts = self._of_key[key]  # one lookup: the hash of a descriptor is the most expensive part
        counts.replays += 1
        counts.items += num_items
        counts.real_tokens += num_tokens

    def of(self, captured: CapturedGraph) -> Traffic:
        """Use of one captured graph."""
        counts = self._of_key.get(captured.key, _Counts())
        padded_tokens = counts.replays * captured.descriptor.num_tokens
        return Traffic(captured, counts.replays, counts.items, counts.real_tokens, padded_tokens)

    @property
    def replays(self) -> int:
        """Replays of all keys."""
        return sum(counts.replays for counts in self._of_key.values())

    @property
    def items(self) -> int:
        """Items of the batches of all keys."""
        return sum(counts.items for counts in self._of_key.values())

    @property
    def real_tokens(self) -> int:
        """Tokens of the batches of all keys, without padding."""
        return sum(counts.real_tokens for counts in self._of_key.values())

    @property
    def padded_tokens(self) -> int:
        """Tokens of the batches of all keys, with padding."""
        return sum(counts.replays * descriptor.num_tokens for (_, descriptor), counts in self._of_key.items())
