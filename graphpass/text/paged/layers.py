"""What paged attention has to know of each attention layer before the first step: sizes, mask and scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphpass.checks import is_integer
from graphpass.errors import OptionError

__all__ = ["LayerMask", "PagedLayer", "PositionScale"]


@dataclass(frozen=True, slots=True, order=True)
class LayerMask:
    """The keys that a query attends to: its own position and those before it, within these limits.

    Attributes:
        window: number of positions, the query's own included (sliding window); 0: no limit.
        chunk: positions from the last multiple of this number on (chunked attention); 0: no limit.

    Raises:
        OptionError: a limit is negative or no integer.
    """

    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if not all(is_integer(limit, at_least=0) for limit in (self.window, self.chunk)):
            raise OptionError(
                "the mask of an attention layer is not valid",
                expected="a window and a chunk of at least 1 position, 0 for none",
                found=f"window={self.window!r}, chunk={self.chunk!r}",
                remedy="leave out a limit that the layer does not have",
            )

    def within(self, max_seq_len: int) -> LayerMask:
        """The same mask for sequences up to this length: without limits that none of them reaches."""
        return LayerMask(
            window=self.window if self.window < max_seq_len else 0, chunk=self.chunk if self.chunk < max_seq_len else 0
        )

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions attend to keys at these positions; the shapes are broadcast."""
        seen = keys <= queries
        if self.window:
            seen = seen & (keys > queries - self.window)
        if self.chunk:  # guard: paged_chunks
            seen = seen & (keys >= queries - queries % self.chunk)
        return seen


@dataclass(frozen=True, slots=True)
class PositionScale:
    """A query at position p is multiplied by ``1 + factor * log(1 + floor((p + 1) / interval))``, as in Llama 4.

    Attributes:
        interval: positions with the same scale.
        factor: strength.
    """

    interval: float
    factor: float

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The scales of queries at these positions, float32."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.interval)) * self.factor + 1.0


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention layer over a paged cache.

    Attributes:
        num_kv_heads: heads of keys and values.
        head_dim: size of a query and a key.
        value_dim: size of a value; 0: ``head_dim``.
        mask: which keys a query attends to.
        is_plain: the scores are scaled products and nothing else. Kernels that know neither a soft cap nor sinks serve
            plain layers only.
        query_scale: scale of queries by position; None: none.

    Raises:
        OptionError: a size is below 1.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    mask: LayerMask = LayerMask()
    is_plain: bool = True
    query_scale: PositionScale | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_kv_heads, self.head_dim)
        if not all(is_integer(size, at_least=1) for size in sizes) or not is_integer(self.value_dim, at_least=0):
            raise OptionError(
                "the sizes of an attention layer are not valid",
                expected="num_kv_heads and head_dim of at least 1, and a value_dim of at least 1 or 0 for head_dim",
                found=f"{self.num_kv_heads!r}, {self.head_dim!r} and {self.value_dim!r}",
                remedy="pass the sizes of the model's attention",
            )

    @property
    def dim_of_values(self) -> int:
        """Size of a value."""
        return self.value_dim or self.head_dim
