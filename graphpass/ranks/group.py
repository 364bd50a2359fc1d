"""Exchanges small messages between data-parallel ranks on the CPU, without synchronizing their devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from graphpass.errors import AgreementError, OptionError, unreachable


class DataParallelAgreement:
    """The data-parallel ranks that share a model.

    The constructor is a collective: all ranks of the group call it. So is every step of a manager that uses the
    agreement: every rank calls :meth:`CudaGraphManager.run <graphpass.CudaGraphManager.run>`, or ``run_idle`` if it
    has no batch, and ``capture`` as often as the other ranks. Collectives run on the CPU, over a separate gloo group,
    and do not wait for the device. Only one manager and one thread may use an agreement at a time. The caller owns it
    and calls :meth:`close`, or uses it as a context manager.

    Args:
        group: the data-parallel ranks; None for all ranks.
        timeout_s: seconds that a rank waits for the others. It must exceed their longest step, compilation included.

    Attributes:
        rank: rank of this process in the group.
        num_ranks: number of ranks in the group. With one rank no collective runs.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        AgreementError: torch.distributed is not initialised, this process is not in the group, or a rank is missing.
        OptionError: ``timeout_s`` is not above 0.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not timeout_s > 0:
            raise OptionError(
                "timeout_s is not a timeout",
                expected="seconds above 0",
                found=repr(timeout_s),
                remedy="omit it for the default of 300 seconds",
            )
        if not (distributed.is_available() and distributed.is_initialized()):
            raise AgreementError(
                "torch.distributed is not initialised",
                expected="a default process group",
                found="no default process group",
                remedy="call torch.distributed.init_process_group(...) first",
            )
        self.rank, self.num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise AgreementError(
                "this process is not in the data-parallel group",
                expected="a group that includes this process",
                found=f"rank {distributed.get_rank()}, which the group does not include",
                remedy="pass the data-parallel group of this process",
            )
        self.timeout_s = timeout_s
        self._broken: str | None = None
        self._group: distributed.ProcessGroup | None = None
        if self.num_ranks > 1:
            self._group = self._communicated(self._new_group, group)

    def _new_group(self, group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
        gloo_group: distributed.ProcessGroup = distributed.new_group(
            distributed.get_process_group_ranks(group),
            backend="gloo",
            timeout=timedelta(seconds=self.timeout_s),
            use_local_synchronization=True,
        )
        return gloo_group

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in their order. All rows must have the same length.

        Raises:
            AgreementError: a rank has ended or did not answer within the timeout. Every later call raises it too.
        """
        if self.num_ranks == 1:
            return [list(row)]
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(self.num_ranks)]
        self._communicated(distributed.all_gather, rows, own, group=self._group)
        return [of_rank.tolist() for of_rank in rows]

    def exchange_objects(self, value: object) -> list[Any]:
        """Like :meth:`exchange` for any values, which are pickled: too slow for every step."""
        values: list[Any] = [value] * self.num_ranks
        if self.num_ranks > 1:
            self._communicated(distributed.all_gather_object, values, value, group=self._group)
        return values

    def _communicated(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one collective. After a failure the ranks may be in different collectives, so no more are run."""
        if self._broken is not None:
            raise unreachable(self._broken)
        self._broken = "an earlier collective was interrupted"
        try:
            result = collective(*args, **kwargs)
        except RuntimeError as error:
            self._broken = str(error).strip().split("\n")[0]
            raise unreachable(self._broken) from error
        self._broken = None
        return result

    def close(self) -> None:
        """Destroy the gloo group. Later exchanges raise an AgreementError."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)
        self._group, self._broken = None, "the agreement was closed"

    def __enter__(self) -> DataParallelAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def wait_for(event: Any, timeout_s: float | None) -> None:
    """Wait for an event of the device; with other ranks in its work at most ``timeout_s``.

    The watchdog of NCCL does not see the collectives of a replay, so only a poll finds out that a rank is gone.

    Raises:
        AgreementError: the event has not come by then.
    """
    if timeout_s is None:
        event.synchronize()
        return
    until = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > until:
            raise unreachable(f"the device has waited {timeout_s:g} s in a step")
        time.sleep(0)


def failures_of(
    agreement: DataParallelAgreement, rows: Sequence[Sequence[int]], error: BaseException | None
) -> tuple[list[int], str]:
    """The ranks whose rows do not begin with 0, and their errors. Every rank calls it, with its own error."""
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    texts = agreement.exchange_objects(f"{type(error).__name__}: {error}") if failed else []
    return failed, "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)


class RankRows:
    """Exchanges rows of integers over an agreement. A failed rank sends its error, so that no rank waits for it.

    The error of all ranks says of its number that it ``failed``.
    """

    def __init__(self, agreement: DataParallelAgreement, width: int, failed: str) -> None:
        self._agreement, self._width, self._failed = agreement, width, failed
        self._num_exchanges = 0

    @contextlib.contextmanager
    def sending_failures(self) -> Iterator[None]:
        """If the body fails, send its error to the other ranks.

        An AgreementError after an exchange in the body is not sent: every rank raises it.
        """
        num_exchanges = self._num_exchanges
        try:
            yield
        except BaseException as error:
            if not isinstance(error, AgreementError) or self._num_exchanges == num_exchanges:
                with contextlib.suppress(AgreementError):
                    # guard: encoder_rank_fails
                    self._exchanged([1, *[0] * self._width], error)
            raise

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, padded with zeros to the width. Every rank calls it."""
        self._num_exchanges += 1
        rows = self._exchanged([0, *row, *[0] * (self._width - len(row))])
        return [of_rank[1:] for of_rank in rows]

    def _exchanged(self, row: Sequence[int], error: BaseException | None = None) -> list[list[int]]:
        rows = self._agreement.exchange(row)
        failed, found = failures_of(self._agreement, rows, error)
        if failed:
            raise AgreementError(
                f"rank {failed[0]} {self._failed}",
                expected="the part of every rank",
                found=found,
                remedy="fix the error of that rank; the next call can be made on all ranks",
            )
        return rows
