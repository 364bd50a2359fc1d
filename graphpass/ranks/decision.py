"""The common decision of data-parallel ranks, computed from the batches of all ranks.

Ranks whose model has collectives inside must all run the same graph at the same padded size, or all run eagerly. Each
rank sends one row of integers, and each rank computes the same decision from the same rows: the maximum of the sizes,
the minimum of the modes, and uniform decode only if every batch is uniform. Nothing but the rows enters the decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.keys import Dispatch, DispatchReason
from graphpass.dispatch.sizes import Extra
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["BATCH_WIDTH", "MAX_FIELDS", "AgreedStep", "RankBatch", "agree", "extras_of"]

MAX_FIELDS = 8
"""All rows have the same length, for any number of fields, so that differently configured ranks can be reported."""
BATCH_WIDTH = 8 + MAX_FIELDS

_NO_BATCH = BatchDescriptor(0)
_REASONS = tuple(DispatchReason)
_UNKNOWN_EXTRA = -1


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The batch of one rank in a step.

    Attributes:
        has_work: whether there is a batch; if not, all other attributes are meaningless.
        mode, reason: the decision of this rank alone.
        num_tokens: number of real tokens.
        num_reqs: number of requests; None if the rank does not specify it.
        uniform: whether it is a uniform decode batch.
        num_active_loras: number of LoRA adapters in use.
        extra: index of the batch's ``extra`` in :func:`extras_of` the dispatcher; -1 if no key has it.
        sizes: the real size of each capture field.
    """

    has_work: bool = False
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    reason: DispatchReason = DispatchReason.EMPTY
    num_tokens: int = 0
    num_reqs: int | None = None
    uniform: bool = False
    num_active_loras: int = 0
    extra: int = 0
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, own: Dispatch, request: Mapping[str, Any], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]
    ) -> RankBatch:
        """The batch of a request, for which ``dispatcher.dispatch(**request)`` returned ``own``."""
        if own.reason is DispatchReason.EMPTY:
            return cls()
        num_reqs = request.get("num_reqs")
        fields, rest = dispatcher.read(request["num_tokens"], num_reqs=num_reqs, extra=request.get("extra", ()))
        return cls(
            has_work=True,
            mode=own.mode,
            reason=own.reason,
            num_tokens=request["num_tokens"],
            num_reqs=num_reqs,
            uniform=request.get("uniform_decode", False),
            num_active_loras=request.get("num_active_loras", 0),
            extra=extras.index(rest) if rest in extras else _UNKNOWN_EXTRA,
            sizes=tuple(fields.values()),
        )

    def to_row(self) -> list[int]:
        """The batch as :data:`BATCH_WIDTH` integers."""
        row = [
            int(self.has_work),
            int(self.mode.value),
            _REASONS.index(self.reason),
            self.num_tokens,
            -1 if self.num_reqs is None else self.num_reqs,
            int(self.uniform),
            self.num_active_loras,
            self.extra,
            *self.sizes,
        ]
        return [*map(int, row), *[0] * (BATCH_WIDTH - len(row))]

    @classmethod
    def from_row(cls, row: Sequence[int], num_fields: int) -> RankBatch:
        """The batch of a row of :meth:`to_row`.

        Args:
            row: the integers.
            num_fields: number of capture fields of the dispatcher.
        """
        if not row[0]:
            return cls()
        _, mode, reason, num_tokens, num_reqs, uniform, adapters, extra, *sizes = row
        return cls(
            has_work=True,
            mode=CUDAGraphMode(mode),
            reason=_REASONS[reason],
            num_tokens=num_tokens,
            num_reqs=None if num_reqs < 0 else num_reqs,
            uniform=bool(uniform),
            num_active_loras=adapters,
            extra=extra,
            sizes=tuple(sizes[:num_fields]),
        )


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """The step that all ranks run; equal on all ranks.

    Attributes:
        mode: mode of every rank.
        descriptor: key of every rank; None if ``mode`` is NONE.
        reason: reason of the decision; for NONE, why one rank or all ranks together have no graph.
        why: the reason as a sentence that names the rank.
        num_tokens_across_dp: tokens that each rank computes, padding included.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    reason: DispatchReason
    why: str
    num_tokens_across_dp: tuple[int, ...]

    @property
    def has_work(self) -> bool:
        """Whether some rank has a batch."""
        return self.reason is not DispatchReason.EMPTY

    def of_rank(self, rank: int, own: Dispatch, shape: BatchDescriptor) -> Dispatch:
        """The decision for one rank, with the reason AGREED unless it equals the rank's own decision.

        Args:
            rank: the rank.
            own: the decision of the rank alone.
            shape: the unpadded shape of its batch; ignored for an idle rank.
        """
        if not self.has_work or own.reason is DispatchReason.EMPTY:
            idle = BatchDescriptor(self.num_tokens_across_dp[rank])
            reason = DispatchReason.AGREED if self.has_work else DispatchReason.EMPTY
            return Dispatch(self.mode, self.descriptor or idle, reason)
        if own.mode is self.mode and own.descriptor == (self.descriptor or own.descriptor):
            return own
        return Dispatch(self.mode, self.descriptor or shape, DispatchReason.AGREED)


def extras_of(dispatcher: CudagraphDispatcher) -> tuple[Extra, ...]:
    """The distinct ``extra`` of all keys without size fields, in an order that depends only on the keys."""
    fields = set(dispatcher.capture_fields)
    distinct = {
        tuple(sorted((pair for pair in key.extra if pair[0] not in fields), key=lambda pair: pair[0]))
        for keys in dispatcher.keys.values()
        for key in keys
    }
    return ((), *sorted(distinct - {()}, key=repr))


def agree(
    batches: Sequence[RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra], *, idle_tokens: int
) -> AgreedStep:
    """Decide the step of all ranks.

    Args:
        batches: one for each rank, in the order of the ranks.
        dispatcher: a dispatcher in which only the keys that every rank has captured are marked as captured.
        extras: :func:`extras_of` the dispatcher.
        idle_tokens: tokens that a rank without work computes if no graph runs.
    """
    working = {rank: batch for rank, batch in enumerate(batches) if batch.has_work}
    if not working:
        return AgreedStep(CUDAGraphMode.NONE, None, DispatchReason.EMPTY, "no rank has work", (0,) * len(batches))
    step, why = _common(working, dispatcher, extras)
    if step.mode:
        tokens = (step.descriptor.num_tokens,) * len(batches)
        return AgreedStep(step.mode, step.descriptor, step.reason, why, tokens)
    tokens = tuple(batch.num_tokens if batch.has_work else idle_tokens for batch in batches)
    return AgreedStep(CUDAGraphMode.NONE, None, step.reason, why, tokens)


def _common(
    working: Mapping[int, RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]
) -> tuple[Dispatch, str]:
    """The decision for all ranks that have a batch, and its reason as a sentence."""
    lowest = min((batch.mode for batch in working.values()), key=lambda mode: int(mode.value))
    bounding = {rank: batch for rank, batch in working.items() if batch.mode is lowest}
    if not lowest:
        # Prefer a rank with another reason than DISABLED: the user knows that a mode is disabled.
        rank = min(bounding, key=lambda rank: (bounding[rank].reason is DispatchReason.DISABLED, rank))
        reason = bounding[rank].reason
        text = f"rank {rank} ({bounding[rank].num_tokens} tokens) has no graph, because {reason.explanation}"
        return Dispatch(lowest, _NO_BATCH, reason), text
    if len({batch.extra for batch in working.values()}) > 1:
        ranks = ", ".join(map(str, working))
        return Dispatch(CUDAGraphMode.NONE, _NO_BATCH, DispatchReason.NO_KEY), f"ranks {ranks} differ in their 'extra'"
    request = _together(list(working.values()), dispatcher, extras)
    allowed = {mode for mode in _runtime_modes() if int(mode.value) <= int(lowest.value)}
    step = dispatcher.dispatch(**request, allowed_modes=allowed)
    sizes = ", ".join(f"{name} {size}" for name, size in _sizes(working.values(), dispatcher).items())
    if not step.mode:
        return step, f"the ranks together ({sizes}) have no graph, because {step.reason.explanation}"
    rank, batch = next(iter(bounding.items()))
    kind = "uniform decode" if batch.uniform else "mixed"
    return step, f"rank {rank} ({batch.num_tokens} tokens, {kind}) can run at most {lowest}; common size: {sizes}"


def _together(batches: Sequence[RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]) -> dict[str, Any]:
    """The arguments of ``dispatcher.dispatch`` for a batch as large as the largest of ``batches`` in every field."""
    sizes = _sizes(batches, dispatcher)
    num_tokens = sizes["num_tokens"] if "num_tokens" in sizes else math.prod(sizes.values())
    # The maximum of each field may not be a whole number of requests, even if every batch is.
    uniform = all(batch.uniform for batch in batches) and num_tokens % dispatcher.uniform_decode_query_len == 0
    num_reqs = max((batch.num_reqs for batch in batches if batch.num_reqs is not None), default=None)
    fields = tuple((name, size) for name, size in sizes.items() if name not in ("num_tokens", "num_reqs"))
    return {
        "num_tokens": num_tokens,
        "num_reqs": sizes.get("num_reqs", num_reqs),
        "uniform_decode": uniform,
        "num_active_loras": max(batch.num_active_loras for batch in batches),
        "extra": (*fields, *extras[batches[0].extra]),
    }


def _sizes(batches: Iterable[RankBatch], dispatcher: CudagraphDispatcher) -> dict[str, int]:
    largest = map(max, zip(*(batch.sizes for batch in batches), strict=True))
    return dict(zip(dispatcher.capture_fields, largest, strict=True))


def _runtime_modes() -> list[CUDAGraphMode]:
    return [mode for mode in CUDAGraphMode if mode.is_valid_runtime_mode()]
