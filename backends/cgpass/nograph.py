"""Why calls without a forward context run without a graph, each with its remedy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from graphpass.dispatch.recurring import CALLS_OF_A_NUMBER
from graphpass.errors import CaptureError
from graphpass.ledger import Reason, named_sizes, why_failed
from graphpass.report.problems import OF_A_NEW_KEY

_log = logging.getLogger("graphpass")

FIRST_CALLS = Reason(OF_A_NEW_KEY, "", is_expected=True)
EMPTY = Reason("an input has no elements", "", is_expected=True)
ON_THE_CPU = Reason("its tensors are on the CPU, and the graphs of the runtime on a GPU", "", is_expected=True)
OTHER_INPUTS = Reason("the graph of this size is for other static inputs", "", is_expected=True)
FASTER_WITHOUT = Reason("a run without a graph is faster than the graphs that hold the size", "", is_expected=True)
CHECKED = Reason("the check found that padding changes results", "", is_expected=True)
NUMBER_IN_KEY = Reason(
    "a Python number is part of the key, which gets a graph after"
    f" {CALLS_OF_A_NUMBER} calls with the same number and sizes",
    "pass the number as a tensor, or keep it in a buffer; where it is a size, pass a tensor that has it, and read its"
    " shape (x.shape[0])",
)
BUSY = Reason(
    "another capture or forward of the runtime was under way",
    "capture before other threads start (capture() or precapture()), or compile a model for each thread, with options"
    " runtime=graphpass.GraphRuntime(), dispatch='auto'",
)
PLAIN = "compiled once more, without what makes padding neutral, for graphs of sizes that recur"
NOT_PLAIN = "graphs of sizes that recur contain what makes padding neutral: it cannot be compiled without"
NOT_PADDED = (
    "correct the rule (register_padding_rule) or promise (rows_apart) that is wrong; a model with neither shows a fault"
    " of graphpass, which padding='never' avoids: report it"
)
_AFTER_FAILURE = "run it at that size with mode='NONE': if it fails there, too, the model causes it, else the capture"


class NoGraphNowError(Exception):
    """Control flow: this call must run without a graph, and no part of it has run yet."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.why)
        self.reason = reason


Failures: TypeAlias = dict[tuple[str, type[BaseException], str], Reason]
"""The captures of one callable that failed: one reason for all keys that fail at one place with one error."""


def of_failure(error: BaseException, known: Failures, name: str, sizes: Sequence[tuple[str, int]]) -> Reason:
    """The reason for all further calls of a key whose capture failed; the whole error is logged at DEBUG."""
    _log.debug("%s %s: %s", name, named_sizes(sizes), error)
    cause, where = error, ""
    if isinstance(error, CaptureError) and error.where:
        cause, where = error.__cause__ or error, error.where
    reason = why_failed(error, otherwise=_AFTER_FAILURE)
    # The text of an error of torch may have sizes; that of the first key stands for all.
    return replace(known.setdefault((where, type(cause), reason.remedy), reason), sizes=tuple(sizes))


def refused(name: str, reason: Reason, option: str, otherwise: str) -> CaptureError:
    """The error of a call that would run without a graph, where an option makes that an error."""
    remedy = reason.remedy or "capture the sizes that calls have (capture_sizes, then capture() or precapture())"
    return CaptureError(
        f"{name} would run without a graph, and {option}",
        expected="a call whose key has a graph, or may be captured now",
        found=str(reason),
        remedy=f"{remedy}, or {otherwise}",
    )
