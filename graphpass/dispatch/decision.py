"""The result of a dispatch: a mode, a padded shape, and the reason for both."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["Dispatch", "DispatchReason"]


class DispatchReason(enum.Enum):
    """Why a batch runs in its mode. The value is a short label for counters."""

    EXACT = "exact"
    PADDED = "padded"
    RELAXED = "relaxed"
    EMPTY = "empty"
    TOO_LARGE = "too_large"
    NO_KEY = "no_key"
    DISABLED = "disabled"
    NOT_CAPTURED = "not_captured"
    AGREED = "agreed"

    @property
    def explanation(self) -> str:
        """The reason as a clause, for reports and errors."""
        return _EXPLANATIONS[self]

    @property
    def remedy(self) -> str:
        """What gives such a batch a graph; empty for reasons of batches that have one."""
        return _REMEDIES.get(self, "")

    def __str__(self) -> str:
        return self.value


_EXPLANATIONS = {
    DispatchReason.EXACT: "a key has exactly this size",
    DispatchReason.PADDED: "the next larger key holds it",
    DispatchReason.RELAXED: "a uniform decode batch is served by a key for mixed batches",
    DispatchReason.EMPTY: "the batch has no tokens",
    DispatchReason.TOO_LARGE: "the batch is above the largest key",
    DispatchReason.NO_KEY: "no key has this extra or this number of adapters",
    DispatchReason.DISABLED: "the mode, or allowed_modes, leaves no graphs to such batches",
    DispatchReason.NOT_CAPTURED: "its key has not been captured yet",
    DispatchReason.AGREED: "the other ranks need another mode or size",
}
_REMEDIES = {
    DispatchReason.EMPTY: "skip the step",
    DispatchReason.TOO_LARGE: "add a capture size that holds it, or split the batch",
    DispatchReason.NO_KEY: "add that value to capture_sizes, or that number of adapters to LoraKeys",
    DispatchReason.DISABLED: "use a mode that has graphs for such batches, or allow it in allowed_modes",
    DispatchReason.NOT_CAPTURED: "call capture(), with a max_bytes that leaves room for the key",
    DispatchReason.AGREED: "capture the sizes that this rank has on every rank, and balance the batches",
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one batch.

    Attributes:
        mode: NONE, PIECEWISE or FULL, for the forward context.
        descriptor: a key of the dispatcher for PIECEWISE and FULL; the unpadded shape for NONE.
        reason: why this mode and this descriptor.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: DispatchReason
