"""Decoders with experts, and with rotary frequencies that change: Hugging Face's tokens, or a refusal by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from graphpass.errors import OptionError
from graphpass.text import CausalLM
from tests.e2e import greedy
from tests.e2e.small_decoders import small_decoder

TRAINED = 24
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5] * 2,
    "long_factor": [20.0, 30.0, 40.0, 50.0] * 2,
    "original_max_position_embeddings": TRAINED,
}
SIZES: dict[str, Any] = {"max_num_reqs": 4, "max_num_tokens": 16, "page_size": 4, "capture_sizes": [2, 4, 16]}
PROMPTS = [[5, 7, 11], [3] * 7 + [9] * 6, list(range(1, 10)), [50], [60, 61, 62, 63], list(range(TRAINED - 6))]


def continued(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Hugging Face's own new tokens, each prompt alone."""
    return [greedy.continued(model, prompt, count).tokens for prompt in prompts]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", pytest.param("FULL", marks=pytest.mark.soak)])
def test_tokens_of_a_mixture_of_experts(mode: str) -> None:
    model = small_decoder("MixtralForCausalLM")
    stock = model.config._experts_implementation
    expected = continued(model, PROMPTS, 6)
    lm = CausalLM(model, max_seq_len=32, mode=mode, compiler="aot_eager", **SIZES)
    assert lm.generate(PROMPTS, max_new_tokens=6, progress=False) == expected
    assert not lm.stats().fallbacks
    lm.close()
    assert model.config._experts_implementation == stock
    assert continued(model, PROMPTS[:2], 6) == expected[:2]


def test_rotary_frequencies_up_to_the_length_of_training() -> None:
    model = small_decoder("LlamaForCausalLM", rope_parameters=LONGROPE, max_position_embeddings=64)
    expected, across = continued(model, PROMPTS, 6), continued(model, PROMPTS[-1:], 20)
    with pytest.raises(OptionError, match=f"longer than {TRAINED} tokens"):
        CausalLM(model, max_seq_len=TRAINED + 1, **SIZES)
    # The model has just computed a text with the frequencies for long ones.
    lm = CausalLM(model, max_seq_len=TRAINED, compiler="aot_eager", **SIZES)
    assert lm.generate(PROMPTS, max_new_tokens=6, progress=False) == expected
    assert len(PROMPTS[-1]) + 6 == TRAINED
    with pytest.raises(OptionError, match=f"longer than {TRAINED} tokens"):
        CausalLM(model, max_seq_len=TRAINED + 1, **SIZES)
    lm.close()
    assert continued(model, PROMPTS[-1:], 20) == across
