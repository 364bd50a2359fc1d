"""Generating text: the loop that keeps a decoder under a manager busy.

The tokens of a step are the input of the next one, and both lie on the device. So a step is launched before the tokens
of the one before have been read (*running ahead*): the host plans, fills and reads while the device computes. What the
host has to know of a token is only whether it ends its request; that is then seen one step late, and the surplus token
is dropped.

With draft tokens a step brings several tokens of a request, and the host has to know them to guess the next ones: steps
run in turn then. Fewer of them make up for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from graphpass.engine.batch import Batch
from graphpass.engine.manager import CudaGraphManager
from graphpass.errors import OptionError, OutOfPagesError
from graphpass.text.drafting import Drafter
from graphpass.text.lora.adapters import StepAdapters, without_lora
from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PagedRequests
from graphpass.text.request import Request
from graphpass.text.scheduler import Scheduler, StepPlan
from graphpass.text.speculation import GenerationStats, Speculation
from graphpass.text.steptokens import StepInputs, StepTokens

__all__ = ["Generation", "NewToken", "complete", "requests_of"]


@dataclass(frozen=True, slots=True, eq=False)
class NewToken:
    """A token that has become known.

    Attributes:
        request: whose it is.
        token: its id.
        is_last: the request has ended: with an end token, or because it has as many as it asked for.
    """

    request: Request
    token: int
    is_last: bool


class Generation:
    """Requests that run on a manager: add them at any time, step until done, and read the tokens as they come.

    Args:
        manager: of a :class:`CausalLM`, captured. The caller keeps it, and closes it after this object.
        run_ahead: launch a step before the tokens of the one before are read. None: on CUDA, where there is something
            to overlap. The tokens are the same. With drafts, which need the tokens that were read, never.
        drafter: guesses tokens, where the manager was made with ``draft_tokens``; None: an :class:`NgramDrafter`.

    Raises:
        OptionError: the manager does not hold a decoder over paged attention; or one that verifies no drafts, but there
            is a drafter; or one that does, but it is to run ahead.
    """

    def __init__(
        self, manager: CudaGraphManager, *, run_ahead: bool | None = None, drafter: Drafter | None = None
    ) -> None:
        self._manager = manager
        self._attention = _paged_attention(manager)
        buffers = manager.buffers
        self._device = buffers["input_ids"].device
        max_num_tokens, max_num_reqs = buffers["input_ids"].shape[1], buffers["last_rows"].shape[0]
        vocab_size = getattr(without_lora(manager.model), "vocab_size", None)
        self._speculation = Speculation.over(buffers, drafter, vocab_size, run_ahead=run_ahead)
        draft_tokens = 0 if self._speculation is None else self._speculation.draft_tokens
        self._scheduler = Scheduler(
            self._attention.pages,
            num_pages=self._attention.cache.num_pages,
            page_size=self._attention.cache.page_size,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=self._attention.max_seq_len,
            vocab_size=vocab_size,
            draft_tokens=draft_tokens,
        )
        self._runs_ahead = (self._device.type == "cuda" and not draft_tokens) if run_ahead is None else run_ahead
        self._inputs = StepInputs(max_num_tokens, max_num_reqs, self._device)
        self._tokens = StepTokens(buffers["last_rows"].numel(), self._device)
        self._num_steps = self._num_tokens = 0
        self._flying: StepPlan | None = None
        self._open: set[Request] = set()
        self._adapters = StepAdapters(manager.model, self._open, max_num_tokens=max_num_tokens, device=self._device)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            OptionError, ShapeError: it is too long, needs more pages than there are, holds no valid token, or its
                adapter is not loaded.
        """
        self._adapters.check(request)
        self._scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; it starts as soon as those before it leave it a place and pages.

        Raises:
            OptionError, ShapeError: it could never run, or was added before.
        """
        self._adapters.check(request)
        self._scheduler.add(request)
        self._open.add(request)

    def cancel(self, request: Request) -> None:
        """Take a request out: no further token of it comes, and its pages are free."""
        self._end(request)

    def is_done(self) -> bool:
        """Whether every request that was added has ended and all tokens have been returned."""
        return self._flying is None and not self._scheduler.has_work()

    def step(self) -> list[NewToken]:
        """Launch the next step and return the tokens that are known by now.

        They are this step's, or running ahead those of the step before.

        Raises:
            OutOfPagesError: requests wait for pages that others than these requests hold; they go on waiting.
            GraphpassError: the manager's own. All requests are given up then, and their pages are free.
        """
        try:
            plan = self._plan()
        except OutOfPagesError:
            if self._flying is None:
                raise
            plan = None
        try:
            if plan is not None:
                self._launch(plan)
            if not self._runs_ahead:
                self._flying = plan
            landed, self._flying = self._flying, plan if self._runs_ahead else None
            found = [] if landed is None else self._read(landed)
        except BaseException:
            self.close()
            raise
        self._num_tokens += len(found)
        return found

    def stats(self) -> GenerationStats:
        """Steps, tokens and drafts so far."""
        drafts = (0, 0) if self._speculation is None else self._speculation.counts()
        return GenerationStats(self._num_steps, self._num_tokens, *drafts)

    def close(self) -> None:
        """Give up every request and free their pages."""
        self._scheduler.close()
        self._tokens.forget()
        if self._speculation is not None:
            self._speculation.close()
        self._open.clear()
        self._flying = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self) -> StepPlan | None:
        if self._speculation is None:
            return self._scheduler.plan()
        # Where decode has graphs of its own, they are worth a few tokens that are computed once more.
        has_decode_graphs = self._manager.dispatcher.mode.separate_routine()
        try:
            return self._scheduler.plan(self._speculation.guess, fill=has_decode_graphs)
        except OutOfPagesError:
            raise
        except BaseException:  # of a drafter
            self.close()
            raise

    def _launch(self, plan: StepPlan) -> None:
        self._num_steps += 1
        drafts, adapters = self._speculation, self._adapters.of(plan)
        inputs = self._inputs.of(plan, self._tokens.on_device) if drafts is None else drafts.inputs(plan)
        lengths_and_pages: tuple[Any, ...] = (plan.query_lens, plan.seq_lens, plan.block_tables)
        tokens = self._manager.run(
            Batch(
                plan.num_tokens,
                inputs={**inputs, **adapters.inputs},
                num_reqs=len(plan.requests),
                uniform_decode=plan.uniform_decode,
                num_active_loras=adapters.num_active,
                attention=PagedRequests(*lengths_and_pages),
            )
        )
        self._tokens.take(tokens.reshape(-1))
        if plan.ends.any():
            for row in np.flatnonzero(plan.ends):
                self._scheduler.finish(plan.requests[row])

    def _read(self, plan: StepPlan) -> list[NewToken]:
        """The tokens of a step that was launched; those behind the end of a request are dropped."""
        if self._speculation is not None:
            return self._read_verified(plan, self._speculation)
        found, still_open = [], self._open
        rows = zip(plan.requests, self._tokens.oldest(), plan.samples.tolist(), plan.ends.tolist(), strict=True)
        for request, token, samples, ends in rows:
            if not samples or request not in still_open:
                continue
            is_last = ends or token in request.eos_token_ids
            found.append(NewToken(request, token, is_last))
            if is_last:
                self._end(request)
        return found

    def _read_verified(self, plan: StepPlan, speculation: Speculation) -> list[NewToken]:
        found = []
        for verified in speculation.verify(plan, self._tokens.oldest()):
            *others, last = verified.tokens
            found += [NewToken(verified.request, token, is_last=False) for token in others]
            found.append(NewToken(verified.request, last, verified.is_ended))
            if verified.is_ended:
                self._end(verified.request)
            else:
                self._scheduler.accept(verified.request, len(others))
        return found

    def _end(self, request: Request) -> None:
        self._open.discard(request)
        self._scheduler.finish(request)
        if self._speculation is not None:
            self._speculation.forget(request)


def requests_of(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Collection[int] | None = None,
    adapters: Sequence[str | None] | None = None,
) -> list[Request]:
    """A request for each prompt, named by its position; see :meth:`CausalLM.generate`.

    Raises:
        OptionError: the limits or adapters are not one for each prompt, or a prompt cannot be run.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    names: Sequence[str | None] = [None] * len(prompts) if adapters is None else list(adapters)
    for problem, given in (
        ("max_new_tokens does not say how long each text may get", limits),
        ("adapters does not say which one each text is for", names),
    ):
        if len(given) != len(prompts):
            raise OptionError(
                problem,
                expected=f"one value, or one for each of {len(prompts)} prompts",
                found=f"{len(given)} of them",
                remedy="pass one for each prompt",
            )
    return [
        Request.of(f"request {index}", prompt, limit, eos_token_id, adapter=name)
        for index, (prompt, limit, name) in enumerate(zip(prompts, limits, names, strict=True))
    ]


def complete(
    manager: CudaGraphManager,
    requests: Sequence[Request],
    *,
    progress: bool = True,
    run_ahead: bool | None = None,
    drafter: Drafter | None = None,
) -> list[list[int]]:
    """Run these requests until each has all its tokens, and return those; see :meth:`CausalLM.generate`.

    Raises:
        OptionError, ShapeError: a request could never run; it is named, and nothing has run then.
    """
    made: dict[Request, list[int]] = {request: [] for request in requests}
    total = sum(request.max_new_tokens for request in requests)
    with Generation(manager, run_ahead=run_ahead, drafter=drafter) as generation:
        for request in requests:
            generation.add(request)
        if manager.needs_capture() and not manager.stats().left_out:  # there is no room for those
            manager.capture()
        with tqdm(total=total, desc="generating", unit="token", leave=False, disable=not progress) as bar:
            while not generation.is_done():
                found = generation.step()
                for new in found:
                    made[new.request].append(new.token)
                bar.update(len(found))
                stats = generation.stats()
                if stats.num_drafted:
                    bar.set_postfix_str(f"{stats.acceptance:.0%} of the drafts accepted", refresh=False)
            while manager.run_idle():
                pass  # other data-parallel ranks still have work
    return list(made.values())


def _paged_attention(manager: CudaGraphManager) -> PagedAttention:
    attention = manager.attention
    wanted = {"input_ids", "position_ids", "last_rows"}
    if isinstance(attention, PagedAttention) and wanted <= manager.buffers.keys():
        return attention
    raise OptionError(
        "this manager does not generate text",
        expected="the manager of a CausalLM",
        found=f"inputs {sorted(manager.buffers)}, attention {type(attention).__name__}",
        remedy="pass CausalLM(model, ...).manager",
    )
