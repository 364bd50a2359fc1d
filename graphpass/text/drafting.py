"""Guessing tokens ahead: a step that is given the next tokens verifies them all at the price of about one.

Whatever a drafter guesses, the text stays that of greedy decoding: a guess is kept where the model itself chooses the
same token, and one more token, the model's own, comes with every step.
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
    """Guesses how texts go on."""

    def propose(self, request: Request, text: Ints, limit: int) -> Sequence[int] | Ints:
        """Token ids that may come next.

        Args:
            request: whose text it is: the same object in every step of one request, another for each request.
            text: prompt and new tokens so far, int64 (tokens,); read-only, and valid during the call alone.
            limit: most tokens that can be used now, at least 1.

        Returns:
            0 to ``limit`` token ids, in order. None where the drafter has no idea: each costs a row of the step.
        """
        ...


class NgramDrafter:
    """Guesses that a text goes on as it did the last time it had the same last words.

    The longest of the text's endings that stood there before decides, and of its places the latest one. Where what
    followed is shorter than asked for, text and ending overlap: it is a loop, which is gone through again.

    Each new token costs a few dictionary entries, whatever the length of the text. An index is kept for as long as its
    request object lives.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest one.

    Raises:
        OptionError: not ``1 <= min_ngram <= max_ngram``.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not (type(min_ngram) is type(max_ngram) is int and 1 <= min_ngram <= max_ngram):
            raise OptionError(
                "there is no ending of such a length to look for",
                expected="integers with 1 <= min_ngram <= max_ngram",
                found=f"min_ngram={min_ngram!r}, max_ngram={max_ngram!r}",
                remedy="leave both out for endings of 1 to 3 tokens",
            )
        self._lengths = range(min_ngram, max_ngram + 1)
        self._indexes: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, text: Ints, limit: int) -> Ints:
        """See :class:`Drafter`; either nothing, or ``limit`` tokens."""
        text = np.asarray(text, dtype=np.int64)
        index = self._indexes.get(request)
        if index is None or index.num_tokens > len(text):  # the request begins anew
            index = self._indexes[request] = _NgramIndex(self._lengths)
        place = index.behind_last_occurrence(text)
        # Repeats what it is given up to the length asked for, or cuts it.
        return text[:0] if place is None else np.resize(text[place:], limit)


class _NgramIndex:
    """Where the n-grams of one growing text were followed by something the last time.

    Attributes:
        num_tokens: of the text when it was last seen.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.num_tokens = 0
        self._lengths = lengths
        self._behind: dict[bytes, int] = {}  # n-gram -> position behind its latest occurrence that is not the end

    def behind_last_occurrence(self, text: Ints) -> int | None:
        """The position behind the latest earlier occurrence of the longest ending that has one."""
        self._extend(text)
        for length in reversed(self._lengths):
            if length < len(text):
                place = self._behind.get(text[-length:].tobytes())
                if place is not None:
                    return place
        return None

    def _extend(self, text: Ints) -> None:
        """Enter the n-grams that something has come behind since the last call."""
        base = max(self.num_tokens - self._lengths[-1], 0)
        raw, width = text[base:].tobytes(), text.itemsize
        for end in range(max(self.num_tokens, 1), len(text)):
            for length in self._lengths:
                if length <= end:
                    self._behind[raw[(end - length - base) * width : (end - base) * width]] = end
        self.num_tokens = len(text)
