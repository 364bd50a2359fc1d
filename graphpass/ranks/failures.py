"""Rows of integers from all ranks, in place of which a rank may say that it failed: no rank waits for one that did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphpass.errors import AgreementError
from graphpass.ranks.group import DataParallelAgreement

__all__ = ["FailureTexts", "RankRows"]


@dataclass(frozen=True, slots=True)
class FailureTexts:
    """What the error for another rank's failure says.

    Attributes:
        failed: what the rank did, after its number: ``gave this step up``.
        expected: of every rank.
        retried: what can be run again on all ranks afterwards.
    """

    failed: str
    expected: str
    retried: str


class RankRows:
    """Exchanges rows over an agreement.

    Args:
        agreement: the ranks.
        width: integers of a row, the same on every rank.
        texts: of the errors.
    """

    def __init__(self, agreement: DataParallelAgreement, width: int, texts: FailureTexts) -> None:
        self._agreement, self._width, self._texts = agreement, width, texts
        self._num_exchanges = 0

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """If the body fails, tell the other ranks in place of the row that they wait for.

        An AgreementError behind an exchange within the body is not told: every rank raises it.
        """
        num_exchanges = self._num_exchanges
        try:
            yield
        except BaseException as error:
            if not isinstance(error, AgreementError) or self._num_exchanges == num_exchanges:
                with contextlib.suppress(AgreementError):
                    self._exchanged([1, *[0] * self._width], f"{type(error).__name__}: {error}")
            raise

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, in their order.

        Args:
            row: this rank's; what is missing to the width is zero.

        Raises:
            AgreementError: a rank failed, or is gone.
        """
        self._num_exchanges += 1
        rows = self._exchanged([0, *row, *[0] * (self._width - len(row))], "")
        return [of_rank[1:] for of_rank in rows]

    def _exchanged(self, row: Sequence[int], failure: str) -> list[list[int]]:
        rows = self._agreement.exchange(row)
        failed = [rank for rank, of_rank in enumerate(rows) if of_rank[0]]
        if failed:
            texts = self._agreement.exchange_objects(failure)
            raise AgreementError(
                f"rank {failed[0]} {self._texts.failed}",
                expected=self._texts.expected,
                found="; ".join(f"rank {rank}: {texts[rank]}" for rank in failed),
                remedy=f"correct what that rank reports; {self._texts.retried} can be run on all ranks",
            )
        return rows
