"""The callable of an eager region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphpass.context import current_context

__all__ = ["EagerRegion"]


class EagerRegion:
    """Runs the code of an eager region; during a FULL capture, through the capture's record of region calls.

    Args:
        name: the region's name in its runtime.
        run: its code.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = name
        self.run = run

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        context = current_context()
        if context is None or context.capture is None:
            return self.run(*args)
        return context.capture.call(self.name, self.run, args, {})
