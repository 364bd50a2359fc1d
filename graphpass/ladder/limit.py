"""Capturing as many keys as fit into so many bytes of the graph pool.

What a key takes is known for certain once it is captured, and the pool gives nothing back while it holds graphs. So a
key that takes the pool above the limit costs the whole pool: it is given back, and the others are captured anew without
that key. The model of :mod:`graphpass.ladder.estimate` keeps this from happening where it can tell before; how often it
may happen is bounded, so that no more than five captures a key are made whatever the pool does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpass.ladder.estimate import Key, PoolModel

__all__ = ["KeyPool", "capture_within"]

_FULL_RETRIES = 2


@dataclass(frozen=True, slots=True)
class KeyPool:
    """The pool that keys are captured into.

    Attributes:
        num_bytes: how many it holds now.
        capture: captures one more key.
        drop: gives the pool back, with the graphs of all keys.
        on_some_rank: of what holds here, whether it holds on any rank that captures the same keys; here alone, itself.
    """

    num_bytes: Callable[[], int]
    capture: Callable[[Key], None]
    drop: Callable[[], None]
    on_some_rank: Callable[[bool], bool] = bool


def capture_within(
    max_bytes: int | None, pool: KeyPool, held: Sequence[Key], missing: Sequence[Key], model: PoolModel
) -> tuple[Key, ...]:
    """Capture the ``missing`` keys, in this order, as long as the pool ends at ``max_bytes`` or below.

    Args:
        max_bytes: the limit; None: only other ranks have one. A pool that is above it already stays as it is.
        pool: what is filled.
        held: the keys that it has, in the order of capture.
        missing: the keys to add.
        model: says beforehand whether a key is likely to fit.

    Returns:
        The keys that have no graph now.
    """
    captured, wanted, retries = list(held), list(missing), 0
    while True:
        too_large = _fill(max_bytes, pool, captured, wanted, model)
        if too_large is None:
            return tuple(key for key in (*held, *missing) if key not in captured)
        pool.drop()
        rest = wanted[wanted.index(too_large) + 1 :]
        if captured:
            retries += 1
            # Alone, they fitted; where they do not the second time, the pool cannot be foretold.
            again = captured if retries <= _FULL_RETRIES else captured[: len(captured) // 2]
            rest = [*again, *(rest if retries == 1 else ())]
        captured, wanted = [], rest


def _fill(
    max_bytes: int | None, pool: KeyPool, captured: list[Key], wanted: Sequence[Key], model: PoolModel
) -> Key | None:
    """Capture what is likely to fit, and add it to ``captured``; returns a key that did not fit, and ends with it."""

    def exceeds(num_bytes: int) -> bool:
        return pool.on_some_rank(max_bytes is not None and num_bytes > max_bytes)

    for key in wanted:
        if exceeds(model.after(pool.num_bytes(), captured, key)):
            continue
        pool.capture(key)
        if exceeds(pool.num_bytes()):
            return key
        captured.append(key)
    return None
