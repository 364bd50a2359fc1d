"""The common decision of data-parallel ranks, computed from the batches of all ranks.

Ranks whose model has collectives inside must all run the same graph at the same padded size, or all run eagerly. Each
computes the same decision from the rows of all ranks: the maximum of the sizes, the minimum of the modes, and uniform
decode only if every batch is uniform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.dispatchkeys import Dispatch, DispatchReason
from graphpass.dispatch.grid import Extra, without
from graphpass.keys import BatchDescriptor, CUDAGraphMode

MAX_FIELDS = 8
"""Rows have the same length for any number of fields, so that ranks can say that they differ."""
BATCH_WIDTH = 8 + MAX_FIELDS
REASONS = tuple(DispatchReason)

_NO_BATCH = BatchDescriptor(0)
_UNKNOWN_EXTRA = -1


class RankBatch(NamedTuple):
    """The batch of one rank, as the integers that ranks exchange."""

    has_work: int = 0  #: 1 if there is a batch
    mode: int = 0  #: value of the runtime mode that the rank alone would run
    reason: int = 0  #: index in :data:`REASONS` of the rank's own decision
    num_tokens: int = 0  #: real tokens
    num_reqs: int = -1  #: requests; -1 if the rank does not specify them
    uniform: int = 0  #: 1 for a uniform decode batch
    num_active_loras: int = 0  #: LoRA adapters in use
    extra: int = 0  #: index of the batch's ``extra`` in :func:`extras_of` the dispatcher; -1 if no key has it
    sizes: tuple[int, ...] = ()  #: the real size of each capture field

    @classmethod
    def of(
        cls, own: Dispatch, request: Mapping[str, Any], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]
    ) -> RankBatch:
        """The batch of a request, whose own decision is ``own``."""
        if own.reason is DispatchReason.EMPTY:
            return cls()
        num_reqs = request.get("num_reqs")
        fields, rest = dispatcher.read(request["num_tokens"], num_reqs=num_reqs, extra=request.get("extra", ()))
        return cls(
            has_work=1,
            mode=int(own.mode.value),
            reason=REASONS.index(own.reason),
            num_tokens=int(request["num_tokens"]),
            num_reqs=-1 if num_reqs is None else int(num_reqs),
            uniform=int(request.get("uniform_decode", False)),
            num_active_loras=int(request.get("num_active_loras", 0)),
            extra=extras.index(rest) if rest in extras else _UNKNOWN_EXTRA,
            sizes=tuple(map(int, fields.values())),
        )

    @classmethod
    def from_row(cls, row: Sequence[int], num_fields: int) -> RankBatch:
        """The batch of a row, see :meth:`to_row`."""
        return cls._make((*row[:8], tuple(row[8 : 8 + num_fields]))) if row[0] else cls()

    def to_row(self) -> list[int]:
        """At most :data:`BATCH_WIDTH` integers."""
        return [*self[:-1], *self.sizes]


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """The step that all ranks run; equal on all ranks."""

    mode: CUDAGraphMode  #: mode of every rank
    descriptor: BatchDescriptor | None  #: key of every rank; None if ``mode`` is NONE
    reason: DispatchReason  #: for NONE, why one rank or all ranks together have no graph
    why: str  #: the reason as a sentence that names the rank
    num_tokens_across_dp: tuple[int, ...]  #: tokens that each rank computes, padding included

    @property
    def has_work(self) -> bool:
        """Whether some rank has a batch."""
        return self.reason is not DispatchReason.EMPTY

    def of_rank(self, rank: int, own: Dispatch, shape: BatchDescriptor) -> Dispatch:
        """The decision for one rank, AGREED unless it is its ``own``; ``shape`` is that of its batch."""
        if not self.has_work or own.reason is DispatchReason.EMPTY:
            idle = BatchDescriptor(self.num_tokens_across_dp[rank])
            reason = DispatchReason.AGREED if self.has_work else DispatchReason.EMPTY
            return Dispatch(self.mode, self.descriptor or idle, reason)
        if own.mode is self.mode and own.descriptor == (self.descriptor or own.descriptor):
            return own
        return Dispatch(self.mode, self.descriptor or shape, DispatchReason.AGREED)


def extras_of(dispatcher: CudagraphDispatcher) -> tuple[Extra, ...]:
    """The distinct ``extra`` of all keys without size fields, in an order."""
    distinct = {without(dispatcher.capture_fields, key.extra) for keys in dispatcher.keys.values() for key in keys}
    return ((), *sorted(distinct - {()}, key=repr))


def agree(
    batches: Sequence[RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra], *, idle_tokens: int
) -> AgreedStep:
    """Decide the step of all ranks, from the batch of each.

    ``dispatcher`` has the keys that every rank has captured, and a rank without work computes ``idle_tokens`` if no
    graph runs.
    """
    working = {rank: batch for rank, batch in enumerate(batches) if batch.has_work}
    if not working:
        return AgreedStep(CUDAGraphMode.NONE, None, DispatchReason.EMPTY, "no rank has work", (0,) * len(batches))
    step, why = _common(working, dispatcher, extras)
    tokens = tuple(batch.num_tokens if batch.has_work else idle_tokens for batch in batches)
    if step.mode:
        tokens = (step.descriptor.num_tokens,) * len(batches)
    return AgreedStep(step.mode, step.descriptor if step.mode else None, step.reason, why, tokens)


def _common(
    working: Mapping[int, RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]
) -> tuple[Dispatch, str]:
    """The decision for ranks with a batch, and its reason as a sentence."""
    lowest = min(batch.mode for batch in working.values())
    bounding = {rank: batch for rank, batch in working.items() if batch.mode == lowest}
    if not lowest:
        # Prefer a rank with another reason than DISABLED: the user knows that a mode is disabled.
        rank = min(bounding, key=lambda rank: (REASONS[bounding[rank].reason] is DispatchReason.DISABLED, rank))
        reason = REASONS[bounding[rank].reason]
        text = f"rank {rank} ({bounding[rank].num_tokens} tokens) has no graph, because {reason.explanation}"
        return Dispatch(CUDAGraphMode.NONE, _NO_BATCH, reason), text
    if len({batch.extra for batch in working.values()}) > 1:
        ranks = ", ".join(map(str, working))
        return Dispatch(CUDAGraphMode.NONE, _NO_BATCH, DispatchReason.NO_KEY), f"ranks {ranks} differ in their 'extra'"
    largest = map(max, zip(*(batch.sizes for batch in working.values()), strict=True))
    sizes = dict(zip(dispatcher.capture_fields, largest, strict=True))
    request = _together(list(working.values()), sizes, dispatcher.uniform_decode_query_len, extras)
    step = dispatcher.dispatch(**request, allowed_modes={CUDAGraphMode(value) for value in range(lowest + 1)})
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if not step.mode:
        return step, f"the ranks together ({text}) have no graph, because {step.reason.explanation}"
    rank, batch = next(iter(bounding.items()))
    kind = "uniform decode" if batch.uniform else "mixed"
    most = CUDAGraphMode(lowest)
    return step, f"rank {rank} ({batch.num_tokens} tokens, {kind}) can run at most {most}; common size: {text}"


def _together(
    batches: Sequence[RankBatch], sizes: Mapping[str, int], query_len: int, extras: Sequence[Extra]
) -> dict[str, Any]:
    """The arguments of ``dispatcher.dispatch`` for a batch as large as the largest in every field."""
    num_tokens = sizes["num_tokens"] if "num_tokens" in sizes else math.prod(sizes.values())
    num_reqs = max(batch.num_reqs for batch in batches)
    fields = tuple((name, size) for name, size in sizes.items() if name not in ("num_tokens", "num_reqs"))
    return {
        "num_tokens": num_tokens,
        "num_reqs": sizes.get("num_reqs", None if num_reqs < 0 else num_reqs),
        # The maximum of each field may not be a whole number of requests, even if every batch is.
        "uniform_decode": all(batch.uniform for batch in batches) and num_tokens % query_len == 0,
        "num_active_loras": max(batch.num_active_loras for batch in batches),
        "extra": (*fields, *extras[batches[0].extra]),
    }
