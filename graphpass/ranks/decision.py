"""One decision for all data-parallel ranks, from what each of them brings to a step.

Ranks whose model holds collectives have to run the same graph, or none, at the same padded size. Each rank tells the
others one row of integers, and each makes the same decision out of the same rows: the maximum of the sizes, the minimum
of the modes, uniform where every rank is. No rank is asked twice, and none has a say that the rows do not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.dispatch.decision import Dispatch, DispatchReason
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.grid import Extra
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["BATCH_WIDTH", "MAX_FIELDS", "AgreedStep", "RankBatch", "agree", "extras_of"]

MAX_FIELDS = 8
"""Rows have one length whatever the ladders: a rank that is configured differently has to be heard, not cut off."""
BATCH_WIDTH = 8 + MAX_FIELDS

_NO_BATCH = BatchDescriptor(0)
_REASONS = tuple(DispatchReason)
_UNKNOWN_EXTRA = -1


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank brings to a step.

    Attributes:
        has_work: there is a batch; everything else says nothing where there is none.
        mode, reason: the rank's own decision.
        num_tokens: real tokens.
        num_reqs: requests, None where the rank does not care.
        uniform: a uniform decode batch.
        num_active_loras: adapters in use.
        extra: position among :func:`extras_of` the dispatcher; -1 where no key has such an ``extra``.
        sizes: of each capture field.
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
        cls, own: Dispatch, asked: Mapping[str, Any], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]
    ) -> RankBatch:
        """The batch that ``dispatcher.dispatch(**asked)`` decided as ``own``."""
        if own.reason is DispatchReason.EMPTY:
            return cls()
        num_reqs = asked.get("num_reqs")
        fields, rest = dispatcher.read(asked["num_tokens"], num_reqs=num_reqs, extra=asked.get("extra", ()))
        return cls(
            has_work=True,
            mode=own.mode,
            reason=own.reason,
            num_tokens=asked["num_tokens"],
            num_reqs=num_reqs,
            uniform=asked.get("uniform_decode", False),
            num_active_loras=asked.get("num_active_loras", 0),
            extra=extras.index(rest) if rest in extras else _UNKNOWN_EXTRA,
            sizes=tuple(fields.values()),
        )

    def to_row(self) -> list[int]:
        """As integers, always :data:`BATCH_WIDTH` of them."""
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
        """Read :meth:`to_row` back."""
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
    """What all ranks run in one step; the same on each of them.

    Attributes:
        mode: of every rank.
        descriptor: the key of every rank; None with NONE.
        reason: why: with NONE, what kept a rank, or all of them together, from a graph.
        why: the same in a sentence that names the rank.
        num_tokens_across_dp: tokens that each rank computes: the padded size where there is a graph.
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
        """One rank's decision: its own, where the others change nothing, or AGREED.

        Args:
            rank: which.
            own: what it decided alone.
            shape: its unpadded shape; of an idle rank, any.
        """
        if not self.has_work or own.reason is DispatchReason.EMPTY:
            idle = BatchDescriptor(self.num_tokens_across_dp[rank])
            reason = DispatchReason.AGREED if self.has_work else DispatchReason.EMPTY
            return Dispatch(self.mode, self.descriptor or idle, reason)
        if own.mode is self.mode and own.descriptor == (self.descriptor or own.descriptor):
            return own
        return Dispatch(self.mode, self.descriptor or shape, DispatchReason.AGREED)


def extras_of(dispatcher: CudagraphDispatcher) -> tuple[Extra, ...]:
    """What keys say beside their sizes, in an order that all ranks with the same keys share."""
    fields = set(dispatcher.capture_fields)
    found = {
        tuple(sorted((pair for pair in key.extra if pair[0] not in fields), key=lambda pair: pair[0]))
        for keys in dispatcher.keys.values()
        for key in keys
    }
    return ((), *sorted(found - {()}, key=repr))


def agree(
    batches: Sequence[RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra], *, idle_tokens: int
) -> AgreedStep:
    """The step of all ranks.

    Args:
        batches: one for each rank, in the order of the ranks.
        dispatcher: with the keys that every rank has captured.
        extras: :func:`extras_of` it.
        idle_tokens: tokens that a rank without work computes where there is no graph.
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
    """One decision for the batches of all ranks that have one, and what made it."""
    lowest = min((batch.mode for batch in working.values()), key=lambda mode: int(mode.value))
    bounding = {rank: batch for rank, batch in working.items() if batch.mode is lowest}
    if not lowest:
        # What somebody may want to know comes first: that a mode is switched off is no surprise.
        rank = min(bounding, key=lambda rank: (bounding[rank].reason is DispatchReason.DISABLED, rank))
        reason = bounding[rank].reason
        text = f"rank {rank} ({bounding[rank].num_tokens} tokens) has no graph, since {reason.explanation}"
        return Dispatch(lowest, _NO_BATCH, reason), text
    if len({batch.extra for batch in working.values()}) > 1:
        ranks = ", ".join(map(str, working))
        return Dispatch(CUDAGraphMode.NONE, _NO_BATCH, DispatchReason.NO_KEY), f"ranks {ranks} differ in their extra"
    asked = _together(list(working.values()), dispatcher, extras)
    allowed = {mode for mode in _runtime_modes() if int(mode.value) <= int(lowest.value)}
    step = dispatcher.dispatch(**asked, allowed_modes=allowed)
    sizes = ", ".join(f"{name} {size}" for name, size in _sizes(working.values(), dispatcher).items())
    if not step.mode:
        return step, f"the ranks together ({sizes}) have no graph, since {step.reason.explanation}"
    rank, batch = next(iter(bounding.items()))
    kind = "uniform decode" if batch.uniform else "mixed"
    return step, f"rank {rank} ({batch.num_tokens} tokens, {kind}) can have {lowest} at most; all together {sizes}"


def _together(batches: Sequence[RankBatch], dispatcher: CudagraphDispatcher, extras: Sequence[Extra]) -> dict[str, Any]:
    """What a dispatcher is asked for a batch that holds each of these."""
    sizes = _sizes(batches, dispatcher)
    num_tokens = sizes["num_tokens"] if "num_tokens" in sizes else math.prod(sizes.values())
    # The largest of each field need not make whole requests, even where every rank has them.
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
