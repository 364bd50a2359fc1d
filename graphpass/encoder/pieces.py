"""Sequences that lie one behind the other, cut into pieces for a kernel that attends within each of them.

A kernel launches blocks for as many sequences as a graph allows for, each as long as the longest one may be. Most find
nothing to do, and starting them takes a quarter of the attention of twenty images (docs/benchmarks.md, encoder graphs).
Queries in pieces of a fixed length need about one block each, whatever the lengths of images. Each piece attends to all
keys of its own sequence.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from graphpass.errors import ShapeError

__all__ = ["PIECE_LENGTH", "Pieces", "most_pieces", "pieces_of"]

PIECE_LENGTH = 128
"""Rows of a piece: what a block of flash attention works on for most widths of heads."""

Ints = TypeVar("Ints")


class Pieces(NamedTuple, Generic[Ints]):
    """Where the pieces of packed sequences lie: int32, on the host or on a device.

    Attributes:
        query_bounds: where pieces begin and the last one ends, [pieces + 1]; those of unused pieces repeat the end.
        key_starts: where the sequence of each piece begins, and the last one ends, [pieces + 1]; those of unused pieces
            repeat the end. So they are bounds of the sequences, with an empty one for every other piece of a sequence.
        key_lengths: of the sequence of each piece, [pieces]; 0 for unused ones.
    """

    query_bounds: Ints
    key_starts: Ints
    key_lengths: Ints


def pieces_of(lengths: npt.ArrayLike) -> Pieces[npt.NDArray[np.int32]]:
    """The pieces of sequences that lie one behind the other, and one that is not used.

    That one keeps their number from being 1, for which a block that serves all sizes would be compiled once more.

    Args:
        lengths: of the sequences in rows, [sequences]; empty ones have no piece.

    Raises:
        ShapeError: they are no lengths.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
        raise ShapeError(
            "sequences lie one behind the other by their lengths",
            expected="an array of integers, none below 0",
            found=f"{lengths.tolist()!r:.100}",
            remedy="pass the number of rows of each sequence",
        )
    counts = -(-lengths // PIECE_LENGTH)
    begins = np.cumsum(lengths) - lengths
    first = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(first, counts)
    key_starts = np.repeat(begins, counts)
    end = lengths.sum()
    found = (
        np.append(key_starts + number * PIECE_LENGTH, [end, end]),
        np.append(key_starts, [end, end]),
        np.append(np.repeat(lengths, counts), 0),
    )
    return Pieces(*(part.astype(np.int32) for part in found))


def most_pieces(num_sequences: int, num_rows: int, longest: int) -> int:
    """The most pieces that so many sequences can have, the unused one among them.

    Args:
        num_sequences: at most.
        num_rows: of all sequences together, at most.
        longest: bound on the rows of one sequence.
    """
    cut = 0 if longest <= PIECE_LENGTH else num_rows // PIECE_LENGTH
    return num_sequences + cut + 1
