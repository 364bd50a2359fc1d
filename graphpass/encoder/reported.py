"""What an encoder manager reports of requests that run eagerly, and of graphs that are captured again."""

from __future__ import annotations

from graphpass.capture.runtime import GraphRuntime
from graphpass.encoder.capture import CapturedLadder

__all__ = ["another_setting", "new_weights", "why_eager"]


def new_weights(runtime: GraphRuntime) -> None:
    """All graphs are captured again during a request."""
    runtime.warn(
        "weights of the encoder were replaced or moved: its graphs are captured again",
        "copy new weights into the old parameters (`parameter.copy_(new)`), or call clear() and capture() yourself",
    )


def another_setting(runtime: GraphRuntime, setting: str) -> None:
    """A request runs eagerly under another setting than that of the capture."""
    runtime.warn(
        f"{setting} changed since the encoder was captured: it runs eagerly",
        "call clear() and capture() under the new setting to use graphs",
        is_recorded=True,
    )


def why_eager(runtime: GraphRuntime, captured: CapturedLadder | None, num_tokens: int) -> None:
    """An eager call, before the capture or above the largest budget; other eager calls are cheaper than a replay."""
    if captured is None:
        what = "the encoder runs eagerly: it has not been captured"
        runtime.warn(what, "call capture() first", is_recorded=True)
        return
    largest = max((key.tokens for key in captured.budgets), default=0)
    if num_tokens > largest and captured.state.setting_changed() is None:
        runtime.warn(
            f"{num_tokens} output tokens are more than the largest captured budget, {largest}: they run eagerly",
            "pass token_budgets that hold them, or scale the image down",
            once_for="above the largest budget",
        )
