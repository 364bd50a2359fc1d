"""The structured trace that ``TORCH_TRACE`` writes, and tlparse reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphpass.compat.attributes import torch_attribute

_trace_structured: Callable[..., None] | None = torch_attribute("_logging.trace_structured")


def trace_text(name: str, text: Callable[[], str]) -> None:
    """Add a text to the trace; without ``TORCH_TRACE`` it is not made.

    Inside a compilation of Dynamo it belongs to the compiled frame, outside it stands alone.

    Args:
        name: its name in tlparse's pages.
        text: makes the text.
    """
    _trace(name, "string", text)


def trace_json(name: str, record: Callable[[], Mapping[str, Any]]) -> None:
    """Like :func:`trace_text`, for a record of mappings, sequences, numbers and text."""
    _trace(name, "json", record)


def _trace(name: str, encoding: str, payload: Callable[[], str | Mapping[str, Any]]) -> None:
    if _trace_structured is not None:
        named = {"name": name, "encoding": encoding}
        _trace_structured("artifact", metadata_fn=lambda: named, payload_fn=payload, expect_trace_id=False)
