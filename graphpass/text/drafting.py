"""Drafters guess the next tokens of a text; a step verifies all guesses for about the cost of one token.

See Note [Draft tokens] for the verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from graphpass.errors import OptionError
from graphpass.text.request import Ints, Request

__all__ = ["Drafter", "NgramDrafter"]


class Drafter(Protocol):
    """Guesses the next tokens of texts."""

    def propose(self, request: Request, text: Ints, limit: int) -> Sequence[int] | Ints:
        """Guess the token ids that come next.

        Args:
            request: the request, the same object in all its steps.
            text: prompt and new tokens so far, int64 (tokens,); read-only, and valid during this call only.
            limit: most tokens that can be used in this step, at least 1.

        Returns:
            0 to ``limit`` token ids, in order. Return none if no guess is likely: each one costs a row of the step.
        """
        ...


class NgramDrafter:
    """Guesses that the last tokens of a text are followed by the same tokens as at their previous occurrence.

    Of the text's endings with ``min_ngram`` to ``max_ngram`` tokens it uses the longest one that occurs earlier in the
    text, and of its occurrences the latest. If fewer than ``limit`` tokens follow that occurrence, the text has started
    to repeat, and the guess repeats these tokens.

    Each new token adds ``max_ngram - min_ngram + 1`` dictionary entries, independent of the length of the text. The
    index of a request is dropped with the request object.

    Args:
        max_ngram: tokens of the longest ending.
        min_ngram: tokens of the shortest ending.

    Raises:
        OptionError: not ``1 <= min_ngram <= max_ngram``.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not (type(min_ngram) is type(max_ngram) is int and 1 <= min_ngram <= max_ngram):
            raise OptionError(
                "the lengths of n-grams are not valid",
                expected="integers with 1 <= min_ngram <= max_ngram",
                found=f"min_ngram={min_ngram!r}, max_ngram={max_ngram!r}",
                remedy="leave both out for n-grams of 1 to 3 tokens",
            )
        self._lengths = range(min_ngram, max_ngram + 1)
        self._indexes: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, text: Ints, limit: int) -> Ints:
        """Guess as :class:`Drafter` describes; returns either no tokens or ``limit`` tokens."""
        text = np.asarray(text, dtype=np.int64)
        index = self._indexes.get(request)
        if index is None or index.num_tokens > len(text):  # the request was started again
            index = self._indexes[request] = _NgramIndex(self._lengths)
        place = index.behind_last_occurrence(text)
        # resize repeats or cuts the tokens to the length ``limit``.
        return text[:0] if place is None else np.resize(text[place:], limit)


class _NgramIndex:
    """The latest occurrence of each n-gram of one growing text.

    Attributes:
        num_tokens: tokens of the text that are indexed.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.num_tokens = 0
        self._lengths = lengths
        self._behind: dict[bytes, int] = {}  # n-gram -> index of the token that follows its latest occurrence

    def behind_last_occurrence(self, text: Ints) -> int | None:
        """Index of the token that follows the latest earlier occurrence of the longest ending that has one."""
        self._extend(text)
        for length in reversed(self._lengths):
            if length < len(text):
                place = self._behind.get(text[-length:].tobytes())
                if place is not None:
                    return place
        return None

    def _extend(self, text: Ints) -> None:
        """Index the n-grams that are followed by a token that is new since the last call."""
        base = max(self.num_tokens - self._lengths[-1], 0)
        raw, width = text[base:].tobytes(), text.itemsize
        for end in range(max(self.num_tokens, 1), len(text)):
            for length in self._lengths:
                if length <= end:
                    self._behind[raw[(end - length - base) * width : (end - base) * width]] = end
        self.num_tokens = len(text)
