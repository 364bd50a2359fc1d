"""The generation loop: plans a step, launches it on a manager, and reads its tokens.

On CUDA a step is launched before the tokens of the one before are read, see Note [Running ahead]. Steps with draft
tokens run one after the other, see Note [Draft tokens].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from graphpass.engine.batch import Batch
from graphpass.engine.manager import CudaGraphManager
from graphpass.errors import OptionError, OutOfPagesError
from graphpass.ladder.progress import progress_bar
from graphpass.text.drafting import Drafter
from graphpass.text.lora.adapters import StepAdapters, without_lora
from graphpass.text.paged.attention import PagedAttention
from graphpass.text.paged.cache import PagedRequests
from graphpass.text.request import Request
from graphpass.text.scheduler import ScheduleLimits, Scheduler, StepPlan
from graphpass.text.speculation import GenerationStats, Speculation
from graphpass.text.steptokens import StepInputs, StepTokens

__all__ = ["Generation", "NewToken", "complete", "requests_of"]


@dataclass(frozen=True, slots=True, eq=False)
class NewToken:
    """A new token of a request.

    Attributes:
        request: the request.
        token: the token id.
        is_last: the request has ended, with an end token or with ``max_new_tokens`` tokens.
    """

    request: Request
    token: int
    is_last: bool


class Generation:
    """Runs requests on a manager with continuous batching: :meth:`add` at any time, :meth:`step` until :meth:`is_done`.

    Args:
        manager: the captured manager of a :class:`CausalLM`. The caller owns it, and closes it after this object.
        run_ahead: launch a step before the tokens of the one before are read, see Note [Running ahead]. The tokens are
            the same. None: on CUDA without drafts. Not possible with drafts.
        drafter: guesses tokens for a manager with ``draft_tokens``; None: an :class:`NgramDrafter`.

    Raises:
        OptionError: the manager is not that of a :class:`CausalLM`; or a drafter was passed, but the manager has no
            ``draft_tokens``; or ``run_ahead`` is set, but it has.
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
            ScheduleLimits(
                num_pages=self._attention.cache.num_pages,
                page_size=self._attention.cache.page_size,
                max_num_reqs=max_num_reqs,
                max_num_tokens=max_num_tokens,
                max_seq_len=self._attention.max_seq_len,
                vocab_size=vocab_size,
                draft_tokens=draft_tokens,
            ),
        )
        self._runs_ahead = (self._device.type == "cuda" and not draft_tokens) if run_ahead is None else run_ahead
        self._inputs = StepInputs(max_num_tokens, max_num_reqs, self._device)
        self._tokens = StepTokens(buffers["last_rows"].numel(), self._device)
        self._num_steps = self._num_tokens = 0
        self._flying: StepPlan | None = None
        self._open: set[Request] = set()
        self._adapters = StepAdapters(manager.model, self._open, max_num_tokens=max_num_tokens, device=self._device)

    def check(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            OptionError, ShapeError: the request is too long, needs more pages than the cache has, contains a token
                outside of the vocabulary, or its adapter is not loaded.
        """
        self._adapters.check(request)
        self._scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request. It starts when all earlier requests have started and enough rows and pages are free.

        Raises:
            OptionError, ShapeError: the request can never run, or was added before.
        """
        self._adapters.check(request)
        self._scheduler.add(request)
        self._open.add(request)

    def cancel(self, request: Request) -> None:
        """End a request: :meth:`step` returns no further token of it, and its pages are free."""
        self._end(request)

    def is_done(self) -> bool:
        """Whether every request that was added has ended and all tokens have been returned."""
        return self._flying is None and not self._scheduler.has_work()

    def step(self) -> list[NewToken]:
        """Launch the next step.

        Returns:
            The new tokens of this step; those of the step before if this object runs ahead.

        Raises:
            OutOfPagesError: no request runs, and other users of the cache have the pages that the queued ones need. The
                queue is unchanged.
            GraphpassError: the manager could not run the step. All requests are dropped, and their pages are free.
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
            new_tokens = [] if landed is None else self._read(landed)
        except BaseException:
            self.close()
            raise
        self._num_tokens += len(new_tokens)
        return new_tokens

    def stats(self) -> GenerationStats:
        """Numbers of steps, new tokens and drafts so far."""
        drafts = (0, 0) if self._speculation is None else self._speculation.counts()
        return GenerationStats(self._num_steps, self._num_tokens, *drafts)

    def close(self) -> None:
        """Drop every request and free its pages; the manager stays open."""
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
        # To fit a decode graph, it is worth computing a few tokens again.
        has_decode_graphs = self._manager.dispatcher.mode.separate_routine()
        try:
            return self._scheduler.plan(self._speculation.guess, fill=has_decode_graphs)
        except OutOfPagesError:
            raise
        except BaseException:  # the drafter failed
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
        """Wait for a launched step and return its tokens; tokens of requests that have ended are dropped."""
        if self._speculation is not None:
            return self._read_verified(plan, self._speculation)
        new_tokens, still_open = [], self._open
        rows = zip(plan.requests, self._tokens.oldest(), plan.samples.tolist(), plan.ends.tolist(), strict=True)
        for request, token, samples, ends in rows:
            if not samples or request not in still_open:
                continue
            is_last = ends or token in request.eos_token_ids
            new_tokens.append(NewToken(request, token, is_last))
            if is_last:
                self._end(request)
        return new_tokens

    def _read_verified(self, plan: StepPlan, speculation: Speculation) -> list[NewToken]:
        new_tokens = []
        for verified in speculation.verify(plan, self._tokens.oldest()):
            *others, last = verified.tokens
            new_tokens += [NewToken(verified.request, token, is_last=False) for token in others]
            new_tokens.append(NewToken(verified.request, last, verified.is_ended))
            if verified.is_ended:
                self._end(verified.request)
            else:
                self._scheduler.accept(verified.request, len(others))
        return new_tokens

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
        OptionError: the number of limits or adapters is not that of the prompts, or a prompt is not valid.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    names: Sequence[str | None] = [None] * len(prompts) if adapters is None else list(adapters)
    for name, values in (("max_new_tokens", limits), ("adapters", names)):
        if len(values) != len(prompts):
            raise OptionError(
                f"{name} does not have one value for each prompt",
                expected=f"one value for all, or a sequence of {len(prompts)} values",
                found=f"{len(values)} values",
                remedy=f"pass as many values of {name} as prompts",
            )
    return [
        Request.of(f"request {index}", prompt, limit, eos_token_id, adapter=adapter)
        for index, (prompt, limit, adapter) in enumerate(zip(prompts, limits, names, strict=True))
    ]


def complete(
    manager: CudaGraphManager,
    requests: Sequence[Request],
    *,
    progress: bool | None = None,
    run_ahead: bool | None = None,
    drafter: Drafter | None = None,
) -> list[list[int]]:
    """Run requests until all have ended; see :meth:`CausalLM.generate`.

    Returns:
        The new tokens of each request.

    Raises:
        OptionError, ShapeError: a request can never run; the error names it, and nothing has run.
    """
    texts: dict[Request, list[int]] = {request: [] for request in requests}
    total = sum(request.max_new_tokens for request in requests)
    with Generation(manager, run_ahead=run_ahead, drafter=drafter) as generation:
        for request in requests:
            generation.add(request)
        if manager.needs_capture() and not manager.stats().left_out:  # keys left out exceed the memory limit
            manager.capture()
        with progress_bar(None, progress, total=total, desc="generating", unit="token") as bar:
            while not generation.is_done():
                new_tokens = generation.step()
                for new in new_tokens:
                    texts[new.request].append(new.token)
                bar.update(len(new_tokens))
                stats = generation.stats()
                if stats.num_drafted:
                    bar.set_postfix_str(f"{stats.acceptance:.0%} of the drafts accepted", refresh=False)
            while manager.run_idle():
                pass  # other data-parallel ranks still have work
    return list(texts.values())


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
