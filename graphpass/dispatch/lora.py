"""Adapter counts that keys are made for."""

from __future__ import annotations

from dataclasses import dataclass

from graphpass.dispatch.sizes import Ladder, positive_int

__all__ = ["LoraKeys"]


@dataclass(frozen=True, slots=True)
class LoraKeys:
    """Which numbers of active LoRA adapters get graphs of their own.

    Attributes:
        max_loras: most adapters that one batch can use. ``max_loras + 1`` is a valid count as well: engines count the
            rows that use no adapter as one more.
        per_count: one key for each power of two up to ``max_loras`` and one for ``max_loras + 1``; a batch takes the
            next captured count. Otherwise one key serves any number of adapters; it carries ``max_loras + 1``, the
            count to capture it with.
        without: batches that use no adapter have keys of their own; otherwise they run with the smallest adapter key.
    """

    max_loras: int
    per_count: bool = False
    without: bool = True

    def __post_init__(self) -> None:
        positive_int(self.max_loras, "max_loras")

    def adapter_counts(self) -> tuple[int, ...]:
        """Captured counts above zero, ascending."""
        powers = (1 << exponent for exponent in range(self.max_loras.bit_length())) if self.per_count else ()
        return (*(count for count in powers if count <= self.max_loras), self.max_loras + 1)

    def key_counts(self) -> tuple[int, ...]:
        """Every count that keys carry, ascending; 0 stands for no adapter."""
        return (0, *self.adapter_counts()) if self.without else self.adapter_counts()

    def count_table(self) -> tuple[int, ...]:
        """The key's count for each batch count from 0 to ``max_loras + 1``."""
        counts = self.key_counts()
        ladder = Ladder(counts)
        return tuple(counts[ladder.index_above(count)] for count in range(self.max_loras + 2))
