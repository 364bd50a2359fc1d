"""Continuous batching: plans the requests, tokens and pages of each step, with NumPy arrays and without tensors.

Every running request that has computed its prompt decodes one token per step. The rest of the token budget goes to
prompts, in chunks. A request is admitted when all pages that it may ever need are free, so none is preempted, and in
the order of arrival, so none starves.

Tokens are counted when they are planned (Note [Running ahead]), accepted drafts when they are verified (Note [Draft
tokens]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphpass.errors import OptionError, OutOfPagesError, ShapeError, is_integer, positive
from graphpass.text.paged import PageAllocator

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Guess = Callable[["Request", int], int]
"""``f(request, limit)`` guesses at most ``limit`` next tokens of a request and returns their number."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt to continue, and the conditions that end it. Requests are compared by identity."""

    name: str  #: name in error messages
    prompt: Ints  #: token ids, int64 (tokens,)
    max_new_tokens: int  #: most tokens to generate
    eos_token_ids: frozenset[int] = frozenset()  #: tokens that end the request, and are part of the generated text
    adapter: str | None = None  #: name of the LoRA adapter; None for the model without adapters

    @staticmethod
    def of(
        name: str,
        prompt: Sequence[int] | Ints,
        max_new_tokens: int,
        eos_token_id: int | Collection[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> Request:
        """Create a request from plain values; the prompt is copied.

        Raises:
            OptionError: the prompt is not a flat, non-empty sequence of token ids, ``max_new_tokens`` is below 1, or
                an end token is not an integer.
        """
        try:
            tokens = np.array(prompt)
        except ValueError:  # ragged
            tokens = np.empty((0, 0))
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0:
            raise OptionError(
                f"{name} has an invalid prompt",
                expected="a flat sequence of at least 1 token id, each an integer of at least 0",
                found=text if len(text := repr(prompt)) <= 60 else f"{text[:57]}...",
                remedy="pass the token ids of one prompt",
            )
        remedy = "leave the request out, or raise max_new_tokens"
        max_new_tokens = positive(max_new_tokens, f"max_new_tokens of {name}", remedy=remedy)
        return Request(name, tokens.astype(np.int64), max_new_tokens, _token_ids(name, eos_token_id), adapter)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and generated text together."""
        return len(self.prompt) + self.max_new_tokens


def _token_ids(name: str, eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    tokens = eos_token_id if isinstance(eos_token_id, Collection) else (eos_token_id,)
    if any(isinstance(token, bool) or not isinstance(token, int | np.integer) for token in tokens):
        raise OptionError(
            f"{name} has an invalid eos_token_id",
            expected="a token id, a collection of token ids, or None",
            found=repr(eos_token_id),
            remedy="pass the tokenizer's eos_token_id, or leave it out",
        )
    return frozenset(int(token) for token in tokens)


class StepPlan(NamedTuple):
    """The work of one step: one row for each request, in the order of admission."""

    requests: tuple[Request, ...]  #: the request of each row
    slots: Ints  #: a number below ``max_num_reqs`` that identifies the request while it runs
    query_lens: Ints  #: tokens of each row in this step, drafts included
    seq_lens: Ints  #: tokens of each request after this step, drafts included
    num_drafts: Ints  #: of the last tokens of the row
    #: The row has computed its prompt, so its newest token is the result of the step before. In a row extended by
    #: ``fill`` it follows tokens that are computed again.
    decodes: Flags
    samples: Flags  #: the row computes the newest known token of its request, so it yields a new one
    ends: Flags  #: the new token is the request's last one because of ``max_new_tokens``
    block_tables: npt.NDArray[np.int32]  #: pages of each row, (rows, most pages per request), 0 after the last
    num_tokens: int  #: tokens of all rows
    uniform_decode: bool  #: every row has ``1 + draft_tokens`` tokens
    same_rows: bool  #: all that differs from the step before is one token more of each row


class Scheduler:
    """Plans steps until every request has all its tokens.

    A step has at most ``max_num_tokens``, a row at most ``draft_tokens`` drafts.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
        vocab_size: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        check_budget(positive(max_num_reqs, "max_num_reqs of a schedule"), max_num_tokens, draft_tokens)
        self._source, self._page_size, self._vocab_size = pages, page_size, vocab_size
        self._max_num_tokens, self._max_seq_len, self._draft_tokens = max_num_tokens, max_seq_len, draft_tokens
        self._waiting: deque[Request] = deque()
        self._slot_of: dict[Request, int] = {}  # in the order of admission
        self._pages_of: dict[Request, list[int]] = {}
        self._free_slots = list(range(max_num_reqs))[::-1]
        self._computed, self._prompt, self._new, self._limit = np.zeros((4, max_num_reqs), dtype=np.int64)
        self._block_tables = np.zeros((max_num_reqs, -(-max_seq_len // page_size)), dtype=np.int32)
        self._running: list[Request] = []
        self._slots: Ints = np.zeros(0, dtype=np.int64)
        self._rows_changed = False
        self._decode: StepPlan | None = None

    def check(self, request: Request) -> None:
        """Refuse a request that can never run."""
        if self._vocab_size is not None and request.prompt.max() >= self._vocab_size:
            raise OptionError(
                f"{request.name} contains a token that is not in the model's vocabulary",
                expected=f"token ids below {self._vocab_size}",
                found=str(request.prompt.max()),
                remedy="use the tokenizer of this model",
            )
        if request.max_length > self._max_seq_len:
            raise ShapeError(
                f"{request.name} is too long",
                expected=f"at most {self._max_seq_len} tokens (max_seq_len), prompt and new tokens together",
                found=f"{len(request.prompt)} + {request.max_new_tokens}",
                remedy="shorten the prompt, lower max_new_tokens, or create the model with a larger max_seq_len",
            )
        if self._pages_needed(request) > self._source.num_pages:
            raise ShapeError(
                f"{request.name} needs more pages than the KV cache has",
                expected=f"at most {self._source.num_pages} pages (num_pages) of {self._page_size} tokens",
                found=f"{self._pages_needed(request)} pages for {request.max_length} tokens",
                remedy="create the model with more pages, or lower max_new_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request after all others."""
        self.check(request)
        if request in self._slot_of or request in self._waiting:
            raise OptionError(
                f"{request.name} was added twice",
                expected="a new Request object for each text to generate",
                found="the same object",
                remedy="create another Request with the same prompt",
            )
        self._waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a request and free its pages, which the next step may give to another: steps run in their order."""
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._source.free(self._pages_of.pop(request))
            self._free_slots.append(slot)
            self._rows_changed = True
        elif request in self._waiting:
            self._waiting.remove(request)

    def close(self) -> None:
        """End every request."""
        self._waiting.clear()
        for request in list(self._slot_of):
            self.finish(request)

    def has_work(self) -> bool:
        """Whether a request waits, or has a token to come that no step is planned for."""
        if self._rows_changed:
            self._collect_rows()
        return bool(self._waiting or self._running)

    def plan(self, guess: Guess | None = None, *, fill: bool = False) -> StepPlan | None:
        """Plan the next step; None if there is nothing to run."""
        self._admit()
        if self._rows_changed:
            self._collect_rows()
        if not self._running:
            return None
        plan = self._decode_again() if self._decode is not None else self._mixed(guess, fill)
        # Reductions of ufuncs take half the time of the methods of arrays.
        if np.logical_or.reduce(plan.ends):
            self._rows_changed = True
        # With one token in every row, the plan has all running requests.
        repeats = plan.same_rows or (plan.uniform_decode and not self._draft_tokens and plan.samples.all())
        self._decode = plan if repeats and not self._rows_changed else None
        return plan

    def accept(self, request: Request, num_drafts: int) -> None:
        """Count accepted drafts of a request in the last step as new tokens."""
        slot = self._slot_of[request]
        self._computed[slot] += num_drafts
        self._new[slot] += num_drafts

    def _pages_needed(self, request: Request) -> int:
        return -(-request.max_length // self._page_size)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            needed = self._pages_needed(request)
            if needed > self._source.num_free:
                break
            pages, slot = self._source.allocate(needed), self._free_slots.pop()
            self._waiting.popleft()
            self._slot_of[request], self._pages_of[request] = slot, pages
            self._computed[slot] = self._new[slot] = 0
            self._prompt[slot], self._limit[slot] = len(request.prompt), request.max_new_tokens
            self._block_tables[slot] = 0
            self._block_tables[slot, : len(pages)] = pages
            self._rows_changed = True
        if self._waiting and not self._slot_of:
            raise OutOfPagesError(
                f"{self._waiting[0].name} waits for pages, but no request runs that could free them",
                expected=f"{self._pages_needed(self._waiting[0])} free pages when no request runs",
                found=f"{self._source.num_free} of {self._source.num_pages}",
                remedy="finish or close the other users of this manager's KV cache",
            )

    def _collect_rows(self) -> None:
        """Update the rows: the requests with a token to come."""
        self._running = [r for r, slot in self._slot_of.items() if self._new[slot] < self._limit[slot]]
        self._slots = np.array([self._slot_of[request] for request in self._running], dtype=np.int64)
        self._rows_changed, self._decode = False, None

    def _decode_again(self) -> StepPlan:
        """Plan one more token for each row of the step before."""
        last = self._decode
        assert last is not None
        slots = self._slots
        self._computed[slots] += 1
        self._new[slots] += 1
        ends = self._new[slots] >= self._limit[slots]
        return last._replace(decodes=last.samples, seq_lens=last.seq_lens + 1, ends=ends, same_rows=True)

    def _mixed(self, guess: Guess | None, fill: bool) -> StepPlan:
        """Plan a token and drafts for each decoding row, and the rest of the budget for prompts in order."""
        left = self._prompt[self._slots] - self._computed[self._slots]
        decodes = left <= 0
        drafts = np.zeros(len(left), dtype=np.int64) if guess is None else self._guessed(decodes, guess)
        wanted = np.where(decodes, 0, left)
        budget = self._max_num_tokens - int(decodes.sum() + drafts.sum())
        granted = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        query_lens = np.where(decodes, 1 + drafts, granted)
        rows = np.flatnonzero(query_lens)
        slots, query_lens, drafts = self._slots[rows], query_lens[rows], drafts[rows]
        self._computed[slots] += query_lens - drafts
        samples = self._computed[slots] >= self._prompt[slots]
        self._new[slots] += samples
        seq_lens = self._computed[slots] + drafts
        uniform = 1 + self._draft_tokens
        if fill and query_lens.max() <= uniform <= seq_lens.min():
            query_lens = np.full(len(rows), uniform)
        return StepPlan(
            requests=tuple(self._running[row] for row in rows),
            slots=slots,
            query_lens=query_lens,
            seq_lens=seq_lens,
            num_drafts=drafts,
            decodes=decodes[rows],
            samples=samples,
            ends=samples & (self._new[slots] >= self._limit[slots]),
            block_tables=self._block_tables[slots],
            num_tokens=int(query_lens.sum()),
            uniform_decode=bool((query_lens == uniform).all()),
            same_rows=False,
        )

    def _guessed(self, decodes: Flags, guess: Guess) -> Ints:
        """Drafts of each running request, fewer than its tokens to come: one new token is certain."""
        most = np.minimum(self._draft_tokens, self._limit[self._slots] - self._new[self._slots] - 1)
        drafts = np.zeros(len(decodes), dtype=np.int64)
        for row in np.flatnonzero(decodes & (most > 0)).tolist():
            drafts[row] = guess(self._running[row], int(most[row]))
        return drafts


def check_budget(max_num_reqs: int, max_num_tokens: int, draft_tokens: int) -> None:
    """Check that a step has room for all decoding requests with their drafts."""
    if not is_integer(draft_tokens, at_least=0):
        raise OptionError(
            "draft_tokens is not valid",
            expected="an integer of at least 1, or 0 for no drafts",
            found=repr(draft_tokens),
            remedy="pass draft_tokens=3, or leave it out",
        )
    if max_num_tokens < max_num_reqs * (1 + draft_tokens):
        limit = "max_num_reqs" + (" * (1 + draft_tokens)" if draft_tokens else "")
        raise OptionError(
            "max_num_tokens is too small for the decoding requests",
            expected=f"at least {limit} = {max_num_reqs * (1 + draft_tokens)}",
            found=str(max_num_tokens),
            remedy="raise max_num_tokens, or lower max_num_reqs" + (" or draft_tokens" if draft_tokens else ""),
        )
