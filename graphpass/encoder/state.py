"""The settings under which an encoder was captured: a graph goes on under them, whatever holds when it is replayed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch

from graphpass.encoder.weights import EncoderWeights

__all__ = ["EncoderState"]


@dataclass(frozen=True, slots=True)
class EncoderState:
    """What decides which kernels a forward runs, beside its weights and inputs.

    Attributes:
        autocast: whether it is on for the encoder's device, and the type that it casts to.
        matmul_precision: of float32.
        default_dtype: of new tensors.
        deterministic: whether algorithms have to be.
        training: of each module.
    """

    autocast: tuple[bool, torch.dtype | None]
    matmul_precision: str
    default_dtype: torch.dtype
    deterministic: bool
    training: tuple[bool, ...]

    @classmethod
    def now(cls, weights: EncoderWeights, device: torch.device) -> Self:
        """The settings as they are."""
        casts = torch.is_autocast_enabled(device.type)
        return cls(
            autocast=(casts, torch.get_autocast_dtype(device.type) if casts else None),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            training=weights.training(),
        )

    def difference(self, other: EncoderState) -> str | None:
        """The name of a setting in which they differ; None where all are equal."""
        if self == other:
            return None
        return next(field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
