"""Ladders: ascending capture sizes, and rounding a size up to the next of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from graphpass.errors import DispatchError

__all__ = ["Ladder", "capture_sizes_within", "decode_sizes"]

# Entries of the direct table for each rung, which bounds its memory; larger sizes use a binary search.
_SLOTS_PER_RUNG = 1024


class Ladder:
    """Ascending sizes (rungs); a table look-up finds the next rung for a size.

    Args:
        rungs: sizes of at least 1 in any order; duplicates count once.
    """

    __slots__ = ("_next_rung", "rungs")

    def __init__(self, rungs: Iterable[int]) -> None:
        self.rungs: tuple[int, ...] = tuple(sorted(set(rungs)))
        self._next_rung: list[int] = []
        slots = len(self.rungs) * _SLOTS_PER_RUNG
        for index, rung in enumerate(self.rungs):
            self._next_rung += [index] * (min(rung + 1, slots) - len(self._next_rung))

    def __len__(self) -> int:
        return len(self.rungs)

    def index_above(self, size: int) -> int:
        """Index of the smallest rung that is at least ``size`` (0 or larger); ``len(self)`` if there is none."""
        if size < len(self._next_rung):
            return self._next_rung[size]
        return bisect_left(self.rungs, size)


def capture_sizes_within(sizes: Sequence[int], max_num_tokens: int | None, query_len: int) -> tuple[int, ...]:
    """The token counts to capture, ascending and without duplicates.

    Args:
        sizes: requested token counts.
        max_num_tokens: tokens of the largest expected batch. Sizes above it, rounded up to whole requests of
            ``query_len`` tokens, would never be replayed and are left out. None: no bound.
        query_len: tokens per request in a uniform decode batch.

    Raises:
        DispatchError: no size is left.
    """
    within = tuple(sorted(set(sizes)))
    if max_num_tokens is not None:
        bound = round_up(max_num_tokens, query_len)
        within = tuple(size for size in within if size <= bound)
    if not within:
        raise DispatchError(
            "there is no size to capture",
            expected="a size of at least 1" + ("" if max_num_tokens is None else f" and at most {max_num_tokens}"),
            found=repr(list(sizes)),
            remedy="list the sizes to capture, raise max_num_tokens, or use mode NONE",
        )
    return within


def decode_sizes(sizes: Sequence[int], max_num_reqs: int, query_len: int) -> tuple[int, ...]:
    """Token counts of the uniform decode keys, ascending multiples of ``query_len``.

    Capture sizes are rounded up to whole requests, and the largest decode batch (``max_num_reqs`` requests) is added.
    Counts above that batch, or above the largest rounded capture size, are left out.
    """
    largest = min(max_num_reqs * query_len, round_up(max(sizes), query_len))
    rounded = {round_up(size, query_len) for size in sizes} | {max_num_reqs * query_len}
    return tuple(sorted(size for size in rounded if query_len <= size <= largest))


def round_up(size: int, stride: int) -> int:
    """The smallest multiple of ``stride`` that is at least ``size``."""
    return -(-size // stride) * stride
