"""The CUDA graph support of attention backends, and the modes that it allows."""

from __future__ import annotations

import enum

from graphpass.checks import positive
from graphpass.modes import CUDAGraphMode

__all__ = ["AttentionSupport", "resolve_mode"]


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
