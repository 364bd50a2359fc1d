"""A Hugging Face decoder that generates text over a manager's graphs: which inputs, which keys, which attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.lora import LoraKeys
from graphpass.dispatch.support import AttentionSupport
from graphpass.engine.batch import InputSpec
from graphpass.engine.manager import CudaGraphManager
from graphpass.engine.stats import ManagerStats
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.text.drafting import Drafter
from graphpass.text.generation import complete, requests_of
from graphpass.text.lora.adapters import LoraAdapters, lora_keys
from graphpass.text.paged.attention import PagedAttention
from graphpass.text.scheduler import check_budget

__all__ = ["CausalLM", "CausalLMConfig", "default_capture_sizes"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig:
    """Sizes and keys of a :class:`CausalLM`.

    Attributes:
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
        lora: which numbers of adapters get graphs of their own; None: none, and any.

    Raises:
        OptionError: a number of drafts or a bucket cannot be used, or the tokens of a step are fewer than decoding
            requests need.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int
    capture_sizes: Sequence[int] | None = None
    seq_len_buckets: Sequence[int] | None = None
    mode: str | CUDAGraphMode = "FULL_AND_PIECEWISE"
    page_size: int = 16
    num_pages: int | None = None
    draft_tokens: int = 0
    lora: LoraKeys | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_num_reqs, self.max_num_tokens, self.draft_tokens)
        buckets = self.seq_len_buckets or ()
        if any(isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1 for bucket in buckets):
            raise OptionError(
                "seq_len_buckets cannot be used",
                expected="integers of at least 1",
                found=str(list(buckets)),
                remedy="leave it out to double from 256",
            )
        if 0 < self.max_seq_len < 1 + self.draft_tokens:
            raise OptionError(
                "no text has room for so many draft tokens",
                expected=f"draft_tokens below max_seq_len, {self.max_seq_len}",
                found=str(self.draft_tokens),
                remedy="lower draft_tokens: more than 7 seldom pay",
            )


class CausalLM:
    """A Hugging Face causal LM that generates text over a paged KV cache, each step a replay where a graph fits.

    The model's attention implementation becomes ``graphpass_paged``; nothing else of it changes. :class:`Generation`
    over :attr:`manager` serves requests that arrive while others run.

    Args:
        model: a causal LM of the Llama kind (Llama, Qwen3, Mistral, ...), on its device, in eval mode.
        adapters: LoRA adapters that requests may run with, made of this model; None for none.
        compiler: for regions; None: ``inductor`` on CUDA, ``aot_eager`` elsewhere.
        options: the fields of :class:`CausalLMConfig`, and the options of :class:`CudaGraphManager`.

    Attributes:
        config: sizes and keys.
        manager: runs the steps. :class:`CausalLM` owns it, its buffers and the KV cache.

    Raises:
        OptionError: a size or an option cannot be used, or the adapters are not this model's.
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
        self.config = config = CausalLMConfig(**own)
        attention = _attention_of(model, config)
        dispatcher = _dispatcher(config, lora_keys(adapters, model, config.lora))
        wrapped: torch.nn.Module = NextToken(model)
        inputs = _input_specs(config)
        if adapters is not None:
            wrapped = adapters.wrap(wrapped)
            inputs += adapters.input_specs(config.max_num_tokens)
        is_on_cuda = next(model.parameters()).device.type == "cuda"
        options["compiler"] = compiler or ("inductor" if is_on_cuda else "aot_eager")
        self.manager = CudaGraphManager(wrapped, dispatcher, inputs, attention=attention, **options)

    def capture(self, max_bytes: int | None = None) -> None:
        """Capture every key, see :meth:`CudaGraphManager.capture`.

        Args:
            max_bytes: limit of the graph pool; batches of keys beyond it run without a graph.

        Raises:
            CaptureError: everything is captured already, or a key could not be captured.
            AgreementError: another rank could not capture its keys.
        """
        self.manager.capture(max_bytes)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos_token_id: int | Collection[int] | None = None,
        adapters: Sequence[str | None] | None = None,
        progress: bool = True,
        run_ahead: bool | None = None,
        drafter: Drafter | None = None,
    ) -> list[list[int]]:
        """Greedy continuations of many prompts, batched as they come and go; captures first where nothing is captured.

        Args:
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
        requests = requests_of(prompts, max_new_tokens, eos_token_id, adapters)
        return complete(self.manager, requests, progress=progress, run_ahead=run_ahead, drafter=drafter)

    def stats(self) -> ManagerStats:
        """What was captured and how it was used so far."""
        return self.manager.stats()

    def close(self) -> None:
        """Drop all graphs and give the pool back; it can be captured again."""
        self.manager.close()


def _attention_of(model: torch.nn.Module, config: CausalLMConfig) -> PagedAttention:
    """Paged attention for the model, with a KV cache of its own."""
    mode, pages_each = CUDAGraphMode.parse(config.mode), -(-config.max_seq_len // config.page_size)
    return PagedAttention.for_model(
        model,
        num_pages=config.max_num_reqs * pages_each if config.num_pages is None else config.num_pages,
        page_size=config.page_size,
        max_num_reqs=config.max_num_reqs,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        # Graphs of mixed batches are made for those who ask for them.
        support=AttentionSupport.ALWAYS if mode.mixed_mode() is CUDAGraphMode.FULL else AttentionSupport.UNIFORM_BATCH,
    )


def _input_specs(config: CausalLMConfig) -> list[InputSpec]:
    """The inputs of :class:`NextToken`."""
    max_num_reqs, max_num_tokens, draft_tokens = config.max_num_reqs, config.max_num_tokens, config.draft_tokens
    last_rows = (max_num_reqs, 1 + draft_tokens) if draft_tokens else (max_num_reqs,)
    return [
        InputSpec("input_ids", (1, max_num_tokens), torch.int64, token_dim=1),
        InputSpec("position_ids", (1, max_num_tokens), torch.int64, token_dim=1),
        InputSpec("last_rows", last_rows, torch.int64, token_dim=None, request_dim=0),
    ]


def default_capture_sizes(max_num_tokens: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and ``max_num_tokens``: at most a third of a batch is padding."""
    powers = [1 << n for n in range(max_num_tokens.bit_length())]
    sizes = {*powers, *(power + power // 2 for power in powers if power > 1), max_num_tokens}
    return sorted(size for size in sizes if size <= max_num_tokens)


def _doubled(max_seq_len: int, smallest: int = 256) -> list[int]:
    return [smallest << n for n in range(max_seq_len.bit_length()) if smallest << n < max_seq_len]


def _dispatcher(config: CausalLMConfig, lora: LoraKeys | None) -> CudagraphDispatcher:
    """The keys that some batch can reach.

    Only FULL graphs bake a longest sequence in: PIECEWISE keys, which serve any, are made for one. And a batch of one
    token is a uniform decode, unless drafts come with it, so where decode has graphs of its own, mixed batches have two
    tokens or more.
    """
    mode, query_len, longest = CUDAGraphMode.parse(config.mode), 1 + config.draft_tokens, config.max_seq_len
    sizes = default_capture_sizes(config.max_num_tokens) if config.capture_sizes is None else config.capture_sizes
    # The dispatcher rounds its limit up to whole requests; the buffers end at it.
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
    # One token is one request, with one adapter or none.
    for count in (0,) if lora is None else sorted({*lora.count_table()[:2]}):
        if mixed_sizes and 1 in sizes:
            extra = (("max_seq_len", longest),)
            of_one = BatchDescriptor(1, 1, True, has_lora=count > 0, num_active_loras=count, extra=extra)
            dispatcher.add_key(CUDAGraphMode.FULL, of_one)
    buckets = _doubled(longest) if config.seq_len_buckets is None else config.seq_len_buckets
    for key in dispatcher.keys[CUDAGraphMode.FULL]:
        for bucket in sorted(set(buckets)):
            if (query_len if key.uniform else 1) <= bucket < longest:
                dispatcher.add_key(CUDAGraphMode.FULL, replace(key, extra=(("max_seq_len", bucket),)))
    return dispatcher
