"""Records of compiled callables: regions with reasons, sizes with what prevents their padding, compile times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode

__all__ = ["CallableRecord", "CompileSeconds", "PaddingCause", "RegionRecord", "SizeRecord"]


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
class RegionRecord:
    """One region of a callable.

    Attributes:
        name: ``r0``, ``r1``, ... in program order.
        kind: ``captured`` or ``eager``.
        num_ops: number of nodes in its graph.
        reasons: why it is eager; empty if it is captured.
        like: the first region of the callable with the same compiled artifact; its own name if there is none before it.
    """

    name: str
    kind: str
    num_ops: int
    reasons: tuple[Reason, ...] = ()
    like: str = ""

    @property
    def why(self) -> str:
        """The reasons as one line."""
        return "; ".join(dict.fromkeys(reason.why for reason in self.reasons))


@dataclass(frozen=True, slots=True)
class PaddingCause:
    """A way in which real entries depend on the padding of a size.

    Attributes:
        target: the output, written input or effect that depends on it: ``output 0``; empty for values inside a graph.
        op: the operator that makes it depend, ``aten.mean.dim``.
        why: the operator's effect.
        where: the line of the user's code, as ``model.py:12: x.mean(1)``; empty if unknown.
        verdict: ``runtime`` if the contents of a call decide, else ``unproved``.
    """

    target: str
    op: str
    why: str
    where: str = ""
    verdict: str = "unproved"

    @property
    def through(self) -> str:
        """The operator with its effect and its line."""
        return f"{self.op} ({self.why})" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """One size that distinguishes the calls of a callable.

    Attributes:
        field: its key field: the name in ``dynamic_dims``, or the place where it is read, as ``input_ids[0]``.
        symbol: its symbol in the graph.
        traced: its value in the traced call.
        least: the least value that the graph admits; None for any.
        greatest: the greatest value that the graph admits; None for any.
        is_padded: whether calls are padded along it.
        verdict: ``proved``, ``runtime`` or ``unproved``; None if it is no candidate, as a size of a parameter.
        causes: why it is not proved.
        remedy: what the user can do so that it is padded, or padded with a check; empty if there is nothing to do.
    """

    field: str
    symbol: str
    traced: int
    least: int | None
    greatest: int | None
    is_padded: bool
    verdict: str | None = None
    causes: tuple[PaddingCause, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CallableRecord:
    """One callable that a compiler registered, for reports.

    Attributes:
        name: ``g0``, ``g1``, ... in the order of compilation.
        regions: its regions, in program order.
        artifacts: number of artifacts compiled for it; those shared with an earlier callable count there.
        frame: id of the Python frame it was compiled for; recompiles of one function share it.
        ends: why the graph ends before the model does (a graph break); None if it does not.
        seconds: compile time by phase.
        admits: whether the guards of the callable admit a key's sizes; None if its sizes are not key fields.
        sizes: the sizes that distinguish its calls, if it chooses graphs itself.
        assumptions: the conditions under which its sizes may be padded.
        mode: FULL if it is captured whole, PIECEWISE if region by region, NONE if never; None if it does not choose.
        off: why it is never captured; None if it may be.
    """

    name: str
    regions: tuple[RegionRecord, ...]
    artifacts: int
    frame: int | None = None
    ends: Reason | None = None
    seconds: CompileSeconds = CompileSeconds()
    admits: Callable[[BatchDescriptor], bool] | None = None
    sizes: tuple[SizeRecord, ...] = ()
    assumptions: tuple[str, ...] = ()
    mode: CUDAGraphMode | None = None
    off: Reason | None = None
