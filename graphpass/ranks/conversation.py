"""Data-parallel ranks agree, in one collective per step, on the graph that all of them run.

A model with collectives inside (expert parallelism) hangs as soon as one rank replays another graph than the others,
runs eagerly, or skips a step. So before each step every rank sends the sizes of its batch to the others, in one small
all-gather on the CPU, and every rank decides from the same rows.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.dispatchkeys import Dispatch, DispatchReason
from graphpass.errors import AgreementError, OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ranks.decision import BATCH_WIDTH, MAX_FIELDS, AgreedStep, RankBatch, agree, extras_of
from graphpass.ranks.group import DataParallelAgreement, RankRows

IDLE_TOKENS = 2
"""Tokens of the dummy batch of a rank without work if no graph runs. One token would be compiled separately."""
_SHOWN = 200
"""Characters of a difference in an error."""
_SUBJECTS = ("capture", "step")
_CAPTURE, _STEP = range(2)
_Key = tuple[CUDAGraphMode, BatchDescriptor]


class RankDecision(NamedTuple):
    """The part of this rank in a step that all ranks agreed on."""

    step: Dispatch  #: mode, descriptor and reason for this rank
    agreed: AgreedStep  #: the step of all ranks
    has_batch: bool  #: False if this rank runs a dummy batch
    is_lower: bool  #: whether this rank alone would have run its batch in a larger mode


class AgreedSteps:
    """Decides the steps of one manager together with the managers of the other ranks.

    Besides the dispatcher's keys, the options in ``configuration`` must be equal on all ranks.
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
                expected=f"lazy=False, because a capture in a step of one rank would block the others, and at most "
                f"{MAX_FIELDS} fields",
                found=f"lazy={dispatcher.is_lazy}, fields {', '.join(dispatcher.capture_fields)}",
                remedy="create it with lazy=False and call capture() on every rank",
            )
        self._agreement, self._dispatcher = agreement, dispatcher
        self._rows = RankRows(agreement, 2 + BATCH_WIDTH, "failed in this step")
        self._configuration = dict(configuration)
        self._idle_tokens = idle_tokens
        self._common = dispatcher
        self._settled: tuple[int, ...] = ()
        self._revision = -1
        self._refresh()

    # -- steps --------------------------------------------------------------------------------------------------------

    def decide(self, propose: Callable[[], Mapping[str, Any] | None]) -> RankDecision:
        """Decide one step. Every rank calls it.

        ``propose`` checks this rank's batch and returns the arguments for ``dispatcher.dispatch``, or None without a
        batch. Its errors are sent to the other ranks and raised here.
        """
        with self._rows.sending_failures():
            request = propose()
            own, shape = self._own(request)
            self._refresh()
            batch = RankBatch() if request is None else RankBatch.of(own, request, self._dispatcher, self._extras)
        rows = self._exchange(_STEP, batch.to_row())
        num_fields = len(self._dispatcher.capture_fields)
        batches = [RankBatch.from_row(row, num_fields) for row in rows]
        agreed = agree(batches, self._common, self._extras, idle_tokens=self._idle_tokens)
        step, is_lower = agreed.of_rank(self._agreement.rank, own, shape), int(agreed.mode.value) < batch.mode
        return RankDecision(step, agreed, bool(batch.has_work), is_lower)

    def _own(self, request: Mapping[str, Any] | None) -> tuple[Dispatch, BatchDescriptor]:
        empty = Dispatch(CUDAGraphMode.NONE, BatchDescriptor(0), DispatchReason.EMPTY)
        own = empty if request is None else self._dispatcher.dispatch(**request)
        if request is None or not own.mode:
            return own, own.descriptor
        return own, self._dispatcher.dispatch(**request, allowed_modes=[CUDAGraphMode.NONE]).descriptor

    # -- captures -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Context for a capture on all ranks. A failure of one fails all."""
        with self._rows.sending_failures():
            yield
        self.stops(False, 0)

    def stops(self, wants_to: bool, num_left: int) -> bool:
        """Whether any rank wants to stop capturing. Every rank calls it before each key."""
        self._refresh()
        stopping, left, *_ = zip(*self._exchange(_CAPTURE, [int(wants_to), num_left]), strict=True)
        if len(set(left)) > 1:
            raise AgreementError(
                "the ranks capture different keys",
                expected="the same number of uncaptured keys on every rank",
                found=", ".join(f"{number} on rank {rank}" for rank, number in enumerate(left)),
                remedy="call recapture() on every rank",
            )
        return any(stopping)

    # -- messages between the ranks -----------------------------------------------------------------------------------

    def _exchange(self, subject: int, content: Sequence[int]) -> list[list[int]]:
        rows = self._rows.exchange([subject, self._fingerprint, *content])
        if any(row[0] != rows[0][0] for row in rows):
            raise AgreementError(
                "the ranks call different methods",
                expected="run() or run_idle() on every rank, or capture() on every rank",
                found=", ".join(f"{_SUBJECTS[row[0]]} on rank {rank}" for rank, row in enumerate(rows)),
                remedy="call the same methods on all ranks, in the same order",
            )
        self._settle(tuple(row[1] for row in rows))
        return [row[2:] for row in rows]

    def _refresh(self) -> None:
        """Compute the fingerprint again if the dispatcher's keys changed."""
        if self._revision == self._dispatcher.revision:
            return
        dispatcher = self._dispatcher
        keys: list[_Key] = [(mode, key) for mode, keys in dispatcher.keys.items() for key in keys]
        self._described = {
            **{name: (text,) for name, text in self._configuration.items()},
            "mode": (str(dispatcher.mode),),
            "fields": dispatcher.capture_fields,
            "uniform_decode_query_len": (str(dispatcher.uniform_decode_query_len),),
            "keys": tuple(sorted(f"{mode} {key}" for mode, key in keys)),
        }
        self._captured = frozenset(key for key in keys if dispatcher.is_captured(*key))
        text = repr((sorted(self._described.items()), sorted(f"{mode} {key}" for mode, key in self._captured)))
        self._fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        self._extras = extras_of(dispatcher)
        self._revision = dispatcher.revision

    def _settle(self, fingerprints: tuple[int, ...]) -> None:
        """Determine the keys that all ranks have captured, if a fingerprint has changed, which all know."""
        if fingerprints == self._settled:
            return
        captured = self._captured
        if len(set(fingerprints)) > 1:
            of_ranks = self._agreement.exchange_objects((self._described, self._captured))
            _refuse_differences([described for described, _ in of_ranks])
            captured = frozenset.intersection(*(keys for _, keys in of_ranks))  # guard: ranks_common_keys
        self._common = self._dispatcher.with_captured(captured)
        self._settled = fingerprints


def _refuse_differences(configurations: Sequence[Mapping[str, tuple[str, ...]]]) -> None:
    for name in sorted({name for of_rank in configurations for name in of_rank}):
        values = [set(of_rank.get(name, ())) for of_rank in configurations]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is None:
            continue
        pairs = ((values[0], values[other]), (values[other], values[0]))
        only = [", ".join(sorted(one - another))[:_SHOWN] for one, another in pairs]
        raise AgreementError(
            f"the ranks are configured differently: {name}",
            expected="the same keys and options on every rank",
            found=f"only on rank 0: {only[0] or 'nothing'}; only on rank {other}: {only[1] or 'nothing'}",
            remedy="create the manager of every rank with the same arguments",
        )
