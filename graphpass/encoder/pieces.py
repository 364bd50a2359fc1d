"""Cuts concatenated sequences into pieces for a flash attention kernel in a graph.

In a graph, the kernel launches thread blocks for the maximum number of sequences, each of the maximum length. Most
blocks have no work, and their launch takes a quarter of the attention time of twenty images (docs/benchmarks.md,
encoder graphs). Pieces of queries have a fixed length and need about one block each, for any lengths of images. Each
piece attends to all keys of its sequence.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from graphpass.errors import ShapeError

__all__ = ["PIECE_LENGTH", "Pieces", "most_pieces", "pieces_of"]

PIECE_LENGTH = 128
"""Rows of a piece: the number of rows that a block of flash attention computes for most widths of heads."""

Ints = TypeVar("Ints")


class Pieces(NamedTuple, Generic[Ints]):
    """Rows of the pieces of packed sequences; int32, on the host or on a device.

    Attributes:
        query_bounds: first row of each piece, and the end of the last one, [pieces + 1]; unused pieces have the end.
        key_starts: first row of the sequence of each piece, and the end of the last sequence, [pieces + 1]; unused
            pieces have the end. They can be read as bounds of sequences, with additional empty sequences.
        key_lengths: length of the sequence of each piece, [pieces]; 0 for unused pieces.
    """

    query_bounds: Ints
    key_starts: Ints
    key_lengths: Ints


def pieces_of(lengths: npt.ArrayLike) -> Pieces[npt.NDArray[np.int32]]:
    """The pieces of concatenated sequences, and one unused piece.

    Because of the unused piece their number is never 1, a size for which Dynamo would compile a block separately.

    Args:
        lengths: rows of each sequence, [sequences]; empty sequences have no piece.

    Raises:
        ShapeError: ``lengths`` are not non-negative integers.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
        raise ShapeError(
            "lengths of sequences have wrong values",
            expected="a one-dimensional array of integers, none below 0",
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
        np.append(key_starts, [end, end]),  # guard: encoder_piece_keys
        np.append(np.repeat(lengths, counts), 0),
    )
    return Pieces(*(part.astype(np.int32) for part in found))


def most_pieces(num_sequences: int, num_rows: int, longest: int) -> int:
    """The maximum number of pieces, including the unused piece.

    Args:
        num_sequences: maximum number of sequences.
        num_rows: maximum number of rows of all sequences together.
        longest: maximum number of rows of one sequence.
    """
    cut = 0 if longest <= PIECE_LENGTH else num_rows // PIECE_LENGTH
    return num_sequences + cut + 1
