"""Exchanges rows of integers between ranks. A failed rank sends its error instead, so that no rank waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphpass.errors import AgreementError
from graphpass.ranks.group import DataParallelAgreement

__all__ = ["FailureTexts", "RankRows"]


@dataclass(frozen=True, slots=True)
class FailureTexts:
    """Texts of the error that all ranks raise if one of them fails.

    Attributes:
        failed: the predicate after the rank's number, such as ``failed in this step``.
        expected: the calls that were expected of every rank.
        retried: the call that can be run on all ranks afterwards.
    """

    failed: str
    expected: str
    retried: str


class RankRows:
    """Exchanges rows over an agreement.

    Args:
        agreement: the ranks.
        width: number of integers in a row, equal on every rank.
        texts: texts of the error if a rank fails.
    """

    def __init__(self, agreement: DataParallelAgreement, width: int, texts: FailureTexts) -> None:
        self._agreement, self._width, self._texts = agreement, width, texts
        self._num_exchanges = 0

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """If the body fails, send its error to the other ranks, which wait for a row of this rank.

        An AgreementError after an exchange inside the body is not sent: every rank raises that error.
        """
        num_exchanges = self._num_exchanges
        try:
            yield
        except BaseException as error:
            if not isinstance(error, AgreementError) or self._num_exchanges == num_exchanges:
                with contextlib.suppress(AgreementError):
                    # guard: encoder_rank_fails
                    self._exchanged([1, *[0] * self._width], f"{type(error).__name__}: {error}")
            raise

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Exchange rows with the other ranks. Every rank calls it.

        Args:
            row: the row of this rank; it is padded with zeros to the width.

        Returns:
            The rows of all ranks, in their order.

        Raises:
            AgreementError: a rank failed, or has ended.
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
                remedy=f"fix the error of that rank; {self._texts.retried} can be run on all ranks",
            )
        return rows
