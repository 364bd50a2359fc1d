"""Records about a runtime's callables, for reports and for whoever drives its captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphpass.keys import BatchDescriptor

__all__ = ["CallableRecord", "CaptureScope", "CompileSeconds", "EnteredCallable", "RuntimeStats"]


@dataclass(frozen=True, slots=True)
class CompileSeconds:
    """Where the seconds went that the backend spent on one graph.

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
        artifacts: artifacts compiled for it; what it shares with earlier callables is counted there.
        frame: which Python frame it was compiled for; recompiles of one function share it.
        reason: why the graph ends where it does (a graph break), or why it is never captured; None otherwise.
        seconds: what compiling it took.
        admits: whether it may serve a key, by the sizes that its guards admit; None where its sizes are no key fields.
        padding: (key field, verdict, why) of what may be padded; the field is empty where a row is about all of them.
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


@dataclass(slots=True)
class CaptureScope:
    """What was reached inside one ``with runtime.capturing():``.

    Attributes:
        reached: (callable, its flat arguments, its flat outputs), in the order of the calls.
        plans: the replay plan of each callable and key captured in the scope.
        keep_results: called with the flat outputs of each callable that is captured as a whole, while it is warmed up
            and recorded; the graph returns what it returns. Who wants results in memory of its own copies them there.
        prepare: called between the warm-up and the recording of each callable that is captured as a whole: what the
            model reads besides its arguments is as it was before the warm-up.
        stops_at_entry: callables raise :class:`EnteredCallable` instead of running: for whoever wants to know which
            callable a compiled call reaches, without its effects.
        reaches: a call without a forward context runs without graphs and enters ``reached``.
        is_automatic: the auto dispatcher opened the scope, for one call. A region whose capture fails then runs without
            a graph, and its error enters ``failures``.
        failures: the errors of captures that failed.
    """

    reached: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
    keep_results: Callable[[list[Any]], list[Any]] | None = None
    prepare: Callable[[], object] | None = None
    stops_at_entry: bool = False
    reaches: bool = False
    is_automatic: bool = False
    failures: list[Exception] = field(default_factory=list)


class EnteredCallable(Exception):  # noqa: N818 - control flow, like StopIteration
    """Control flow, no error: a callable was reached in a scope that stops at entry.

    Args:
        reached: the callable.
        args: its flat arguments.
    """

    def __init__(self, reached: Any, args: tuple[Any, ...]) -> None:
        super().__init__(reached, args)
        self.reached = reached
        self.args = args
