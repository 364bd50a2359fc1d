"""Options of a wrapper: outputs, moved inputs, lazy capture and debugging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphpass.checks import one_of

__all__ = ["CapturePolicy"]


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """Whether a wrapper clones outputs, when it may capture, and how it handles static inputs that moved.

    Attributes:
        outputs: ``clone``: results are independent of later replays. ``view``: results lie in the pool, without a
            copy, and are valid until the next replay of any key of the runtime.
        on_moved_input: ``copy``: capture the key again for the new address, if capture is allowed. ``error``: raise an
            error that names the input, unless a capture scope is open. Under a user's context, only a
            ``runtime.capturing()`` scope and ``lazy_capture`` allow a capture.
        lazy_capture: capture a key at its first use, also outside ``runtime.capturing()``, with a warning.
        debug: run the region eagerly instead of replaying, with the same buffers and padding, and report output views
            that are still held after a later replay overwrote them.
        compare: also run the region eagerly at each replay, on copies, and raise an error if a result differs.
    """

    outputs: Literal["clone", "view"] = "clone"
    on_moved_input: Literal["copy", "error"] = "copy"
    lazy_capture: bool = False
    debug: bool = False
    compare: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("outputs", ("clone", "view")), ("on_moved_input", ("copy", "error"))):
            self._refuse_other(name, allowed)
        for name in ("lazy_capture", "debug", "compare"):
            self._refuse_other(name, (False, True))

    def _refuse_other(self, name: str, allowed: tuple[object, ...]) -> None:
        value, remedy = getattr(self, name), f"leave it out for {allowed[0]!r}"
        one_of(value, allowed, f"option {name} has no such value", remedy=remedy)

    @property
    def clones_outputs(self) -> bool:
        """Whether results are copied out of the pool."""
        return self.outputs == "clone"
