"""A Hugging Face decoder under a manager: which inputs, which keys, which attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpass.dispatch import AttentionSupport, CudagraphDispatcher, LoraKeys
from graphpass.engine.batch import InputSpec
from graphpass.engine.manager import CudaGraphManager
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.text.lora.adapters import LoraAdapters, lora_keys
from graphpass.text.paged.attention import PagedAttention
from graphpass.text.scheduler import check_budget

__all__ = ["causal_lm", "default_capture_sizes"]


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
