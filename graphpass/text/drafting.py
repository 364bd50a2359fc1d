"""Drafters guess the next tokens of a text; a step verifies all guesses for about the cost of one token.

See Note [Draft tokens].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from graphpass.errors import OptionError
from graphpass.text.scheduler import Ints, Request, StepPlan


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
    text, and of its occurrences the latest. If fewer than ``limit`` tokens follow it, the guess repeats these.

    Each new token adds ``max_ngram - min_ngram + 1`` dictionary entries, which are dropped with the request object.

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
        #: of each text the number of indexed tokens, and {n-gram: index of the token after its latest occurrence}
        self._indexes: WeakKeyDictionary[Request, tuple[int, dict[bytes, int]]] = WeakKeyDictionary()

    def propose(self, request: Request, text: Ints, limit: int) -> Ints:
        """See :class:`Drafter`; either none or ``limit`` tokens."""
        text = np.asarray(text, dtype=np.int64)
        num_indexed, following = self._indexes.get(request, (0, {}))
        if num_indexed > len(text):  # the request was started again
            num_indexed, following = 0, {}
        self._extend(following, num_indexed, text)
        self._indexes[request] = len(text), following
        endings = (text[-length:].tobytes() for length in reversed(self._lengths) if length < len(text))
        place = next((following[ending] for ending in endings if ending in following), None)
        return text[:0] if place is None else np.resize(text[place:], limit)

    def _extend(self, following: dict[bytes, int], num_indexed: int, text: Ints) -> None:
        """Index the n-grams that a new token follows."""
        base = max(num_indexed - self._lengths[-1], 0)
        raw, width = text[base:].tobytes(), text.itemsize
        for end in range(max(num_indexed, 1), len(text)):
            for length in self._lengths:
                if length <= end:
                    following[raw[(end - length - base) * width : (end - base) * width]] = end


class Speculation:
    """Keeps the texts of running requests, adds drafts to a scheduler's steps, and verifies them."""

    def __init__(self, drafter: Drafter, draft_tokens: int, vocab_size: int | None) -> None:
        self._drafter, self._num_last = drafter, 1 + draft_tokens
        self._max_token = np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
        #: the tokens of each request, known ones and then drafts
        self._texts: dict[Request, Ints] = {}
        self._num_known: dict[Request, int] = {}
        self.num_drafted = self.num_accepted = 0  #: verified drafts, and accepted ones among them, so far

    def guess(self, request: Request, limit: int) -> int:
        """Let the drafter guess next tokens; returns the number of drafts."""
        text, num_known = self._texts[request], self._num_known[request]
        known = text[:num_known]
        known.flags.writeable = False
        drafts = self._checked(self._drafter.propose(request, known, limit), request, limit)
        text[num_known : num_known + len(drafts)] = drafts
        return len(drafts)

    def texts(self, plan: StepPlan) -> list[Ints]:
        """All tokens of each row's request, with drafts."""
        for request in plan.requests:
            if request not in self._texts:
                num_known = self._num_known[request] = len(request.prompt)
                self._texts[request] = np.empty(request.max_length, dtype=np.int64)
                self._texts[request][:num_known] = request.prompt
        return [self._texts[request] for request in plan.requests]

    def verify(self, plan: StepPlan, answers: Sequence[int]) -> list[tuple[Request, list[int], bool]]:
        """Append the drafts that are the model's answers to the texts: (request, new tokens, whether it has ended)."""
        verified = []
        rows = zip(plan.requests, plan.samples.tolist(), plan.num_drafts.tolist(), strict=True)
        for row, (request, samples, num_drafts) in enumerate(rows):
            if samples:
                end = (row + 1) * self._num_last
                verified.append((request, *self._accepted(request, answers[end - 1 - num_drafts : end])))
        return verified

    def _accepted(self, request: Request, answers: Sequence[int]) -> tuple[list[int], bool]:
        num_drafts = len(answers) - 1
        after_known = self._texts[request][self._num_known[request] :]
        drafts = after_known[:num_drafts].tolist()
        differs = (at for at, (draft, answer) in enumerate(zip(drafts, answers, strict=False)) if draft != answer)
        num_right = next(differs, num_drafts)
        ends = (at for at, token in enumerate(answers[: num_right + 1]) if token in request.eos_token_ids)
        end = next(ends, None)
        tokens = list(answers[: (num_right if end is None else end) + 1])
        after_known[: len(tokens)] = tokens
        self._num_known[request] += len(tokens)
        self.num_drafted += num_drafts
        self.num_accepted += min(num_right, len(tokens))
        return tokens, end is not None or self._num_known[request] == request.max_length

    def forget(self, request: Request) -> None:
        """Drop the text of a request."""
        self._texts.pop(request, None)
        self._num_known.pop(request, None)

    def close(self) -> None:
        """Drop the texts of all requests."""
        self._texts.clear()
        self._num_known.clear()

    def _checked(self, proposed: Any, request: Request, limit: int) -> Ints:
        try:
            drafts = np.asarray(proposed)
        except ValueError:  # ragged
            drafts = np.empty((0, 0))
        if drafts.ndim == 1 and len(drafts) == 0:
            return drafts.astype(np.int64)
        is_sound = drafts.ndim == 1 and len(drafts) <= limit and np.issubdtype(drafts.dtype, np.integer)
        if not is_sound or drafts.min() < 0 or drafts.max() > self._max_token:
            raise OptionError(
                f"the drafter proposed invalid tokens for {request.name}",
                expected=f"a flat sequence of at most {limit} token ids from 0 to {self._max_token}",
                found=repr(proposed)[:200],
                remedy="return at most limit token ids of the model's vocabulary, or none",
            )
        return drafts
