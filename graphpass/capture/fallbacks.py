"""Applies ``on_fallback``: a warning, an error or silence if a requested graph is not possible."""

from __future__ import annotations

import logging
from typing import Literal

from graphpass.capture.runtime import GraphRuntime
from graphpass.errors import CaptureError

__all__ = ["Fallbacks"]

_log = logging.getLogger("graphpass")


class Fallbacks:
    """Reports fallbacks: notes each one, and warns once for each reason.

    Args:
        runtime: owner of the notes.
        on_fallback: the backend's option.
    """

    def __init__(self, runtime: GraphRuntime, on_fallback: Literal["warn", "error", "silent"]) -> None:
        self._runtime = runtime
        self._on_fallback = on_fallback
        self._reasons: set[str] = set()

    def report(self, text: str, error: CaptureError, *, once_for: str) -> None:
        """Report one fallback as the option says.

        Args:
            text: the note and the warning.
            error: the error to raise.
            once_for: the reason; only its first report warns.

        Raises:
            CaptureError: ``error``, if the option is ``error``.
        """
        if self._on_fallback == "error":
            raise error
        if self._on_fallback == "warn":
            self.warn_once(text, once_for=once_for)
        self._runtime.note(text)

    def warn_once(self, text: str, *, once_for: str) -> None:
        """Warn at the first report of this reason, whatever the option says."""
        if once_for not in self._reasons:
            self._reasons.add(once_for)
            _log.warning("%s", text)

    def report_never_full(self, reason: str) -> None:
        """Report that ``FULL`` was requested for a model that cannot be captured as a whole.

        Args:
            reason: the region that cannot be captured, and why.

        Raises:
            CaptureError: the option is ``error``.
        """
        self.report(
            f"FULL is not possible, PIECEWISE instead: {reason}",
            CaptureError(
                "the model cannot be captured as a whole, and on_fallback is 'error'",
                expected="a model without such an op, or mode='PIECEWISE'",
                found=reason,
                remedy="set mode='PIECEWISE' (in a manager's dispatcher), or on_fallback='warn'",
            ),
            once_for="never full",
        )
