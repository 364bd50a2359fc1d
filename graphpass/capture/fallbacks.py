"""What ``on_fallback`` says: a warning, an error or silence where a graph was asked for and cannot be had."""

from __future__ import annotations

import logging
from typing import Literal

from graphpass.capture.runtime import GraphRuntime
from graphpass.errors import CaptureError

__all__ = ["Fallbacks"]

_log = logging.getLogger("graphpass")


class Fallbacks:
    """Reports fallbacks: each is noted, and warned of once for its reason.

    Args:
        runtime: keeps the notes.
        on_fallback: the backend's option.
    """

    def __init__(self, runtime: GraphRuntime, on_fallback: Literal["warn", "error", "silent"]) -> None:
        self._runtime = runtime
        self._on_fallback = on_fallback
        self._reasons: set[str] = set()

    def report(self, text: str, error: CaptureError, *, once_for: str) -> None:
        """Do what the option says.

        Args:
            text: what is noted, and the warning.
            error: the same as an error.
            once_for: the reason; a second warning for it says nothing new.

        Raises:
            CaptureError: ``error``, where that is what the option says.
        """
        if self._on_fallback == "error":
            raise error
        if self._on_fallback == "warn":
            self.warn_once(text, once_for=once_for)
        self._runtime.note(text)

    def warn_once(self, text: str, *, once_for: str) -> None:
        """Warn, whatever the option says, if this reason comes up for the first time."""
        if once_for not in self._reasons:
            self._reasons.add(once_for)
            _log.warning("%s", text)

    def report_never_full(self, reason: str) -> None:
        """Report that ``FULL`` was asked for, of a model with something that no graph can hold.

        Raises:
            CaptureError: the option says so.
        """
        self.report(
            f"FULL is not possible, PIECEWISE instead: {reason}",
            CaptureError(
                "the model cannot be captured as a whole, and on_fallback is 'error'",
                expected="a model without such an op, or mode='PIECEWISE'",
                found=reason,
                remedy="ask for mode='PIECEWISE' (of a manager's dispatcher), or set on_fallback='warn'",
            ),
            once_for="never full",
        )
