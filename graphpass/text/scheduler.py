"""Continuous batching: which requests run in a step, with how many tokens, on which pages. Numbers only, no tensor.

Every running request that is past its prompt takes one token a step; what the token budget leaves goes to prompts, in
the order of arrival, in chunks. A request is admitted when all pages that it may ever need are free, so nothing is
ever preempted, and strictly in the order of arrival, so nothing starves: a running request advances in every step or
stands behind an older one that does.

The scheduler counts tokens when they are planned, not when they are known. So a step can be planned, and launched,
before the tokens of the one before have been read: only the end-of-sequence token is then learned one step late.

With draft tokens a row past its prompt takes its newest token and guesses of those behind it. One of its new tokens is
certain and counted when it is planned; :meth:`Scheduler.accept` counts the guesses that were right. The keys and values
of wrong ones are overwritten by the steps that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from graphpass.checks import check_positive
from graphpass.errors import OptionError, OutOfPagesError, ShapeError
from graphpass.text.request import Ints, Request

__all__ = ["Guess", "PageSource", "Scheduler", "StepPlan", "check_budget"]

Flags = npt.NDArray[np.bool_]


class PageSource(Protocol):
    """Where pages come from; what is handed out is nobody else's until it is freed."""

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        ...

    def allocate(self, num_pages: int, /) -> list[int]:
        """That many pages, at most ``num_free``."""
        ...

    def free(self, pages: Sequence[int], /) -> None:
        """Give pages back."""
        ...


Guess = Callable[[Request, int], int]
"""``f(request, limit)``: how many of its next tokens are guessed, at most ``limit``."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The work of one step: a row for each request that takes part, in the order of admission.

    The arrays are the reader's, except ``block_tables``: its rows hold for as long as their requests run.

    Attributes:
        requests: of each row.
        slots: a number below ``max_num_reqs`` that is the request's own while it runs, int64 (rows,).
        query_lens: tokens of each row in this step, drafts included, int64 (rows,).
        seq_lens: tokens of each row after this step, these included, int64 (rows,).
        num_drafts: how many of them, the last ones, are guesses, int64 (rows,).
        decodes: the row is past its prompt: its first token came out of the step before, bool (rows,). A filled row's
            stands behind tokens that are computed once more.
        samples: the row's last token that is no guess is the last one known of its request, so a new token follows,
            bool (rows,).
        ends: the new token is the request's last whatever it is, bool (rows,).
        block_tables: pages of each row, int32 (rows, most pages a request); 0 behind a row's own pages.
        num_tokens: of all rows.
        uniform_decode: every row has one token, with drafts ``1 + draft_tokens``.
        same_rows: the step before had the same requests in the same rows, one token each, and each got a new one:
            every number went up by one and nothing else changed.
    """

    requests: tuple[Request, ...]
    slots: Ints
    query_lens: Ints
    seq_lens: Ints
    num_drafts: Ints
    decodes: Flags
    samples: Flags
    ends: Flags
    block_tables: npt.NDArray[np.int32]
    num_tokens: int
    uniform_decode: bool
    same_rows: bool


class Scheduler:
    """Plans steps until every request that was added has all its tokens.

    Args:
        pages: where a request's pages come from; nothing else has to take from it, but may.
        num_pages: pages there are when all are free.
        page_size: tokens of one page.
        max_num_reqs: requests that run at once.
        max_num_tokens: tokens of a step, at least ``max_num_reqs * (1 + draft_tokens)``, so that prompts are never
            kept out for good.
        max_seq_len: tokens of a request, prompt and new ones together.
        vocab_size: token ids lie below it; None where it is not known.
        draft_tokens: most guesses of a row.

    Raises:
        OptionError: a limit is below 1, or there are fewer tokens than decoding requests need.
    """

    def __init__(
        self,
        pages: PageSource,
        *,
        num_pages: int,
        page_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
        vocab_size: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        limits = {"num_pages": num_pages, "page_size": page_size, "max_num_reqs": max_num_reqs}
        check_positive({**limits, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}, "a schedule")
        check_budget(max_num_reqs, max_num_tokens, draft_tokens)
        self._source = pages
        self._num_pages, self._page_size = num_pages, page_size
        self._max_num_tokens, self._max_seq_len = max_num_tokens, max_seq_len
        self._vocab_size, self._draft_tokens = vocab_size, draft_tokens
        self._waiting: deque[Request] = deque()
        self._slot_of: dict[Request, int] = {}  # in the order of admission
        self._pages_of: dict[Request, list[int]] = {}
        self._free_slots = list(range(max_num_reqs))[::-1]
        self._computed, self._prompt, self._new, self._limit = np.zeros((4, max_num_reqs), dtype=np.int64)
        most_pages = -(-max_seq_len // page_size)
        self._block_tables = np.zeros((max_num_reqs, most_pages), dtype=np.int32)
        self._running: list[Request] = []
        self._slots: Ints = np.zeros(0, dtype=np.int64)
        self._rows_changed = False
        self._decode: StepPlan | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse what could never run; nothing is kept.

        Raises:
            ShapeError: the request is longer than ``max_seq_len``, or needs more pages than there are.
            OptionError: a token of its prompt is not in the vocabulary.
        """
        if self._vocab_size is not None and request.prompt.max() >= self._vocab_size:
            raise OptionError(
                f"{request.name} holds a token that the model does not know",
                expected=f"token ids below {self._vocab_size}",
                found=str(request.prompt.max()),
                remedy="use the tokenizer of this model",
            )
        if request.max_length > self._max_seq_len:
            raise ShapeError(
                f"{request.name} is too long",
                expected=f"at most {self._max_seq_len} tokens, prompt and new ones together (max_seq_len)",
                found=f"{len(request.prompt)} + {request.max_new_tokens}",
                remedy="shorten the prompt, lower max_new_tokens, or make the manager with a larger max_seq_len",
            )
        if self._pages_needed(request) > self._num_pages:
            raise ShapeError(
                f"{request.name} needs more pages than there are",
                expected=f"at most {self._num_pages} pages of {self._page_size} tokens (num_pages)",
                found=f"{self._pages_needed(request)} pages for {request.max_length} tokens",
                remedy="make the manager with more pages, or lower max_new_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request behind all others.

        Raises:
            OptionError, ShapeError: as :meth:`check`; or the request is here already.
        """
        self.check(request)
        if request in self._slot_of or request in self._waiting:
            raise OptionError(
                f"{request.name} was added twice",
                expected="a request of its own for each text to generate",
                found="the same object",
                remedy="make another Request with the same prompt",
            )
        self._waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever it has left to do, and give its pages back; one that is not here stays out.

        Its pages may be another request's in the next step: steps run in the order they were planned.
        """
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._source.free(self._pages_of.pop(request))
            self._free_slots.append(slot)
            self._rows_changed = True
        elif request in self._waiting:
            self._waiting.remove(request)

    def close(self) -> None:
        """Take out every request."""
        self._waiting.clear()
        for request in list(self._slot_of):
            self.finish(request)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._slot_of)

    def has_work(self) -> bool:
        """Whether some request waits, or has a token to come that no step was planned for."""
        if self._rows_changed:
            self._collect_rows()
        return bool(self._waiting or self._running)

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self, guess: Guess | None = None, *, fill: bool = False) -> StepPlan | None:
        """The next step; None when there is nothing to run.

        Args:
            guess: asked once for each row past its prompt that has more than one token to come; None: no drafts.
            fill: give all rows ``1 + draft_tokens`` tokens where none is longer, by computing tokens once more that
                stand before theirs: a uniform decode, whatever was guessed.

        Raises:
            OutOfPagesError: requests wait for pages that others than this scheduler's requests hold.
        """
        self._admit()
        if self._rows_changed:
            self._collect_rows()
        if not self._running:
            return None
        plan = self._decode_again() if self._decode is not None else self._mixed(guess, fill)
        if plan.ends.any():
            self._rows_changed = True
        # With one token a row there was one for every row: a budget of at least max_num_reqs is not used up then.
        repeats = plan.uniform_decode and plan.samples.all() and not self._rows_changed
        self._decode = plan if repeats and not self._draft_tokens else None
        return plan

    def accept(self, request: Request, num_drafts: int) -> None:
        """So many of a request's drafts in the last step were right: each is one more new token, in its place."""
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
            self._start(self._waiting.popleft(), self._source.allocate(needed))
        if self._waiting and not self._slot_of:
            raise OutOfPagesError(
                f"{self._waiting[0].name} waits for pages that nobody here will give back",
                expected=f"{self._pages_needed(self._waiting[0])} free pages when nothing runs",
                found=f"{self._source.num_free} of {self._num_pages}",
                remedy="finish or close whatever else generates with this manager",
            )

    def _start(self, request: Request, pages: list[int]) -> None:
        slot = self._free_slots.pop()
        self._slot_of[request], self._pages_of[request] = slot, pages
        self._computed[slot] = self._new[slot] = 0
        self._prompt[slot], self._limit[slot] = len(request.prompt), request.max_new_tokens
        self._block_tables[slot] = 0
        self._block_tables[slot, : len(pages)] = pages
        self._rows_changed = True

    def _collect_rows(self) -> None:
        """The requests that have a token to come; a request whose last token is planned only holds its pages."""
        self._running = [r for r, slot in self._slot_of.items() if self._new[slot] < self._limit[slot]]
        self._slots = np.array([self._slot_of[request] for request in self._running], dtype=np.int64)
        self._rows_changed, self._decode = False, None

    def _decode_again(self) -> StepPlan:
        """One more token for each row of the step before: a few array operations, whatever the history."""
        last = self._decode
        assert last is not None
        slots = self._slots
        self._computed[slots] += 1
        self._new[slots] += 1
        return StepPlan(
            requests=last.requests,
            slots=slots,
            query_lens=last.query_lens,
            seq_lens=last.seq_lens + 1,
            num_drafts=last.num_drafts,
            decodes=last.samples,
            samples=last.samples,
            ends=self._new[slots] >= self._limit[slots],
            block_tables=last.block_tables,
            num_tokens=last.num_tokens,
            uniform_decode=True,
            same_rows=True,
        )

    def _mixed(self, guess: Guess | None, fill: bool) -> StepPlan:
        """One token and its drafts for each row past its prompt, the rest of the budget for prompts in order."""
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
        """How many drafts each running request has: one fewer than tokens to come, since one is new in any case."""
        most = np.minimum(self._draft_tokens, self._limit[self._slots] - self._new[self._slots] - 1)
        drafts = np.zeros(len(decodes), dtype=np.int64)
        for row in np.flatnonzero(decodes & (most > 0)).tolist():
            drafts[row] = guess(self._running[row], int(most[row]))
        return drafts


def check_budget(max_num_reqs: int, max_num_tokens: int, draft_tokens: int) -> None:
    """Refuse steps in which decoding requests, with their drafts, would leave no token to the others.

    Raises:
        OptionError: they would, or ``draft_tokens`` is no count.
    """
    if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int) or draft_tokens < 0:
        raise OptionError(
            "draft_tokens is no number of guesses",
            expected="an integer of at least 1, or 0 for none",
            found=repr(draft_tokens),
            remedy="pass draft_tokens=3, or leave it out",
        )
    if max_num_tokens < max_num_reqs * (1 + draft_tokens):
        limit = "max_num_reqs" + (" * (1 + draft_tokens)" if draft_tokens else "")
        raise OptionError(
            "decoding requests would leave no token to the others",
            expected=f"max_num_tokens of at least {limit}, {max_num_reqs * (1 + draft_tokens)}",
            found=str(max_num_tokens),
            remedy="raise max_num_tokens, or lower max_num_reqs" + (" or draft_tokens" if draft_tokens else ""),
        )
