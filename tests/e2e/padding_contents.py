"""What stands in padding, told from outside: zeros, noise, NaN, and for integers other valid ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from tests.e2e.hugging_face import VOCABULARY

FLOAT_KINDS = ("zero", "random", "NaN")
INTEGER_KINDS = ("zero", "random", "largest")
"""Integers are indices: only valid ones can stand in padding."""


def fill_like(like: torch.Tensor, shape: Sequence[int], kind: str, seeded: torch.Generator) -> torch.Tensor:
    """A tensor of ``shape``, of the dtype and on the device of ``like``."""
    if kind == "random":
        drawn = torch.randn(shape, generator=seeded) * 100
        if not like.is_floating_point():
            drawn = torch.randint(VOCABULARY, tuple(shape), generator=seeded)
        return drawn.to(like)
    return like.new_full(tuple(shape), {"zero": 0, "largest": VOCABULARY - 1, "NaN": math.nan}[kind])


class Contents:
    """A padding rule that is told from outside, before each call, what to fill with.

    Attributes:
        kind: one of ``kinds``.
        filled: how often it was asked for padding of each kind.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self.kind = self.kinds[-1]
        self.filled: Counter[str] = Counter()
        self._seeded = torch.Generator().manual_seed(0)

    def __call__(self, real: torch.Tensor, padded_shape: tuple[int, ...]) -> torch.Tensor:
        self.filled[self.kind] += 1
        padded = fill_like(real, padded_shape, self.kind, self._seeded)
        padded[tuple(slice(size) for size in real.shape)] = real
        return padded
