"""Settings of torch and of modules that a graph has baked in: it goes on under them, whatever holds at its replay."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

__all__ = ["AmbientState", "training_of"]

_TRAINING = operator.attrgetter("training")


@dataclass(frozen=True, slots=True)
class AmbientState:
    """What decides which kernels a forward runs, beside its weights and inputs.

    Attributes:
        autocast: for each kind of device, whether it is on, and the type that it casts to.
        matmul_precision: of float32.
        default_dtype: of new tensors.
        deterministic: whether algorithms have to be.
        training: of each module.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    matmul_precision: str
    default_dtype: torch.dtype
    deterministic: bool
    training: tuple[bool, ...]

    @classmethod
    def now(cls, modules: Sequence[torch.nn.Module]) -> AmbientState:
        """The state as it is."""
        return cls(
            autocast=tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
            ),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            training=training_of(modules),
        )

    def difference(self, other: AmbientState) -> str | None:
        """The name of a setting in which they differ; None where all are equal."""
        if self == other:
            return None
        return next(field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))


def training_of(modules: Sequence[torch.nn.Module]) -> tuple[bool, ...]:
    """Whether each module is in training mode."""
    return tuple(map(_TRAINING, modules))
