"""Reasons: why something has no graph, runs in pieces or is not padded, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphpass.errors import CaptureError, GraphpassError


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something runs without a graph, in pieces or without padding."""

    why: str  #: the reason, in one clause without sizes: calls of other sizes may have it, too
    remedy: str = ""  #: what works against it in this situation; empty if nothing is lost, or the user asked for it
    where: str = ""  #: the line of the user's code, as ``model.py:12: x.item()``; empty if unknown
    sizes: tuple[tuple[str, int], ...] = ()  #: (key field, size) that it is about; empty if it holds at any size
    is_expected: bool = False  #: harmless: counted, not warned about

    def __str__(self) -> str:
        text = f"{self.why} ({named_sizes(self.sizes)})" if self.sizes else self.why
        return f"{text} at {self.where}" if self.where else text


def named_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """Sizes of key fields as text: ``batch=8 seq=64``."""
    return " ".join(f"{field}={size}" for field, size in sizes)


def why_failed(error: BaseException, *, otherwise: str) -> Reason:
    """Why a capture that raised ``error`` has no graph, without the key, the sizes and the memory in use.

    The remedy is the error's own, or ``otherwise`` if it states none.
    """
    where = error.where if isinstance(error, CaptureError) else ""
    cause = error.__cause__ if where and error.__cause__ is not None else error
    found = (
        f"{cause.problem}: {cause.found}" if isinstance(cause, GraphpassError) else f"{type(cause).__name__}: {cause}"
    )
    remedy = error.remedy if isinstance(error, GraphpassError) else otherwise
    return Reason(f"the capture failed {where}: {found}" if where else f"the capture failed: {found}", remedy)
