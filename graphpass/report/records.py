"""Records of what was compiled and captured: callables with their regions and sizes, and the use of their graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field

from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import PaddingFinding, Reason, Row


@dataclass(frozen=True, slots=True)
class CompileSeconds:
    """Seconds that the backend spent on one graph, by phase."""

    partition: float = 0.0  #: splitting the graph and generating the stitched code
    key: float = 0.0  #: structural keys of the regions
    compile: float = 0.0  #: the compiler, over the distinct regions
    proof: float = 0.0  #: the proof of what may be padded


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """One region of a callable."""

    name: str  #: ``r0``, ``r1``, ... in program order
    kind: str  #: ``captured`` or ``eager``
    num_ops: int  #: number of nodes in its graph
    reasons: tuple[Reason, ...] = ()  #: why it is eager; empty if it is captured
    like: str = ""  #: the first region of the callable with the same compiled artifact, which may be itself

    @property
    def why(self) -> str:
        """The reasons as one line."""
        return "; ".join(dict.fromkeys(reason.why for reason in self.reasons))


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """One size that distinguishes the calls of a callable."""

    field: str  #: its key field: the name in ``dynamic_dims``, or the place where it is read, as ``input_ids[0]``
    symbol: str  #: its symbol in the graph
    traced: int  #: its value in the traced call
    least: int | None  #: the least value that the graph admits; None for any
    greatest: int | None  #: the greatest value that the graph admits; None for any
    is_padded: bool  #: whether calls are padded along it
    #: ``proved``: padded as it is; ``made``: padded after changes to the graph; ``unproved``; None if no candidate, as
    #: of a parameter
    verdict: str | None = None
    causes: tuple[PaddingFinding, ...] = ()  #: why it is not proved
    remedy: str = ""  #: what makes it padded; empty if there is nothing to do
    made: tuple[PaddingFinding, ...] = ()  #: what the graph does to its padding, with the bytes of the traced call


@dataclass(frozen=True, slots=True)
class CallableRecord:
    """One callable that a compiler registered, for reports."""

    name: str  #: ``g0``, ``g1``, ... in the order of compilation
    regions: tuple[RegionRecord, ...]  #: its regions, in program order
    artifacts: int  #: artifacts compiled for it; those shared with an earlier callable count there
    frame: int | None = None  #: id of the Python frame it was compiled for; recompiles of a function share it
    ends: Reason | None = None  #: why the graph ends before the model does (a graph break); None if it does not
    seconds: CompileSeconds = CompileSeconds()  #: compile time by phase
    admits: Callable[[BatchDescriptor], bool] | None = None  #: whether its guards admit a key; None without key fields
    sizes: tuple[SizeRecord, ...] = ()  #: the sizes that distinguish its calls, if it chooses graphs itself
    assumptions: tuple[str, ...] = ()  #: the conditions under which its sizes may be padded
    mode: CUDAGraphMode | None = None  #: FULL or PIECEWISE; NONE if never captured; None if it does not choose
    off: Reason | None = None  #: why it is never captured; None if it may be
    is_loaded: bool = False  #: whether it was loaded from the directory of ``warm_start``


@dataclass(frozen=True, slots=True)
class RegionId:
    """The name of a region of a callable (``g0.r3``) or of a whole callable (``g0.full``)."""

    callable: str  #: the callable's name; or the whole name of a wrapper that belongs to no callable
    region: str = ""  #: the region's name, ``full`` for the whole; empty for a wrapper that belongs to no callable

    def __str__(self) -> str:
        return f"{self.callable}.{self.region}" if self.region else self.callable


WARM_START, LOADED = "warm_start", "loaded"
"""The subject and the event of reading what was saved."""
TUNED, UNTUNED = "tuned", "untuned"
"""Event of a region that was tuned; its keys are (range of sizes, settings), and settings that are ``UNTUNED``.

Of a row ``least_s`` is the device's seconds of a replay, and ``n`` is 1 for the settings that were kept; ``seconds`` of
the untuned row is the time that the tuning took.
"""


@dataclass(frozen=True, slots=True)
class TunedRange:
    """What tuning chose for a region at a range of sizes."""

    region: str  #: the first region of its structure, as ``g0.r3``
    sizes: str  #: the range of each size that varies, as ``2 to 8``; empty if none varies
    settings: str  #: the settings of the fastest variant, as ``coordinate_descent_tuning + combo_kernels``; or untuned
    untuned_s: float  #: seconds that a replay of the untuned region takes, on the device
    tuned_s: float  #: the same with ``settings``
    tuning_s: float  #: seconds that the tuning took

    @property
    def gain(self) -> float:
        """The share of a replay's time that tuning saves, 0 to 1."""
        return 1 - self.tuned_s / self.untuned_s if self.untuned_s else 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one region at one key so far."""

    warmed: int  #: warm-up runs before a capture
    captured: int  #: graphs captured, one for each set of static inputs and alias pattern
    replayed: int  #: replays, including the replay of the call that captures
    copied: int  #: inputs copied into static buffers
    static_sets: int  #: sets of static inputs that have a graph now


@dataclass(frozen=True, slots=True)
class RegionUse:
    """Use and cost of the graphs of one region at one key."""

    region: RegionId  #: the region
    mode: CUDAGraphMode  #: FULL or PIECEWISE
    key: BatchDescriptor  #: the padded shape
    counts: Counts  #: its counts
    #: Its captures: their seconds, warm-ups included; ``least_s`` are the host seconds of launching each kernel, the
    #: least of its warm-ups and recordings. A warm-up may load kernels and plan them; a recording finds them ready.
    captured: Row
    replayed: Row  #: its replays; ``least_s`` is of those that followed a capture


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Totals over all callables of a runtime."""

    callables: int  #: graphs that Dynamo handed over
    artifacts: int  #: compiled artifacts
    captured: int  #: graphs captured so far
    replayed: int  #: replays so far
    copied: int  #: inputs copied into static buffers so far
    pool_bytes: int  #: bytes of the graph pool, 0 on the CPU tape
    buffer_bytes: int  #: bytes of static input buffers
    #: {key field: {size: number of calls}}. :func:`graphpass.plan_sizes` computes capture sizes from one.
    histograms: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """Growth of the device's memory, in bytes; or what is in use, the growth from nothing."""

    pool_bytes: int = 0  #: growth of the graph pool
    cached_bytes: int = 0  #: growth of torch's allocator outside the pool
    driver_bytes: int = 0  #: growth outside the allocator: executables and kernels, or other processes

    @property
    def total_bytes(self) -> int:
        """Growth of pool, cached and driver memory together."""
        return self.pool_bytes + self.cached_bytes + self.driver_bytes

    def __sub__(self, other: MemoryGrowth) -> MemoryGrowth:
        return MemoryGrowth(*map(operator.sub, astuple(self), astuple(other)))

    @classmethod
    def sum_of(cls, growths: Iterable[MemoryGrowth]) -> MemoryGrowth:
        """The sum, for each kind of memory."""
        return cls(*map(sum, zip((0, 0, 0), *map(astuple, growths), strict=True)))


@dataclass(frozen=True, slots=True)
class CapturedGroup:
    """Time and memory of the captures of one group of keys."""

    name: str  #: ``mixed PIECEWISE``, ``mixed FULL`` or ``decode FULL``; ``encoder``
    num_keys: int  #: number of captured keys
    seconds: float  #: total duration of their captures
    memory: MemoryGrowth  #: total device memory that their captures allocated
