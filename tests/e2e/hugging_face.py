"""What tests of stock Hugging Face models share: where they run, weights of which each matters, and differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model runs, and how far its results may be from eager's (relative norm)."""

    device: str
    dtype: torch.dtype
    tolerance: float

    def __str__(self) -> str:
        return f"{self.device}-{str(self.dtype).removeprefix('torch.')}"


CPU = Place("cpu", torch.float32, 1e-5)
CUDA = Place("cuda", torch.bfloat16, 2e-2)


def far_from_initial(model: torch.nn.Module, gain: float = 1.0) -> None:
    """Seeded weights: under the initial ones every token would attend to all alike, and most texts repeat one token."""
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=seeded)
            if weight.dim() > 1:
                weight.copy_(gain * noise / math.sqrt(weight[0].numel()))
            else:
                weight.add_(0.2 * noise)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative norm of the difference."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return float((found.double() - expected.double()).norm() / expected.double().norm())
