"""Data-parallel encoding: each rank encodes a share of the items, then all ranks gather all results."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphpass.encoder.protocol import EncoderItemSpec, Outputs
from graphpass.errors import AgreementError, EncoderConfigError, positive
from graphpass.ranks.group import DataParallelAgreement, RankRows

LEAST_SAVED = 1024
"""Patches. A request is divided if the largest share has so many fewer than all items; else gathering takes longer."""


@dataclass(frozen=True, slots=True)
class ItemShares:
    """Items distributed over ranks."""

    order: list[int]  #: indices of the items of rank 0, then of rank 1, and so on
    counts: list[int]  #: number of items of each rank
    loads: list[int]  #: sum of the sizes of each rank's items

    def share(self, rank: int) -> list[int]:
        """Indices of the items of one rank."""
        first = sum(self.counts[:rank])
        return self.order[first : first + self.counts[rank]]


def balance_items(sizes: Sequence[int], num_ranks: int) -> ItemShares:
    """Distribute items over ranks, the largest item first, each to the rank with the smallest load.

    Of ranks with equal loads, the one with the fewest items gets the item. This is the longest-processing-time rule:
    the largest load is at most 4/3 of the optimum. The result depends only on the arguments.

    Args:
        sizes: the input size of each item.
        num_ranks: number of ranks.

    Raises:
        EncoderConfigError: ``num_ranks`` is below 1, or a size is negative.
    """
    positive(num_ranks, "num_ranks", error=EncoderConfigError)
    positive(min(sizes, default=0), "the size of an item", at_least=0, error=EncoderConfigError)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    least = [(0, 0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, count, rank = least[0]
        shares[rank].append(item)
        heapq.heapreplace(least, (load + sizes[item], count + 1, rank))
    return ItemShares(
        order=[item for share in shares for item in share],
        counts=[len(share) for share in shares],
        loads=[sum(sizes[item] for item in share) for share in shares],
    )


def encoded_by_all(
    specs_of: Callable[[], Sequence[EncoderItemSpec]],
    like: Sequence[torch.Tensor],
    group: Any,
    agreement: DataParallelAgreement,
    encode: Callable[[Sequence[EncoderItemSpec], Sequence[int]], Outputs],
) -> tuple[Sequence[EncoderItemSpec], Outputs]:
    """Encode this rank's share of the items, and gather all rows; of a small request all items. Every rank calls it.

    Returns the specs, and the outputs. ``like`` are outputs for no items, and ``encode(specs, indices)`` those of the
    items at ``indices``.
    """
    rows = RankRows(agreement, 1, "could not encode its share")
    with rows.sending_failures():
        specs = specs_of()
        balance = balance_items([spec.input_size for spec in specs], agreement.num_ranks)
        is_whole = sum(balance.loads) - max(balance.loads) < LEAST_SAVED  # guard: encoder_small_whole
        share = range(len(specs)) if is_whole else balance.share(agreement.rank)
        own = encode(specs, share) if share else tuple(like)
        for output, expected in zip(own, like, strict=True):
            if output.dtype != expected.dtype:
                raise EncoderConfigError(
                    "the encoder returned another dtype than the manager's, which ranks cannot exchange",
                    expected=str(expected.dtype),
                    found=str(output.dtype),
                    remedy=f"cast the output, or create the manager with dtype={output.dtype}",
                )
    sizes = [(spec.input_size, spec.output_tokens, spec.frames) for spec in specs]
    _refuse_other_items(rows, agreement.rank, zlib.crc32(np.array(sizes, dtype=np.int64).tobytes()))
    if is_whole:
        return specs, own
    return specs, gather_rows(own, balance, [spec.output_tokens for spec in specs], group)


def _refuse_other_items(rows: RankRows, own_rank: int, fingerprint: int) -> None:
    fingerprints = rows.exchange([fingerprint])
    others = [rank for rank, (of_rank,) in enumerate(fingerprints) if of_rank != fingerprint]
    if others:  # guard: encoder_rank_items
        raise AgreementError(
            "the ranks encode other items",
            expected="the same items in every rank's call",
            found=f"other sizes on rank {others[0]} than on rank {own_rank}",
            remedy="call execute with the same items on every rank; each encodes a share of them",
        )


def gather_rows(own: Sequence[torch.Tensor], balance: ItemShares, tokens: Sequence[int], group: Any) -> Outputs:
    """Gather the rows of all items, in their order. Shares are padded to the longest for a single all-gather."""
    rows_of_rank = [sum(tokens[item] for item in balance.share(rank)) for rank in range(len(balance.counts))]
    longest = max(rows_of_rank)
    widths = [output.shape[1] for output in own]
    padded = own[0].new_zeros(longest, sum(widths))
    padded[: len(own[0])] = torch.cat(list(own), dim=1)
    gathered = [torch.empty_like(padded) for _ in rows_of_rank]
    if longest:  # equal on every rank
        dist.all_gather(gathered, padded, group=group)
    rows: dict[int, torch.Tensor] = {}
    for rank, of_rank in enumerate(gathered):
        share = balance.share(rank)  # guard: encoder_gathered_order
        rows |= zip(share, of_rank[: rows_of_rank[rank]].split([tokens[item] for item in share]), strict=True)
    in_order = torch.cat([padded[:0], *(rows[item] for item in range(len(tokens)))])
    return tuple(columns.contiguous() for columns in in_order.split(widths, dim=1))
