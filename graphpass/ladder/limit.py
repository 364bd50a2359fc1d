"""Captures as many keys as a limit on the bytes of the graph pool allows.

The bytes of a key are certain only after its capture, and the pool frees no memory while it has graphs. So if a key
grows the pool above the limit, the whole pool is released and the other keys are captured again without that key. The
model of :mod:`graphpass.ladder.estimate` skips keys that will not fit, which makes this rare. Retries are bounded:
there are at most five times as many captures as keys, whatever the pool does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpass.ladder.estimate import Key, PoolModel

__all__ = ["KeyPool", "capture_within"]

_FULL_RETRIES = 2


@dataclass(frozen=True, slots=True)
class KeyPool:
    """The pool of a ladder's graphs.

    Attributes:
        num_bytes: the current size of the pool.
        capture: captures one more key.
        drop: releases the pool and the graphs of all keys.
        on_some_rank: whether a condition is true on any rank that captures the same keys, from its value on this rank.
            The default is for a single rank: it returns its argument.
    """

    num_bytes: Callable[[], int]
    capture: Callable[[Key], None]
    drop: Callable[[], None]
    on_some_rank: Callable[[bool], bool] = bool


def capture_within(
    max_bytes: int | None, pool: KeyPool, present: Sequence[Key], missing: Sequence[Key], model: PoolModel
) -> tuple[Key, ...]:
    """Capture the ``missing`` keys, in this order, and skip keys that would grow the pool above ``max_bytes``.

    Args:
        max_bytes: the limit; None: only other ranks have one. A pool that is already larger is not reduced.
        pool: the pool to capture into.
        present: the keys whose graphs are in the pool, in the order of capture.
        missing: the keys to capture.
        model: predicts the size of the pool after the capture of a key.

    Returns:
        The keys of ``present`` and ``missing`` that have no graph afterwards.
    """
    captured, wanted, retries = list(present), list(missing), 0
    while True:
        too_large = _fill(max_bytes, pool, captured, wanted, model)
        if too_large is None:
            return tuple(key for key in (*present, *missing) if key not in captured)
        pool.drop()
        rest = wanted[wanted.index(too_large) + 1 :]
        if captured:
            retries += 1
            # These keys fitted before the key that did not. If they do not fit again, retry with half of them.
            again = captured if retries <= _FULL_RETRIES else captured[: len(captured) // 2]
            rest = [*again, *(rest if retries == 1 else ())]  # guard: memory_limit_bounded
        captured, wanted = [], rest


def _fill(
    max_bytes: int | None, pool: KeyPool, captured: list[Key], wanted: Sequence[Key], model: PoolModel
) -> Key | None:
    """Capture keys that should fit and append them to ``captured``. Stops at a key that did not fit and returns it."""

    def exceeds(num_bytes: int) -> bool:
        return pool.on_some_rank(max_bytes is not None and num_bytes > max_bytes)

    for key in wanted:
        if exceeds(model.after(pool.num_bytes(), captured, key)):
            continue
        pool.capture(key)
        if exceeds(pool.num_bytes()):  # guard: memory_limit_kept
            return key
        captured.append(key)
    return None
