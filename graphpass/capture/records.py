"""Records about a runtime's callables, for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor

__all__ = ["CallableRecord", "CompileSeconds", "RegionId", "RuntimeStats"]


@dataclass(frozen=True, slots=True)
class RegionId:
    """The name of a region of a callable (``g0.r3``) or of a whole callable (``g0.full``).

    Attributes:
        callable: the callable's name; or the whole name of a wrapper that belongs to no callable.
        region: the region's name, ``full`` for the whole; empty for a wrapper that belongs to no callable.
    """

    callable: str
    region: str = ""

    def __str__(self) -> str:
        return f"{self.callable}.{self.region}" if self.region else self.callable


@dataclass(frozen=True, slots=True)
class CompileSeconds:
    """Seconds that the backend spent on one graph, by phase.

    Attributes:
        partition: splitting the graph and generating the stitched code.
        key: structural keys of the regions.
        compile: the compiler, over the distinct regions.
        proof: the proof of what may be padded.
    """

    partition: float = 0.0
    key: float = 0.0
    compile: float = 0.0
    proof: float = 0.0


@dataclass(frozen=True, slots=True)
class CallableRecord:
    """One callable that a compiler registered, for reports.

    Attributes:
        name: ``g0``, ``g1``, ... in the order of compilation.
        regions: (name, kind, reason why eager or None, number of ops).
        artifacts: number of artifacts compiled for it; those shared with an earlier callable count there.
        frame: id of the Python frame it was compiled for; recompiles of one function share it.
        reason: why the graph ends where it does (a graph break), or why it is never captured; None otherwise.
        seconds: compile time by phase.
        admits: whether the guards of the callable admit a key's sizes; None if its sizes are not key fields.
        padding: (key field, verdict, why): whether a size may be padded; an empty field means all sizes.
    """

    name: str
    regions: tuple[tuple[str, str, str | None, int], ...]
    artifacts: int
    frame: int | None = None
    reason: str | None = None
    seconds: CompileSeconds = CompileSeconds()
    admits: Callable[[BatchDescriptor], bool] | None = None
    padding: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Totals over all callables of a runtime.

    Attributes:
        callables: graphs that Dynamo handed over.
        artifacts: compiled artifacts.
        captured: graphs captured so far.
        replayed: replays so far.
        copied: inputs copied into static buffers so far.
        pool_bytes: bytes of the graph pool, 0 on the CPU tape.
        buffer_bytes: bytes of static input buffers.
    """

    callables: int
    artifacts: int
    captured: int
    replayed: int
    copied: int
    pool_bytes: int
    buffer_bytes: int
