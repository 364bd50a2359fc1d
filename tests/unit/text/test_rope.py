"""Rotary embeddings that change with the longest text: fixed up to the length of training, refused above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpass.errors import OptionError
from graphpass.text.model import ServedModel, fix_frequencies

transformers = pytest.importorskip("transformers")

TRAINED = 16
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [20.0, 30.0, 40.0, 50.0]}
CHANGING: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {**FACTORS, "original_max_position_embeddings": TRAINED},
}
FIXED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


def rotary_of(rope_type: str, parameters: dict[str, Any]) -> Any:
    """The rotary embedding of a small Llama."""
    longest = TRAINED if rope_type == "dynamic" else 4 * TRAINED
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **parameters}
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=longest, rope_parameters=rope)
    return transformers.LlamaModel(config).rotary_emb


def angles(rotary: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a text of so many tokens is rotated by; copies."""
    cos, sin = rotary(torch.zeros(1), torch.arange(num_tokens).unsqueeze(0))
    return cos.clone(), sin.clone()


@pytest.mark.parametrize("earlier", [TRAINED, 2 * TRAINED], ids=["short", "long"])
@pytest.mark.parametrize("rope_type", CHANGING)
def test_frequencies_of_short_texts_whatever_ran_before(rope_type: str, earlier: int) -> None:
    rotary, stock = (rotary_of(rope_type, CHANGING[rope_type]) for _ in range(2))
    short = angles(stock, TRAINED)
    assert not torch.equal(short[0], angles(stock, 2 * TRAINED)[0][:, :TRAINED])
    stock = rotary_of(rope_type, CHANGING[rope_type])
    torch.testing.assert_close(angles(rotary, earlier), angles(stock, earlier))
    served = ServedModel(rotary)
    with served.changed():
        fix_frequencies(rotary, TRAINED)
    torch.testing.assert_close(angles(rotary, TRAINED), short, rtol=0, atol=0)
    # A packed row of short texts has any positions, in any order.
    mixed = torch.tensor([[0, 1, TRAINED - 1, 0, 3]])
    torch.testing.assert_close(rotary(torch.zeros(1), mixed)[0], short[0][:, mixed[0]], rtol=0, atol=0)
    served.give_back()
    for length in (TRAINED + 1, 2 * TRAINED, TRAINED - 1, 2 * TRAINED):
        torch.testing.assert_close(angles(rotary, length), angles(stock, length))


@pytest.mark.parametrize("rope_type", CHANGING)
def test_longer_texts_are_refused_with_the_longest_length(rope_type: str) -> None:
    rotary = rotary_of(rope_type, CHANGING[rope_type])
    refused = rf"longer than {TRAINED} tokens.*{rope_type!r}.*max_seq_len={TRAINED}"
    with pytest.raises(OptionError, match=refused):
        fix_frequencies(rotary, TRAINED + 1)
    assert rotary.rope_type == rope_type
    fix_frequencies(rotary, TRAINED)
    frequencies = rotary.inv_freq
    with pytest.raises(OptionError, match=refused):  # as before
        fix_frequencies(rotary, TRAINED + 1)
    fix_frequencies(rotary, TRAINED)
    assert rotary.inv_freq is frequencies, "graphs read it"


@pytest.mark.parametrize("rope_type", FIXED)
def test_frequencies_that_never_change_are_left_alone(rope_type: str) -> None:
    rotary = rotary_of(rope_type, FIXED[rope_type])
    before = angles(rotary, 4 * TRAINED)
    fix_frequencies(rotary, 4 * TRAINED)
    assert rotary.rope_type == rope_type
    torch.testing.assert_close(angles(rotary, 4 * TRAINED), before, rtol=0, atol=0)


def test_layers_of_each_type_have_their_own() -> None:
    rope = {
        "full_attention": {"rope_type": "longrope", "rope_theta": 1e4, **CHANGING["longrope"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    small = {**SMALL, "num_hidden_layers": 2, "layer_types": list(rope)}
    config = transformers.Gemma3TextConfig(
        **small, head_dim=8, num_key_value_heads=1, max_position_embeddings=4 * TRAINED, rope_parameters=rope
    )
    rotary = transformers.Gemma3TextModel(config).rotary_emb
    positions = torch.arange(TRAINED).unsqueeze(0)
    expected = {of: rotary(torch.zeros(1), positions, of) for of in rope}
    with pytest.raises(OptionError, match="Gemma3RotaryEmbedding"):
        fix_frequencies(rotary, TRAINED + 1)
    rotary(torch.zeros(1), torch.arange(2 * TRAINED).unsqueeze(0), "full_attention")
    fix_frequencies(rotary, TRAINED)
    assert rotary.rope_type["sliding_attention"] == "default"
    for of, angle in expected.items():
        torch.testing.assert_close(rotary(torch.zeros(1), positions, of), angle, rtol=0, atol=0)
