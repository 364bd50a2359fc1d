"""Data-parallel ranks that agree, in one collective a step, on what all of them run.

A model with collectives inside (expert parallelism) hangs as soon as one rank replays another graph than the others, or
none, or has no batch and stays away. So before each step every rank tells the others what it brings, in one small
all-gather on the CPU, and all of them decide from the same rows.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.dispatch.dispatcher import CudagraphDispatcher, Dispatch, DispatchReason
from graphpass.errors import AgreementError, OptionError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.ranks.decision import BATCH_WIDTH, MAX_FIELDS, AgreedStep, RankBatch, agree, extras_of
from graphpass.ranks.failures import FailureTexts, RankRows
from graphpass.ranks.group import DataParallelAgreement

__all__ = ["IDLE_TOKENS", "AgreedSteps", "RankDecision"]

_ROW_WIDTH = 2 + BATCH_WIDTH
_FAILURE = FailureTexts("gave this step up", "a step, or a capture, on every rank", "the next step")
IDLE_TOKENS = 2
"""Tokens of a rank without a batch, where there is no graph: a step of one token is compiled separately."""
_SHOWN = 200
"""Characters of a difference between ranks that an error shows."""


class _Says(enum.IntEnum):
    """What a row is about."""

    STEP = 1
    CAPTURE = 2


@dataclass(frozen=True, slots=True)
class RankDecision:
    """What this rank runs in a step that all ranks agreed on.

    Attributes:
        step: its mode, its descriptor, and why.
        agreed: what all ranks run.
        has_batch: this rank has one of its own.
        is_lower: its batch would have had a larger mode alone.
    """

    step: Dispatch
    agreed: AgreedStep
    has_batch: bool
    is_lower: bool


class AgreedSteps:
    """The steps of one manager under an agreement: what this rank brings, and what it then runs.

    Args:
        agreement: the ranks.
        dispatcher: the manager's.
        configuration: what has to be the same on all ranks besides the dispatcher's keys, by name.
        idle_tokens: tokens of the batch that a rank without work runs where there is no graph.

    Raises:
        OptionError: the dispatcher is lazy, or has more fields than a row can tell.
    """

    def __init__(
        self,
        agreement: DataParallelAgreement,
        dispatcher: CudagraphDispatcher,
        configuration: Mapping[str, str],
        *,
        idle_tokens: int,
    ) -> None:
        if dispatcher.is_lazy or len(dispatcher.capture_fields) > MAX_FIELDS:
            raise OptionError(
                "ranks cannot agree over this dispatcher",
                expected=f"lazy=False, since captures in a step would part the ranks, and at most {MAX_FIELDS} fields",
                found=f"lazy={dispatcher.is_lazy}, fields {', '.join(dispatcher.capture_fields)}",
                remedy="make it with lazy=False and call capture() on every rank",
            )
        self._agreement, self._dispatcher = agreement, dispatcher
        self._rows = RankRows(agreement, _ROW_WIDTH, _FAILURE)
        self._configuration = dict(configuration)
        self._idle_tokens = idle_tokens
        self._common = dispatcher
        self._settled: tuple[int, ...] = ()
        self._revision = -1
        self._refresh()

    # -- steps --------------------------------------------------------------------------------------------------------

    def decide(self, propose: Callable[[], Mapping[str, Any] | None]) -> RankDecision:
        """One step's decision: one collective, and two more after what is captured has come to differ between ranks.

        Args:
            propose: checks this rank's batch and says what its dispatcher is asked; None for no batch. What it raises
                is told to the other ranks, so that they do not wait for this one, and raised.

        Raises:
            AgreementError: another rank failed, is gone, or is configured differently. Nothing has run then.
        """
        with self._rows.failures_told():
            asked = propose()
            own, shape = self._own(asked)
            self._refresh()
            batch = RankBatch() if asked is None else RankBatch.of(own, asked, self._dispatcher, self._extras)
        rows = self._exchange(_Says.STEP, batch.to_row())
        num_fields = len(self._dispatcher.capture_fields)
        batches = [RankBatch.from_row(row, num_fields) for row in rows]
        agreed = agree(batches, self._common, self._extras, idle_tokens=self._idle_tokens)
        is_lower = batch.has_work and int(agreed.mode.value) < int(own.mode.value)
        return RankDecision(agreed.of_rank(self._agreement.rank, own, shape), agreed, batch.has_work, is_lower)

    def _own(self, asked: Mapping[str, Any] | None) -> tuple[Dispatch, BatchDescriptor]:
        """What this rank would run alone, and the unpadded shape of its batch."""
        empty = Dispatch(CUDAGraphMode.NONE, BatchDescriptor(0), DispatchReason.EMPTY)
        own = empty if asked is None else self._dispatcher.dispatch(**asked)
        if asked is None or not own.mode:
            return own, own.descriptor
        return own, self._dispatcher.dispatch(**asked, allowed_modes=[CUDAGraphMode.NONE]).descriptor

    # -- captures -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures of all ranks, in the same order: one that fails ends them everywhere."""
        with self._rows.failures_told():
            yield
        self.stops(False, 0)

    def stops(self, wants_to: bool, num_left: int) -> bool:
        """Whether some rank wants to capture no more: then none does. Asked before each key.

        Args:
            wants_to: this rank does.
            num_left: keys that it has not captured.

        Raises:
            AgreementError: the ranks are at different keys, or one failed.
        """
        self._refresh()
        rows = self._exchange(_Says.CAPTURE, [int(wants_to), num_left])
        left = [row[1] for row in rows]
        if len(set(left)) > 1:
            raise AgreementError(
                "the ranks capture different keys",
                expected="the same number of keys without a graph on each",
                found=", ".join(f"{number} on rank {rank}" for rank, number in enumerate(left)),
                remedy="call recapture() on every rank",
            )
        return any(row[0] for row in rows)

    # -- what the ranks tell each other -------------------------------------------------------------------------------

    def _exchange(self, says: _Says, content: Sequence[int]) -> list[list[int]]:
        """What all ranks say about the same thing, without the head of the rows.

        Raises:
            AgreementError: a rank failed, or is at something else, or is configured differently.
        """
        rows = self._rows.exchange([says, self._fingerprint, *content])
        doing = [_Says(row[0]) for row in rows]
        if len(set(doing)) > 1:
            raise AgreementError(
                "the ranks are at different things",
                expected="run() or run_idle() on every rank, or capture() on every rank",
                found=", ".join(f"{what.name.lower()} on rank {rank}" for rank, what in enumerate(doing)),
                remedy="call the same on all ranks, in the same order",
            )
        self._settle(tuple(row[1] for row in rows))
        return [row[2:] for row in rows]

    def _refresh(self) -> None:
        """Follow what happened to the dispatcher's keys."""
        if self._revision == self._dispatcher.revision:
            return
        self._told = {**{name: (text,) for name, text in self._configuration.items()}, **_keys_of(self._dispatcher)}
        self._captured = frozenset(_captured_keys(self._dispatcher))
        text = repr((sorted(self._told.items()), sorted(_name_of(key) for key in self._captured)))
        self._fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        self._extras = extras_of(self._dispatcher)
        self._revision = self._dispatcher.revision

    def _settle(self, fingerprints: tuple[int, ...]) -> None:
        """Know which keys all ranks have captured. What was settled last is the same on all ranks, as these are.

        Raises:
            AgreementError: ranks are configured differently.
        """
        if fingerprints == self._settled:
            return
        captured = self._captured
        if len(set(fingerprints)) > 1:
            told = self._agreement.exchange_objects((self._told, self._captured))
            _refuse_differences([configuration for configuration, _ in told])
            captured = frozenset.intersection(*(keys for _, keys in told))
        self._common = self._dispatcher.with_captured(captured)
        self._settled = fingerprints


def _captured_keys(dispatcher: CudagraphDispatcher) -> Iterator[tuple[CUDAGraphMode, BatchDescriptor]]:
    for mode, keys in dispatcher.keys.items():
        yield from ((mode, key) for key in keys if dispatcher.is_captured(mode, key))


def _name_of(key: tuple[CUDAGraphMode, BatchDescriptor]) -> str:
    return f"{key[0]} {key[1]}"


def _keys_of(dispatcher: CudagraphDispatcher) -> dict[str, tuple[str, ...]]:
    """What of a dispatcher makes its decisions."""
    return {
        "mode": (str(dispatcher.mode),),
        "fields": dispatcher.capture_fields,
        "uniform_decode_query_len": (str(dispatcher.uniform_decode_query_len),),
        "keys": tuple(sorted(_name_of((mode, key)) for mode, keys in dispatcher.keys.items() for key in keys)),
    }


def _refuse_differences(told: Sequence[Mapping[str, tuple[str, ...]]]) -> None:
    """Refuse ranks that would decide differently, naming the first thing in which two of them differ."""
    for name in sorted({name for of_rank in told for name in of_rank}):
        values = [set(of_rank.get(name, ())) for of_rank in told]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is None:
            continue
        pairs = ((values[0], values[other]), (values[other], values[0]))
        only = [", ".join(sorted(one - another))[:_SHOWN] for one, another in pairs]
        raise AgreementError(
            f"the ranks are configured differently: {name}",
            expected="the same keys and options on every rank",
            found=f"only on rank 0: {only[0] or 'nothing'}; only on rank {other}: {only[1] or 'nothing'}",
            remedy="make the manager of every rank with the same arguments",
        )
