"""The result of a command: figures for ``--json``, and parts that are drawn as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpass.report.parts import Part

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one command.

    Attributes:
        command: ``explain``, ``doctor``, ``bench`` or ``plan``.
        subject: the model, file or machine that it is about.
        figures: the content of ``--json``: dicts, lists, strings, numbers, booleans and None.
        parts: the same for people, in reading order; empty tables are not drawn.
        failure: the check that failed, for exit code 1; None if none did.
    """

    command: str
    subject: str
    figures: Mapping[str, Any]
    parts: tuple[Part, ...]
    failure: str | None = None
