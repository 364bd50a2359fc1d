"""The generation loop: plans a step, launches it on a manager, and reads its tokens.

See Note [Running ahead] and Note [Draft tokens].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from graphpass.errors import OptionError, OutOfPagesError
from graphpass.progress import progress_bar
from graphpass.serving.batch import Batch
from graphpass.serving.manager import CudaGraphManager
from graphpass.text.drafting import Drafter, NgramDrafter, Speculation
from graphpass.text.lora import LoraAdapters, LoraModel
from graphpass.text.paged import PagedAttention, PagedRequests
from graphpass.text.scheduler import Request, Scheduler, StepPlan
from graphpass.text.step import StepTensors


@dataclass(frozen=True, slots=True, eq=False)
class NewToken:
    """A new token of a request."""

    request: Request  #: the request
    token: int  #: the token id
    is_last: bool  #: the request has ended, with an end token or with ``max_new_tokens`` tokens


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts of a generation so far."""

    num_steps: int  #: launched steps
    num_tokens: int  #: returned new tokens
    num_drafted: int = 0  #: verified drafts
    num_accepted: int = 0  #: accepted drafts

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted, 0 to 1; 0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


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
        attention, buffers, model = manager.attention, manager.buffers, manager.model
        wanted = {"input_ids", "position_ids", "last_rows"}
        if not isinstance(attention, PagedAttention) or not wanted <= buffers.keys():
            raise OptionError(
                "this manager does not generate text",
                expected="the manager of a CausalLM",
                found=f"inputs {sorted(buffers)}, attention {type(attention).__name__}",
                remedy="pass CausalLM(model, ...).manager",
            )
        self._manager, self._steps = manager, manager.unattended()
        max_num_tokens, last_rows = buffers["input_ids"].shape[1], buffers["last_rows"]
        draft_tokens = last_rows.shape[1] - 1 if last_rows.dim() > 1 else 0
        # Classes of this package whose code runs in each step, unlike those of a user.
        self._is_own = type(attention) is PagedAttention and type(drafter) in (NgramDrafter, type(None))
        _check_drafting(draft_tokens, drafter, run_ahead)
        is_adapted = isinstance(model, LoraModel)
        self._adapters: LoraAdapters | None = model.adapters if is_adapted else None
        vocab_size = getattr(model.model if is_adapted else model, "vocab_size", None)
        self._speculation = None
        if draft_tokens:
            drafter = NgramDrafter() if drafter is None else drafter
            self._speculation = Speculation(drafter, draft_tokens, vocab_size)
        self._scheduler = Scheduler(
            attention.pages,
            page_size=attention.cache.page_size,
            max_num_reqs=len(last_rows),
            max_num_tokens=max_num_tokens,
            max_seq_len=attention.max_seq_len,
            vocab_size=vocab_size,
            draft_tokens=draft_tokens,
        )
        device = last_rows.device
        self._runs_ahead = (device.type == "cuda" and not draft_tokens) if run_ahead is None else run_ahead
        self._tensors = StepTensors(max_num_tokens, last_rows.shape, device, self._adapters, manager.timeout_s)
        self._num_steps = self._num_tokens = 0
        self._pending: StepPlan | None = None
        self._open: set[Request] = set()
        if self._adapters is not None:
            self._adapters.watch(self.adapters_in_use)

    def check(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            OptionError, ShapeError: the request is too long, needs more pages than the cache has, contains a token
                outside of the vocabulary, or its adapter is not loaded.
        """
        self._check_adapter(request)
        self._scheduler.check(request)

    def _check_adapter(self, request: Request) -> None:
        if request.adapter is None:
            return
        if self._adapters is None:
            raise OptionError(
                f"{request.name} has an adapter, but the manager has no adapters",
                expected="the manager of a CausalLM(model, adapters=LoraAdapters(model, ...))",
                found=f"adapter={request.adapter!r}",
                remedy="create the CausalLM with adapters, or leave adapter out",
            )
        self._adapters.slot_of(request.adapter)

    def add(self, request: Request) -> None:
        """Queue a request. It starts after all earlier ones, when rows and pages are free.

        Raises:
            OptionError, ShapeError: the request can never run, or was added before.
        """
        self._check_adapter(request)
        self._scheduler.add(request)
        self._open.add(request)

    def cancel(self, request: Request) -> None:
        """End a request: :meth:`step` returns no further token of it, and its pages are free."""
        self._end(request)

    def adapters_in_use(self) -> set[str | None]:
        """The adapters of all requests that have not ended; None stands for those without one."""
        return {request.adapter for request in self._open}

    def is_done(self) -> bool:
        """Whether every request that was added has ended and all tokens have been returned."""
        return self._pending is None and not self._scheduler.has_work()

    def step(self) -> list[NewToken]:
        """Launch the next step.

        Returns:
            The new tokens of this step; those of the step before if this object runs ahead.

        Raises:
            OutOfPagesError: no request runs, and other users of the cache have the pages that the queued ones need.
            GraphpassError: the manager could not run the step. All requests are dropped.
        """
        self._steps.attended()  # guard: generation_steps_of_a_caller
        return self._step()

    def _step(self) -> list[NewToken]:
        """:meth:`step`, where no user code has run since the last one."""
        try:
            plan = self._plan()
        except OutOfPagesError:
            if self._pending is None:
                raise
            plan = None
        try:
            if plan is not None:
                self._launch(plan)
            finished, self._pending = (self._pending, plan) if self._runs_ahead else (plan, None)
            new_tokens = [] if finished is None else self._read(finished)
        except BaseException:
            self.close()
            raise
        self._num_tokens += len(new_tokens)
        return new_tokens

    def stats(self) -> GenerationStats:
        """Numbers of steps, new tokens and drafts so far."""
        drafts = self._speculation
        counts = (0, 0) if drafts is None else (drafts.num_drafted, drafts.num_accepted)
        return GenerationStats(self._num_steps, self._num_tokens, *counts)

    def close(self) -> None:
        """Drop every request and free its pages; the manager stays open."""
        self._scheduler.close()
        self._tensors.forget()
        if self._speculation is not None:
            self._speculation.close()
        self._open.clear()
        self._pending = None

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
        texts = None if self._speculation is None else self._speculation.texts(plan)
        inputs = self._tensors.inputs(plan, texts)
        lengths_and_pages: tuple[Any, ...] = (plan.query_lens, plan.seq_lens, plan.block_tables)
        if not self._is_own:
            self._steps.attended()  # guard: generation_code_of_a_caller
        tokens = self._steps.run(
            Batch(
                plan.num_tokens,
                inputs=inputs,
                num_reqs=len(plan.requests),
                uniform_decode=plan.uniform_decode,
                num_active_loras=self._tensors.num_active_loras,
                attention=PagedRequests(*lengths_and_pages),
            )
        )
        self._tensors.take(tokens.reshape(-1))
        if np.logical_or.reduce(plan.ends):
            for row in np.flatnonzero(plan.ends):
                self._scheduler.finish(plan.requests[row])

    def _read(self, plan: StepPlan) -> list[NewToken]:
        """Wait for a launched step; returns its tokens of open requests."""
        if self._speculation is not None:
            return self._read_verified(plan, self._speculation)
        new_tokens, still_open = [], self._open
        rows = zip(plan.requests, self._tensors.oldest(), plan.samples.tolist(), plan.ends.tolist(), strict=True)
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
        for request, tokens, is_ended in speculation.verify(plan, self._tensors.oldest()):
            *others, last = tokens
            new_tokens += [NewToken(request, token, is_last=False) for token in others]
            new_tokens.append(NewToken(request, last, is_ended))
            if is_ended:
                self._end(request)
            else:
                self._scheduler.accept(request, len(others))
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
    """A request for each prompt; see :meth:`CausalLM.generate`."""
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
    """The new tokens of each request; see :meth:`CausalLM.generate`."""
    texts: dict[Request, list[int]] = {request: [] for request in requests}
    total = sum(request.max_new_tokens for request in requests)
    with Generation(manager, run_ahead=run_ahead, drafter=drafter) as generation:
        for request in requests:
            generation.add(request)
        if manager.needs_capture() and not manager.stats().left_out:  # keys left out exceed the memory limit
            manager.capture()
        with progress_bar(None, progress, total=total, desc="generating", unit="token") as bar:
            while not generation.is_done():
                new_tokens = generation._step()
                for new in new_tokens:
                    texts[new.request].append(new.token)
                bar.update(len(new_tokens))
                if generation._speculation is not None and (stats := generation.stats()).num_drafted:
                    bar.set_postfix_str(f"{stats.acceptance:.0%} of the drafts accepted", refresh=False)
            while manager.run_idle():
                pass  # other data-parallel ranks still have work
    return list(texts.values())


def _check_drafting(draft_tokens: int, drafter: Drafter | None, run_ahead: bool | None) -> None:
    if drafter is not None and not draft_tokens:
        raise OptionError(
            "this manager verifies no drafts",
            expected="a manager with draft_tokens=1 or more, or no drafter",
            found=type(drafter).__name__,
            remedy="pass CausalLM(model, draft_tokens=3, ...).manager",
        )
    if run_ahead and draft_tokens:
        raise OptionError(
            "a manager with draft_tokens cannot run ahead: drafts depend on the tokens of the step before",
            expected="run_ahead=False or None",
            found=f"run_ahead={run_ahead!r}",
            remedy="leave run_ahead out, or create the model without draft_tokens",
        )
