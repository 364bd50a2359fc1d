"""Ranks that tell each other something small, on the CPU, while their devices go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from graphpass.errors import AgreementError, OptionError

__all__ = ["DataParallelAgreement"]


class DataParallelAgreement:
    """The ranks that share a model, and the group over which they agree.

    Making one is a collective of those ranks, and so is every step of a manager that holds it: each of them calls
    :meth:`CudaGraphManager.run <graphpass.CudaGraphManager.run>`, or ``run_idle`` where it has no batch, and
    ``capture`` as often as the others. The collective runs on the CPU, over a gloo group of its own, whatever the
    backend of ``group``: nothing waits for the device. One manager and one thread at a time use it.

    Args:
        group: the data-parallel ranks; None for all.
        timeout_s: seconds that a rank waits for the others before it gives up: longer than they may be busy with
            another step, compilation included.

    Attributes:
        rank: of this process in the group.
        num_ranks: in the group. With one there is no collective.

    Raises:
        AgreementError: torch.distributed is not initialised, this process is not in the group, or another is missing.
        OptionError: ``timeout_s`` is not above 0.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not timeout_s > 0:
            raise OptionError(
                "timeout_s cannot be used", expected="seconds above 0", found=repr(timeout_s), remedy="leave it out"
            )
        if not (distributed.is_available() and distributed.is_initialized()):
            raise AgreementError(
                "there are no ranks to agree with",
                expected="an initialised torch.distributed",
                found="no default process group",
                remedy="call torch.distributed.init_process_group(...) first",
            )
        self.rank, self.num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise AgreementError(
                "this process is not one of the ranks",
                expected="a group that it is a member of",
                found=f"rank {distributed.get_rank()} outside of the group",
                remedy="pass the data-parallel group of this process",
            )
        self._timeout_s = timeout_s
        self._broken: str | None = None
        self._group: distributed.ProcessGroup | None = None
        if self.num_ranks > 1:
            self._group = self._communicated(self._new_group, group)

    def _new_group(self, group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
        made: distributed.ProcessGroup = distributed.new_group(
            distributed.get_process_group_ranks(group),
            backend="gloo",
            timeout=timedelta(seconds=self._timeout_s),
            use_local_synchronization=True,
        )
        return made

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in their order; they are of one length.

        Raises:
            AgreementError: a rank is gone, or did not come in time; so does every later call then.
        """
        if self.num_ranks == 1:
            return [list(row)]
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(self.num_ranks)]
        self._communicated(distributed.all_gather, rows, own, group=self._group)
        return [of_rank.tolist() for of_rank in rows]

    def exchange_objects(self, value: object) -> list[Any]:
        """Anything that can be pickled, from all ranks; for what is told once.

        Raises:
            AgreementError: as :meth:`exchange`.
        """
        found: list[Any] = [value] * self.num_ranks
        if self.num_ranks > 1:
            self._communicated(distributed.all_gather_object, found, value, group=self._group)
        return found

    def _communicated(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One collective. After one that fails the ranks may be at different ones, so that none is tried again."""
        if self._broken is not None:
            raise _unreachable(self._broken)
        self._broken = "an earlier collective was interrupted"
        try:
            result = collective(*args, **kwargs)
        except RuntimeError as error:
            self._broken = str(error).strip().split("\n")[0]
            raise _unreachable(self._broken) from error
        self._broken = None
        return result

    def close(self) -> None:
        """Give the group back; this object agrees on nothing any more."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)
        self._group, self._broken = None, "the agreement was closed"

    def __enter__(self) -> DataParallelAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _unreachable(cause: str) -> AgreementError:
    return AgreementError(
        "the other ranks cannot be reached",
        expected="an answer of every rank within the timeout",
        found=cause,
        remedy="see why a rank ended, hung, or called something else; then start all of them again",
    )
