"""Why calls without a forward context run without a graph, each with its remedy."""

from __future__ import annotations

from graphpass.dispatch.recurring import RecurringKey
from graphpass.errors import CaptureError, GraphpassError, NoGraph

__all__ = ["BUSY", "DECLARE", "EMPTY", "FIRST_CALLS", "NoGraphNowError", "failed", "refused"]

FIRST_CALLS = NoGraph("first calls of a key", "", is_expected=True)
EMPTY = NoGraph("an input has no elements", "", is_expected=True)
BUSY = NoGraph(
    "another capture or forward of the runtime was under way",
    "capture before other threads start (precapture), or pass each thread's model a runtime of its own",
)
DECLARE = "declare what the model needs there (padding={input: value}), or mask it in the model"
_AFTER_FAILURE = "run the model eagerly at that size: an error there is the model's own"


class NoGraphNowError(Exception):
    """Control flow: this call must run without a graph, and no part of it has run yet."""

    def __init__(self, reason: NoGraph) -> None:
        super().__init__(reason.why)
        self.reason = reason


def failed(key: RecurringKey, error: BaseException) -> NoGraph:
    """The reason for all further calls of a key whose capture failed."""
    remedy = "" if isinstance(error, GraphpassError) else _AFTER_FAILURE  # the text of our errors has a remedy
    return NoGraph(f"the capture of {key.descriptor} failed: {error}", remedy)


def refused(name: str, reason: NoGraph, option: str, otherwise: str) -> CaptureError:
    """The error of a call that would run without a graph, where an option makes that an error.

    Args:
        name: the callable.
        reason: why it has no graph.
        option: the option that makes it an error.
        otherwise: the remedy that changes the option.
    """
    remedy = reason.remedy or "capture the sizes that calls have (capture_sizes, precapture)"
    return CaptureError(
        f"{name} would run without a graph, and {option}",
        expected="a call whose key has a graph, or may be captured now",
        found=reason.why,
        remedy=f"{remedy}, or {otherwise}",
    )
