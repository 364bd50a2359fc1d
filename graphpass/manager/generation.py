"""Generating text: a Hugging Face decoder under a manager, and the loop that keeps it busy.

The tokens of a step are the input of the next one, and both lie on the device. So a step is launched before the tokens
of the one before have been read (*running ahead*): the host plans, fills and reads while the device computes. What the
host has to know of a token is only whether it ends its request; that is then seen one step late, and the surplus token
is dropped.

With draft tokens a step brings several tokens of a request, and the host has to know them to guess the next ones: steps
run in turn then. Fewer of them make up for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from graphpass.dispatch import AttentionSupport, CudagraphDispatcher, LoraKeys
from graphpass.errors import OptionError, OutOfPagesError
from graphpass.keys import BatchDescriptor
from graphpass.manager.attention import PagedAttention
from graphpass.manager.batch import Batch, InputSpec
from graphpass.manager.cudagraphs import CudaGraphManager
from graphpass.manager.drafting import Drafter
from graphpass.manager.lora import LoraAdapters, StepAdapters, lora_keys, without_lora
from graphpass.manager.paged import PagedRequests
from graphpass.manager.scheduler import Request, Scheduler, StepPlan, check_budget
from graphpass.manager.speculation import GenerationStats, Speculation
from graphpass.manager.steptokens import StepInputs, StepTokens
from graphpass.modes import CUDAGraphMode

__all__ = ["Generation", "GenerationStats", "NewToken", "causal_lm", "default_capture_sizes", "generate"]


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
        manager: made by :func:`causal_lm`, and captured.
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
        self._adapters = StepAdapters(
            manager.model, self._open, max_num_tokens=buffers["input_ids"].shape[1], device=self._device
        )

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


def generate(
    manager: CudaGraphManager,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Collection[int] | None = None,
    adapters: Sequence[str | None] | None = None,
    progress: bool = True,
    run_ahead: bool | None = None,
    drafter: Drafter | None = None,
) -> list[list[int]]:
    """Greedy continuations of many prompts, batched as they come and go.

    Args:
        manager: made by :func:`causal_lm`; it is captured first, where it is not.
        prompts: token ids, one sequence a request.
        max_new_tokens: for all, or one for each.
        eos_token_id: tokens that end a request; one that came is its last token.
        adapters: the LoRA adapter of each prompt, None for the model alone; None: of all prompts.
        progress: show a bar that counts tokens.
        run_ahead: see :class:`Generation`.
        drafter: see :class:`Generation`; whatever it guesses, the tokens are the same.

    Returns:
        The new tokens of each request, in the order of the prompts.

    Raises:
        OptionError, ShapeError: a request could never run; it is named, and nothing has run then.
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
    requests = [
        Request.of(f"request {index}", prompt, limit, eos_token_id, adapter=name)
        for index, (prompt, limit, name) in enumerate(zip(prompts, limits, names, strict=True))
    ]
    made: dict[Request, list[int]] = {request: [] for request in requests}
    with Generation(manager, run_ahead=run_ahead, drafter=drafter) as generation:
        for request in requests:
            generation.add(request)
        if manager.needs_capture():
            manager.capture()
        with tqdm(total=sum(limits), desc="generating", unit="token", leave=False, disable=not progress) as bar:
            while not generation.is_done():
                found = generation.step()
                for new in found:
                    made[new.request].append(new.token)
                bar.update(len(found))
                if generation.stats().num_drafted:
                    bar.set_postfix_str(f"{generation.stats().acceptance:.0%} of the drafts accepted", refresh=False)
            while manager.run_idle():
                pass  # other data-parallel ranks still have work
    return list(made.values())


class NextToken(torch.nn.Module):
    """A causal language model that answers with the likeliest next token of each request.

    It takes the tokens of all requests in one row, as paged attention wants them: ``input_ids`` and ``position_ids``
    (1, tokens), ``last_rows`` (requests,), the position of each request's last token in that row; it returns token ids
    (requests,), int64. Only the last tokens' logits are computed, and compared in float32.

    To verify k drafts, ``last_rows`` is (requests, 1 + k): the positions of each request's last ``1 + k`` tokens, its
    first one repeated in front where it has fewer; and what it returns is (requests, 1 + k).

    Args:
        model: a Hugging Face causal LM.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        return int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, last_rows: torch.Tensor) -> torch.Tensor:
        """See the class."""
        kept = last_rows.reshape(-1)
        made = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=kept)
        tokens: torch.Tensor = made.logits[0].float().argmax(-1)
        return tokens.view(last_rows.shape)


def causal_lm(
    model: torch.nn.Module,
    *,
    max_num_reqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    capture_sizes: Sequence[int] | None = None,
    seq_len_buckets: Sequence[int] | None = None,
    mode: str | CUDAGraphMode = "FULL_AND_PIECEWISE",
    page_size: int = 16,
    num_pages: int | None = None,
    draft_tokens: int = 0,
    compiler: str | None = None,
    adapters: LoraAdapters | None = None,
    lora: LoraKeys | None = None,
    **options: Any,
) -> CudaGraphManager:
    """A manager that generates text with a Hugging Face causal LM over a paged KV cache.

    The model's attention implementation becomes ``graphpass_paged``; nothing else of it changes.

    Args:
        model: a causal LM of the Llama kind (Llama, Qwen3, Mistral, ...), on its device, in eval mode.
        max_num_reqs: requests that run at once.
        max_num_tokens: tokens of one step, at least ``max_num_reqs * (1 + draft_tokens)``; longer prompts come in
            chunks.
        max_seq_len: tokens of a request, prompt and new ones together.
        capture_sizes: token counts to capture; None: powers of two and what is halfway between them.
        seq_len_buckets: longest sequences that FULL graphs are made for, besides ``max_seq_len``; None: 256, doubled.
        mode: which graphs. ``FULL`` makes them for mixed batches as well, each of which gathers keys for the most
            requests at the longest length.
        page_size: tokens of one page of the cache.
        num_pages: of the cache; None: enough for ``max_num_reqs`` requests of ``max_seq_len``.
        draft_tokens: guesses of the next tokens that a step verifies for each request (speculative decoding): a
            decode graph then has ``1 + draft_tokens`` tokens a request. 0: none.
        compiler: for regions; None: ``inductor`` on CUDA, ``aot_eager`` elsewhere.
        adapters: LoRA adapters that requests may run with, made of this model; None for none.
        lora: which numbers of adapters get graphs of their own; None: none, and any.
        options: the manager's.

    Raises:
        OptionError: a size or an option cannot be used.
    """
    device = next(model.parameters()).device
    asked = CUDAGraphMode.parse(mode)
    check_budget(max_num_reqs, max_num_tokens, draft_tokens)
    attention = PagedAttention.for_model(
        model,
        num_pages=num_pages if num_pages is not None else max_num_reqs * -(-max_seq_len // page_size),
        page_size=page_size,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        # Graphs of mixed batches are made for those who ask for them.
        support=AttentionSupport.ALWAYS if asked.mixed_mode() is CUDAGraphMode.FULL else AttentionSupport.UNIFORM_BATCH,
    )
    dispatcher = _dispatcher(
        asked,
        default_capture_sizes(max_num_tokens) if capture_sizes is None else capture_sizes,
        _doubled(max_seq_len) if seq_len_buckets is None else seq_len_buckets,
        attention,
        lora_keys(adapters, model, lora),
        query_len=1 + draft_tokens,
    )
    last_rows = (max_num_reqs, 1 + draft_tokens) if draft_tokens else (max_num_reqs,)
    inputs = [
        InputSpec("input_ids", (1, max_num_tokens), torch.int64, token_dim=1),
        InputSpec("position_ids", (1, max_num_tokens), torch.int64, token_dim=1),
        InputSpec("last_rows", last_rows, torch.int64, token_dim=None, request_dim=0),
    ]
    wrapped: torch.nn.Module = NextToken(model)
    if adapters is not None:
        wrapped = adapters.wrap(wrapped)
        inputs += adapters.input_specs(max_num_tokens)
    chosen = compiler or ("inductor" if device.type == "cuda" else "aot_eager")
    return CudaGraphManager(wrapped, dispatcher, inputs, attention=attention, compiler=chosen, **options)


def default_capture_sizes(max_num_tokens: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and ``max_num_tokens``: at most a third of a batch is padding."""
    powers = [1 << n for n in range(max_num_tokens.bit_length())]
    sizes = {*powers, *(power + power // 2 for power in powers if power > 1), max_num_tokens}
    return sorted(size for size in sizes if size <= max_num_tokens)


def _doubled(max_seq_len: int, smallest: int = 256) -> list[int]:
    return [smallest << n for n in range(max_seq_len.bit_length()) if smallest << n < max_seq_len]


def _dispatcher(
    mode: CUDAGraphMode,
    sizes: Sequence[int],
    buckets: Sequence[int],
    attention: PagedAttention,
    lora: LoraKeys | None,
    *,
    query_len: int,
) -> CudagraphDispatcher:
    """The keys that some batch can reach.

    Only FULL graphs bake a longest sequence in: PIECEWISE keys, which serve any, are made for one. And a batch of one
    token is a uniform decode, unless drafts come with it, so where decode has graphs of its own, mixed batches have two
    tokens or more.

    Raises:
        OptionError: a bucket is none, or no sequence is as long as a token with its drafts.
    """
    if any(isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1 for bucket in buckets):
        raise OptionError(
            "seq_len_buckets cannot be used",
            expected="integers of at least 1",
            found=str(list(buckets)),
            remedy="leave it out to double from 256",
        )
    if query_len > attention.max_seq_len:
        raise OptionError(
            "no text has room for so many draft tokens",
            expected=f"draft_tokens below max_seq_len, {attention.max_seq_len}",
            found=str(query_len - 1),
            remedy="lower draft_tokens: more than 7 seldom pay",
        )
    longest = (("max_seq_len", attention.max_seq_len),)
    # The dispatcher rounds its limit up to whole requests; the buffers end at it.
    sizes = [size for size in sizes if size <= attention.max_num_tokens] if query_len > 1 else sizes
    has_single = mode is CUDAGraphMode.FULL_AND_PIECEWISE and query_len == 1
    mixed_sizes = [size for size in sizes if size != 1] if has_single else []
    dispatcher = CudagraphDispatcher(
        mode,
        {"num_tokens": mixed_sizes or sizes, "max_seq_len": [attention.max_seq_len]},
        max_num_reqs=attention.max_num_reqs,
        max_num_tokens=attention.max_num_tokens,
        lora=lora,
        uniform_decode_query_len=query_len,
    )
    # One token is one request, with one adapter or none.
    for count in (0,) if lora is None else sorted({*lora.count_table()[:2]}):
        if mixed_sizes and 1 in sizes:
            of_one = BatchDescriptor(1, 1, True, has_lora=count > 0, num_active_loras=count, extra=longest)
            dispatcher.add_key(CUDAGraphMode.FULL, of_one)
    for key in dispatcher.keys[CUDAGraphMode.FULL]:
        for bucket in sorted(set(buckets)):
            if (query_len if key.uniform else 1) <= bucket < attention.max_seq_len:
                dispatcher.add_key(CUDAGraphMode.FULL, replace(key, extra=(("max_seq_len", bucket),)))
    return dispatcher


def _paged_attention(manager: CudaGraphManager) -> PagedAttention:
    attention = manager.attention
    wanted = {"input_ids", "position_ids", "last_rows"}
    if isinstance(attention, PagedAttention) and wanted <= manager.buffers.keys():
        return attention
    raise OptionError(
        "this manager does not generate text",
        expected="a manager made by CudaGraphManager.for_causal_lm",
        found=f"inputs {sorted(manager.buffers)}, attention {type(attention).__name__}",
        remedy="make it with for_causal_lm(model, ...)",
    )
