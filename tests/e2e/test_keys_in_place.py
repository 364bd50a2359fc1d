"""Text over pages of whole sequences, with an operator of flash attention's contract in the kernel's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphpass.compat.operators import PackedSequences
from graphpass.text import CausalLM, PagedAttention
from tests.e2e.decoder_classes import COUNTS, SIZES, prompts
from tests.e2e.greedy import continued
from tests.e2e.small_decoders import small_decoder
from tests.unit.text.paged_reference import attend_by


def flash_by_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    *,
    scale: float,
    causal_window: int | None = None,
) -> torch.Tensor:
    """Reads the bounds on the device, as the kernel does; NaN in rows of no sequence, 0 in those without keys."""
    assert causal_window is not None
    bounds, starts, lengths, _, _ = sequences
    rows, slots = (torch.arange(len(tensor), dtype=torch.int32) for tensor in (query, key))
    at = (torch.searchsorted(bounds, rows, right=True) - 1).clamp(max=len(lengths) - 1)
    own = lengths[at] - (bounds[at + 1] - rows)
    positions = slots - starts[at].unsqueeze(1)
    seen = (positions >= 0) & (positions <= own.unsqueeze(1))
    if causal_window:
        seen &= positions > own.unsqueeze(1) - causal_window
    is_written = rows < bounds[-1]
    seen &= (is_written & (lengths[at] > 0)).unsqueeze(1)
    read = seen.any(0).view(-1, 1, 1)
    by_head = (tensor.transpose(0, 1) for tensor in (query, *(torch.where(read, t, 0.0) for t in (key, value))))
    attended = F.scaled_dot_product_attention(
        *by_head, attn_mask=seen | ~seen.any(1, keepdim=True), scale=scale, enable_gqa=True
    ).transpose(0, 1)
    has_keys = seen.any(1).view(-1, 1, 1)
    return torch.where(is_written.view(-1, 1, 1), torch.where(has_keys, attended, 0.0), torch.nan)


@pytest.fixture(autouse=True)
def flash_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_by(flash_by_mask, monkeypatch)


@pytest.mark.parametrize(
    ("name", "draft_tokens", "mode"),
    [
        ("LlamaForCausalLM", 0, "FULL_AND_PIECEWISE"),
        ("MistralForCausalLM", 0, "FULL"),
        ("Qwen3ForCausalLM", 2, "FULL_AND_PIECEWISE"),
    ],
)
def test_texts_are_those_of_generate(name: str, draft_tokens: int, mode: str) -> None:
    torch.manual_seed(0)
    model = small_decoder(name)
    references = [continued(model, text, count) for text, count in zip(prompts(), COUNTS, strict=True)]
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "page_size"}
    lm = CausalLM(model, mode=mode, draft_tokens=draft_tokens, **sizes)
    paged = lm.manager.attention
    assert isinstance(paged, PagedAttention)
    assert (paged.cache.page_size, paged.cache.num_pages) == (lm.config.max_seq_len, lm.config.max_num_reqs)
    for memory in paged.cache.memories:
        assert memory is not None
        memory.keys.fill_(torch.nan)  # what no request has written must not be read
        memory.values.fill_(torch.nan)
    texts = lm.generate(prompts(), max_new_tokens=COUNTS, progress=False)
    assert lm.stats().replays > 0
    lm.close()
    for which, (reference, text) in enumerate(zip(references, texts, strict=True)):
        reference.check(text, which)
