"""Generates text with a Hugging Face decoder: sets up inputs, keys and paged attention of a manager for it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.dispatchkeys import DispatchReason, LoraKeys
from graphpass.dispatch.owngraphs import LEAST_REPLAYS
from graphpass.errors import OptionError, is_integer
from graphpass.keys import AttentionSupport, BatchDescriptor, CUDAGraphMode
from graphpass.report import Report
from graphpass.serving.batch import InputSpec
from graphpass.serving.estimate import Key
from graphpass.serving.manager import CudaGraphManager
from graphpass.serving.stats import ManagerStats
from graphpass.text.drafting import Drafter
from graphpass.text.experts import compute_experts_by_token
from graphpass.text.generation import complete, requests_of
from graphpass.text.hfmodel import NextToken, ServedModel, fix_frequencies, refuse_stateful
from graphpass.text.lora import LoraAdapters, lora_keys
from graphpass.text.paged import PagedAttention
from graphpass.text.scheduler import check_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig:
    """Sizes and keys of a :class:`CausalLM`.

    Raises:
        OptionError: the number of drafts or a bucket is not valid, or ``max_num_tokens`` is too small.
    """

    max_num_reqs: int  #: most requests that run at once
    #: most tokens of one step, at least ``max_num_reqs * (1 + draft_tokens)``; a longer prompt is computed in chunks
    max_num_tokens: int
    max_seq_len: int  #: most tokens of a request, prompt and new tokens together
    #: token counts to capture; None: powers of two and the sizes halfway between them, without 1 for several requests,
    #: and at first 1 alone for one request, see :meth:`CausalLM.adapt`
    capture_sizes: Sequence[int] | None = None
    #: sequence lengths to capture FULL graphs for, besides ``max_seq_len``; None: 256, 512, 1024, ...
    seq_len_buckets: Sequence[int] | None = None
    #: ``FULL`` captures graphs of mixed batches, too, which attend over the most requests at the longest length
    mode: str | CUDAGraphMode = "FULL_AND_PIECEWISE"
    page_size: int | None = None  #: tokens per page of the KV cache; None: see :meth:`PagedAttention.for_model`
    #: pages of the KV cache; None: enough for ``max_num_reqs`` requests of ``max_seq_len`` tokens
    num_pages: int | None = None
    #: guesses that a step verifies for each request, see Note [Draft tokens]
    draft_tokens: int = 0
    #: numbers of active adapters to capture graphs for; None: one graph without adapters and one for any number
    lora: LoraKeys | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_num_reqs, self.max_num_tokens, self.draft_tokens)
        buckets = self.seq_len_buckets or ()
        if not all(is_integer(bucket, at_least=1) for bucket in buckets):
            raise OptionError(
                "seq_len_buckets are not valid",
                expected="integers of at least 1",
                found=str(list(buckets)),
                remedy="leave seq_len_buckets out for 256, 512, 1024, ...",
            )
        if 0 < self.max_seq_len < 1 + self.draft_tokens:
            raise OptionError(
                "draft_tokens is larger than any text",
                expected=f"draft_tokens below max_seq_len, {self.max_seq_len}",
                found=str(self.draft_tokens),
                remedy="lower draft_tokens: more than 7 rarely save time",
            )


class CausalLM:
    """A Hugging Face causal LM that generates text over a paged KV cache; steps that fit a key replay its graph.

    Until :meth:`close` the model's attention implementation is ``graphpass_paged`` and that of its experts
    ``graphpass_experts``, on copies of its configs, and rotary frequencies that change with the length of texts are
    fixed; the rest of the model, and other models with the same config object, are unchanged. To serve requests that
    arrive while others run, use :class:`Generation` with :attr:`manager`.

    Args:
        model: a causal LM whose layers use transformers' ``AttentionInterface`` (Llama, Qwen3, Gemma, DeepSeek),
            on its device, in eval mode. It runs once, on a row of a few tokens, to find out what its layers need.
        adapters: LoRA adapters for requests, created for this model; None: no adapters.
        compiler: compiler of the regions; None: ``inductor`` on CUDA, ``aot_eager`` elsewhere.
        options: the fields of :class:`CausalLMConfig`, and the options of :class:`CudaGraphManager`.

    Raises:
        OptionError: a size or an option is not valid, the adapters were created for another model, the model has
            layers that carry a state from token to token or attention that is not supported, its experts cannot be
            computed token by token, or its rotary frequencies change below ``max_seq_len``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        adapters: LoraAdapters | None = None,
        compiler: str | None = None,
        **options: Any,
    ) -> None:
        own = {field.name: options.pop(field.name) for field in fields(CausalLMConfig) if field.name in options}
        self.config = CausalLMConfig(**own)  #: sizes and keys
        refuse_stateful(model)  # guard: stateful_models
        self._served, self._subject = ServedModel(model), type(model).__name__
        with self._served.changed():
            #: runs the steps; this object owns it, its buffers and the KV cache
            self.manager = self._manager_of(model, adapters, compiler, options)

    def _manager_of(
        self, model: torch.nn.Module, adapters: LoraAdapters | None, compiler: str | None, options: dict[str, Any]
    ) -> CudaGraphManager:
        config = self.config
        max_num_reqs, max_num_tokens, max_seq_len = config.max_num_reqs, config.max_num_tokens, config.max_seq_len
        fix_frequencies(model, max_seq_len)
        compute_experts_by_token(model)
        is_full = CUDAGraphMode.parse(config.mode).mixed_mode() is CUDAGraphMode.FULL
        attention = PagedAttention.for_model(
            model,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max(max_num_tokens, 3),  # for the manager's first run
            max_seq_len=max_seq_len,
            support=AttentionSupport.ALWAYS if is_full else AttentionSupport.UNIFORM_BATCH,
        )
        self._max_bytes: int | None = None  # of the last capture
        is_alone = options.get("agreement") is None and options.get("ranks") is None
        dispatcher, self._prompts = _dispatcher(config, lora_keys(adapters, model, config.lora), is_alone)
        wrapped: torch.nn.Module = NextToken(model)
        last_rows = (max_num_reqs, 1 + config.draft_tokens) if config.draft_tokens else (max_num_reqs,)
        inputs = [
            InputSpec("input_ids", (1, max_num_tokens), torch.int64, token_dim=1),
            InputSpec("position_ids", (1, max_num_tokens), torch.int64, token_dim=1),
            InputSpec("last_rows", last_rows, torch.int64, token_dim=None, request_dim=0),
        ]
        if adapters is not None:
            wrapped = adapters.wrap(wrapped)
            inputs += adapters.input_specs(max_num_tokens)
        is_on_cuda = next(model.parameters()).device.type == "cuda"
        options["compiler"] = compiler or ("inductor" if is_on_cuda else "aot_eager")
        return CudaGraphManager(wrapped, dispatcher, inputs, attention=attention, **options)

    def capture(self, max_bytes: int | None = None) -> None:
        """Capture every key, see :meth:`CudaGraphManager.capture`.

        Args:
            max_bytes: limit of the graph pool; batches of keys that do not fit run without a graph.

        Raises:
            CaptureError: all keys are captured already, or a key could not be captured. If no key is captured, the
                model is given back as by :meth:`close`.
            AgreementError: another rank could not capture its keys.
        """
        self._max_bytes = max_bytes
        with self._serving():
            self.manager.capture(max_bytes)

    def adapt(self, max_sizes: int = 8) -> tuple[Key, ...]:
        """Capture graphs for each number of tokens that padding keeps serving, see :meth:`CudaGraphManager.adapt`.

        Torch compiles single tokens apart. So, without ``capture_sizes``, an engine for several requests serves a
        single one padded to two, and an engine for one request runs prompts uncompiled. This compiles them, once they
        have recurred, within the ``max_bytes`` of :meth:`capture`.
        """
        with self._serving():
            adapted = self.manager.adapt(max_sizes)
            if not self._prompts_recur():
                return adapted
            prompts, self._prompts, dispatcher = self._prompts, (), self.manager.dispatcher
            for key in prompts:
                dispatcher.add_key(*key)
            try:
                self.manager.capture(self._max_bytes)
            except BaseException:
                for key in prompts:
                    if not dispatcher.is_captured(*key):  # guard: prompts_after_failure
                        dispatcher.remove_key(*key)
                raise
        return (*adapted, *(key for key in prompts if dispatcher.is_captured(*key)))

    def _prompts_recur(self) -> bool:
        num_prompts = self.manager.stats().fallbacks.get(DispatchReason.TOO_LARGE, 0)
        return bool(self._prompts) and num_prompts >= LEAST_REPLAYS  # guard: prompts_adapted

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos_token_id: int | Collection[int] | None = None,
        adapters: Sequence[str | None] | None = None,
        progress: bool | None = None,
        run_ahead: bool | None = None,
        drafter: Drafter | None = None,
    ) -> list[list[int]]:
        """Continue prompts by greedy decoding, with continuous batching. Captures missing graphs first.

        Args:
            prompts: token ids, one sequence per request.
            max_new_tokens: most new tokens, one number for all prompts or one per prompt.
            eos_token_id: tokens that end a request; the end token is included in the result.
            adapters: the name of each prompt's LoRA adapter, or None for the model without adapters.
            progress: show a progress bar; None: where stderr is a terminal, unless TQDM_DISABLE is set.
            run_ahead: see :class:`Generation`.
            drafter: see :class:`Generation`; it has no influence on the tokens.

        Returns:
            The new tokens of each request, in the order of the prompts.

        Raises:
            OptionError, ShapeError: a request can never run; the error names it, and nothing has run.
        """
        requests = requests_of(prompts, max_new_tokens, eos_token_id, adapters)
        with self._serving():
            return complete(self.manager, requests, progress=progress, run_ahead=run_ahead, drafter=drafter)

    def stats(self) -> ManagerStats:
        """The statistics of the manager, see :meth:`CudaGraphManager.stats`."""
        return self.manager.stats()

    def report(self) -> Report:
        """The report of :attr:`manager`, and which attention kernel serves which steps, and why."""
        attention = self.manager.attention
        assert isinstance(attention, PagedAttention)
        figures = self.manager.report().figures
        traffic = tuple(replace(seen, adapts=seen.adapts or self._prompts_recur()) for seen in figures.traffic)
        named = replace(figures, subject=self._subject, kernels=attention.kernels(), traffic=traffic)
        return Report(named)

    def close(self) -> None:
        """Drop all graphs, release the pool, and give the model back as it was.

        :meth:`capture` and :meth:`generate` can be called again; until then :attr:`manager` refuses to run the model.
        """
        self.manager.close()  # guard: served_model_manager_closed
        self._served.give_back()  # guard: served_model_given_back

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """The model is changed, and stays so unless the body fails before a graph is captured."""
        self._served.use()
        try:
            yield
        except BaseException:
            if self.manager.needs_capture() and not self.manager.stats().keys:  # guard: served_model_after_failure
                self.close()
            raise


def default_capture_sizes(max_num_tokens: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and ``max_num_tokens``: at most a third is padding."""
    powers = [1 << n for n in range(max_num_tokens.bit_length())]
    sizes = {*powers, *(power + power // 2 for power in powers if power > 1), max_num_tokens}
    return sorted(size for size in sizes if size <= max_num_tokens)


def _dispatcher(
    config: CausalLMConfig, lora: LoraKeys | None, is_alone: bool
) -> tuple[CudagraphDispatcher, tuple[Key, ...]]:
    """A dispatcher, and keys for prompts that it gets once they recur.

    Only FULL graphs contain a bound of the sequence length. A batch of one token without drafts is a uniform decode, so
    in mode FULL_AND_PIECEWISE mixed keys have at least two tokens. Those of an engine for one request wait, if no other
    rank has to have the same (``is_alone``).
    """
    mode, query_len, longest = CUDAGraphMode.parse(config.mode), 1 + config.draft_tokens, config.max_seq_len
    sizes = config.capture_sizes
    if sizes is None:
        sizes = default_capture_sizes(config.max_num_tokens)
        sizes = sizes if config.max_num_reqs == 1 else [size for size in sizes if size > 1]
    # The dispatcher rounds max_num_tokens up to whole requests, but the buffers have max_num_tokens entries.
    sizes = [size for size in sizes if size <= config.max_num_tokens] if query_len > 1 else sizes
    has_single = mode is CUDAGraphMode.FULL_AND_PIECEWISE and query_len == 1
    mixed_sizes = [size for size in sizes if size != 1] if has_single else []
    dispatcher = CudagraphDispatcher(
        mode,
        {"num_tokens": mixed_sizes or sizes, "max_seq_len": [longest]},
        max_num_reqs=config.max_num_reqs,
        max_num_tokens=config.max_num_tokens,
        lora=lora,
        uniform_decode_query_len=query_len,
    )
    # A batch of one token has one request, and so at most one adapter.
    for count in (0,) if lora is None else sorted({*lora.count_table()[:2]}):
        if mixed_sizes and 1 in sizes:
            extra = (("max_seq_len", longest),)
            of_one = BatchDescriptor(1, 1, True, has_lora=count > 0, num_active_loras=count, extra=extra)
            dispatcher.add_key(CUDAGraphMode.FULL, of_one)
    buckets = config.seq_len_buckets
    if buckets is None:
        buckets = [256 << n for n in range(longest.bit_length()) if 256 << n < longest]
    for key in dispatcher.keys[CUDAGraphMode.FULL]:
        for bucket in sorted(set(buckets)):
            if (query_len if key.uniform else 1) <= bucket < longest:
                dispatcher.add_key(CUDAGraphMode.FULL, replace(key, extra=(("max_seq_len", bucket),)))
    wait = config.capture_sizes is None and config.max_num_reqs == 1 and is_alone
    if not has_single or not (wait or not mixed_sizes):
        return dispatcher, ()
    plan = dict(dispatcher.capture_plan())
    mixed = [(CUDAGraphMode.PIECEWISE, key) for key in plan[CUDAGraphMode.PIECEWISE]]
    for of_mode, key in mixed:
        dispatcher.remove_key(of_mode, key)
    return dispatcher, tuple(mixed) if mixed_sizes else ()
