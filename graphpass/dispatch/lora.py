"""The numbers of LoRA adapters for which keys exist."""

from __future__ import annotations

from dataclasses import dataclass

from graphpass.checks import positive
from graphpass.dispatch.sizes import Ladder
from graphpass.errors import DispatchError

__all__ = ["LoraKeys"]


@dataclass(frozen=True, slots=True)
class LoraKeys:
    """The numbers of active LoRA adapters that get separate graphs.

    Attributes:
        max_loras: the largest number of adapters in a batch. ``max_loras + 1`` is a valid count too, because engines
            count rows without an adapter as one more.
        per_count: if True, one key for each power of two up to ``max_loras`` and one for ``max_loras + 1``; a batch
            uses the next larger count. If False, one key serves any number of adapters; its count is
            ``max_loras + 1``, with which it is captured.
        without: whether batches without adapters have separate keys; if not, they use the key with the smallest count.
    """

    max_loras: int
    per_count: bool = False
    without: bool = True

    def __post_init__(self) -> None:
        positive(self.max_loras, "max_loras", error=DispatchError)

    def adapter_counts(self) -> tuple[int, ...]:
        """Captured counts above zero, ascending."""
        powers = (1 << exponent for exponent in range(self.max_loras.bit_length())) if self.per_count else ()
        return (*(count for count in powers if count <= self.max_loras), self.max_loras + 1)

    def key_counts(self) -> tuple[int, ...]:
        """All counts in keys, ascending; 0 means no adapter."""
        return (0, *self.adapter_counts()) if self.without else self.adapter_counts()

    def count_table(self) -> tuple[int, ...]:
        """Number of adapters in a batch (index, 0 to ``max_loras + 1``) -> count of its key."""
        counts = self.key_counts()
        ladder = Ladder(counts)
        return tuple(counts[ladder.index_above(count)] for count in range(self.max_loras + 2))
