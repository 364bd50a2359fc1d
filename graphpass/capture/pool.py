"""The pool rule: one forward at a time.

Graphs that share a pool overwrite each other's memory, so a pool has one forward in flight. A second thread waits for
its turn; a forward that starts inside another one is refused.
"""

from __future__ import annotations

import threading

from graphpass.context import ForwardContext
from graphpass.errors import PoolBusyError

__all__ = ["PoolLease"]


class PoolLease:
    """Hands the pool to one forward at a time; a forward is one context in one thread and may take it repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._context: ForwardContext | None = None
        self._depth = 0

    def acquire(self, context: ForwardContext, who: str) -> bool:
        """Wait for the pool; True when this starts a forward, False inside one that has it already.

        Raises:
            PoolBusyError: this thread's own, other forward has the pool, so waiting would never end.
        """
        thread = threading.get_ident()
        if self._thread == thread:
            if self._context is not context:
                raise PoolBusyError(
                    f"{who} started a forward inside another forward of the same pool",
                    expected="one forward at a time in a pool",
                    found="a second forward context, set inside the first forward",
                    remedy="give the inner model a GraphRuntime of its own, or run it with runtime mode NONE",
                )
            self._depth += 1
            return False
        self._lock.acquire()
        self._thread, self._context, self._depth = thread, context, 1
        return True

    def is_mine(self) -> bool:
        """Whether this thread has the pool."""
        return self._thread == threading.get_ident()

    def release(self) -> None:
        """End what the matching :meth:`acquire` began."""
        self._depth -= 1
        if not self._depth:
            self._thread = self._context = None
            self._lock.release()
