"""What an attention backend can capture, and the mode that this leaves."""

from __future__ import annotations

import enum

from graphpass.errors import OptionError
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
    """The largest mode within ``mode`` that attention and partitioning allow, and why, in one sentence.

    FULL for mixed batches needs ``ALWAYS``. FULL for uniform decode needs ``UNIFORM_SINGLE_TOKEN_DECODE`` for one
    token a request and ``UNIFORM_BATCH`` for more. What cannot run as FULL runs as PIECEWISE where the model is
    partitioned at its attention, and as NONE elsewhere.

    Args:
        mode: the mode asked for, or its name in any case.
        support: the least of the model's attention backends.
        query_len: tokens of one request in a uniform decode batch.
        piecewise: the model is partitioned, attention being outside the captured regions.

    Raises:
        OptionError: unknown mode, or a query length below 1.
    """
    asked = CUDAGraphMode.parse(mode)
    if query_len < 1:
        raise OptionError(
            "query_len cannot be used",
            expected="at least 1 token a request",
            found=str(query_len),
            remedy="pass 1, or 1 + the number of draft tokens",
        )
    decode_needs = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else AttentionSupport.UNIFORM_BATCH
    decode = _bounded(asked.decode_mode(), support >= decode_needs, piecewise)
    mixed = _bounded(asked.mixed_mode(), support >= AttentionSupport.ALWAYS, piecewise)
    # No mode pairs PIECEWISE for decode with NONE for mixed batches: mixed batches then take PIECEWISE as well.
    resolved = _PAIRS.get((decode, mixed), decode)
    return resolved, _reason(asked, resolved, support, decode_needs, query_len)


def _bounded(wanted: CUDAGraphMode, full_possible: bool, piecewise: bool) -> CUDAGraphMode:
    """The runtime mode of one kind of batch, given what its attention and the partition allow."""
    if wanted is CUDAGraphMode.NONE or (wanted is CUDAGraphMode.FULL and full_possible):
        return wanted
    return CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE


def _reason(
    asked: CUDAGraphMode,
    resolved: CUDAGraphMode,
    support: AttentionSupport,
    decode_needs: AttentionSupport,
    query_len: int,
) -> str:
    if resolved is asked:
        return f"{asked} is kept: attention support {support} allows it at query length {query_len}"
    limits = []
    if asked.decode_mode() is CUDAGraphMode.FULL and support < decode_needs:
        limits.append(f"FULL decode at query length {query_len} needs attention support {decode_needs}, not {support}")
    elif asked.mixed_mode() is CUDAGraphMode.FULL and support < AttentionSupport.ALWAYS:
        limits.append(f"FULL for mixed batches needs attention support {AttentionSupport.ALWAYS}, not {support}")
    if not resolved.requires_piecewise_compilation() and (limits or asked.requires_piecewise_compilation()):
        limits.append("PIECEWISE needs a partitioned model")
    return f"{asked} became {resolved}: {', and '.join(limits)}"
