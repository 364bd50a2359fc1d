"""Threads that start together, and whose errors are the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable

LONGEST_S = 240


def in_threads(run: Callable[[int], object], num_threads: int = 4) -> None:
    """``run(number)`` in each thread, started together; the first error is raised here, and each thread has ended."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(num_threads)

    def guarded(number: int) -> None:
        barrier.wait()
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
