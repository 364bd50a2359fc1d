"""What names a captured graph: a runtime mode and a batch descriptor, which together are its key.

A mode is a runtime mode, or a pair of one for decode batches and one for mixed batches; attention bounds it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field, fields

from graphpass.errors import OptionError, positive


@dataclass(frozen=True, slots=True, eq=False)
class BatchDescriptor:
    """The padded shape that names one captured graph.

    Descriptors are dictionary keys on the hot path, so the constructor computes the hash once.
    """

    num_tokens: int  #: padded token count
    num_reqs: int | None = None  #: padded request count; None if the graph serves any count (PIECEWISE keys)
    uniform: bool = False  #: every request has the same query length
    has_lora: bool = False  #: some request uses an adapter
    num_active_loras: int = 0  #: number of active adapters for which the graph was captured
    #: pairs (name, value) for other fixed values of the graph, such as a sequence length; their order counts
    extra: tuple[tuple[str, Hashable], ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._fields()))

    def _fields(self) -> tuple[Hashable, ...]:
        return (self.num_tokens, self.num_reqs, self.uniform, self.has_lora, self.num_active_loras, self.extra)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, BatchDescriptor):
            return NotImplemented
        return self._hash == other._hash and self._fields() == other._fields()

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of strings differ between processes: unpickling must compute the hash again.
        return (BatchDescriptor, self._fields())

    def __str__(self) -> str:
        """Short text for reports: only the fields that differ from their defaults."""
        shown = [f"{self.num_tokens} tokens"]
        shown += [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.init and f.name not in ("num_tokens", "extra") and getattr(self, f.name) != f.default
        ]
        shown += [f"{name}={value}" for name, value in self.extra]
        return " ".join(shown)


class CUDAGraphMode(enum.Enum):
    """Which graphs a forward may replay: none, one for each region, or one for the whole model.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are runtime modes. ``FULL_DECODE_ONLY`` and ``FULL_AND_PIECEWISE`` are pairs
    (decode mode, mixed mode): uniform decode batches replay one full graph, mixed batches run ``NONE`` or
    ``PIECEWISE``. A forward context has a runtime mode, never a pair.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @classmethod
    def parse(cls, mode: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode with the name ``mode``, case-insensitive; a ``CUDAGraphMode`` is returned unchanged.

        Raises:
            OptionError: no mode has that name.
        """
        if isinstance(mode, cls):
            return mode
        if isinstance(mode, str) and mode.upper() in cls.__members__:
            return cls[mode.upper()]
        raise OptionError(
            "unknown mode",
            expected=f"one of {', '.join(cls.__members__)}",
            found=repr(mode),
            remedy="pass a CUDAGraphMode or its name",
        )

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of batches that are not uniform decode batches."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def is_valid_runtime_mode(self) -> bool:
        """Whether a forward context may have this mode: True for NONE, PIECEWISE and FULL."""
        return not isinstance(self.value, tuple)

    def separate_routine(self) -> bool:
        """Whether this mode is a pair, with separate modes for decode batches and mixed batches."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: CUDAGraphMode | str) -> bool:
        """Whether some batch runs in the runtime mode ``mode`` under this mode.

        Raises:
            OptionError: ``mode`` is a pair, not a runtime mode.
        """
        mode = CUDAGraphMode.parse(mode)
        if not mode.is_valid_runtime_mode():
            raise OptionError(
                "has_mode() asks for a runtime mode",
                expected="NONE, PIECEWISE or FULL",
                found=str(mode),
                remedy="ask for mode.decode_mode() and mode.mixed_mode() one by one",
            )
        return mode in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Whether some batch replays region by region, which requires that the model is partitioned."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The largest runtime mode that a batch can get (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def without_piecewise(self) -> CUDAGraphMode:
        """This mode for a model whose regions cannot be captured one by one: PIECEWISE becomes NONE, FULL stays."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return self

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name


class AttentionSupport(enum.IntEnum):
    """Which batches an attention backend can run inside a captured graph; each level includes those below it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    def __str__(self) -> str:
        return self.name


_PAIRS = {(mode.decode_mode(), mode.mixed_mode()): mode for mode in CUDAGraphMode}


def resolve_mode(
    mode: CUDAGraphMode | str, support: AttentionSupport, *, query_len: int, piecewise: bool
) -> tuple[CUDAGraphMode, str]:
    """The largest mode within ``mode`` that attention and partitioning allow, and the reason as one sentence.

    FULL for mixed batches needs ``ALWAYS``. FULL for uniform decode needs ``UNIFORM_SINGLE_TOKEN_DECODE`` for one token
    per request, and ``UNIFORM_BATCH`` for more. Batches that cannot run FULL run PIECEWISE if the model is partitioned
    at its attention, else NONE.

    Args:
        mode: the requested mode, or its name (case-insensitive).
        support: the lowest level among the model's attention backends.
        query_len: tokens per request in a uniform decode batch.
        piecewise: whether the model is partitioned, with attention outside the captured regions.

    Raises:
        OptionError: the mode is unknown, or the query length is below 1.
    """
    requested = CUDAGraphMode.parse(mode)
    query_len = positive(query_len, "query_len", remedy="pass 1, or 1 + the number of draft tokens")
    decode_needs = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else AttentionSupport.UNIFORM_BATCH
    decode = _bounded(requested.decode_mode(), support >= decode_needs, piecewise)
    mixed = _bounded(requested.mixed_mode(), support >= AttentionSupport.ALWAYS, piecewise)
    # No pair has PIECEWISE for decode and NONE for mixed batches: use PIECEWISE for mixed batches too.
    resolved = _PAIRS.get((decode, mixed), decode)
    return resolved, _reason(requested, resolved, support, decode_needs, query_len)


def _bounded(wanted: CUDAGraphMode, full_possible: bool, piecewise: bool) -> CUDAGraphMode:
    """The largest runtime mode up to ``wanted`` that attention and the partition allow for one kind of batch."""
    if wanted is CUDAGraphMode.NONE or (wanted is CUDAGraphMode.FULL and full_possible):
        return wanted
    return CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE


def _reason(
    requested: CUDAGraphMode,
    resolved: CUDAGraphMode,
    support: AttentionSupport,
    decode_needs: AttentionSupport,
    query_len: int,
) -> str:
    if resolved is requested:
        return f"{requested} is kept: attention support {support} allows it at query length {query_len}"
    limits = []
    if requested.decode_mode() is CUDAGraphMode.FULL and support < decode_needs:
        limits.append(f"FULL decode at query length {query_len} needs attention support {decode_needs}, not {support}")
    elif requested.mixed_mode() is CUDAGraphMode.FULL and support < AttentionSupport.ALWAYS:
        limits.append(f"FULL for mixed batches needs attention support {AttentionSupport.ALWAYS}, not {support}")
    if not resolved.requires_piecewise_compilation() and (limits or requested.requires_piecewise_compilation()):
        limits.append("PIECEWISE needs a partitioned model")
    return f"{requested} became {resolved}: {', and '.join(limits)}"
