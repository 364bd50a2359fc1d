"""A model that a CausalLM serves is given back as it was, and no other model notices; fixed rotary frequencies."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from graphpass.errors import CaptureError, ContextError, OptionError, ShapeError
from graphpass.text import CausalLM, Generation, Request
from graphpass.text.experts import HUGGING_FACE_NAME as EXPERTS_NAME
from graphpass.text.hfmodel import ServedModel, fix_frequencies
from graphpass.text.paged.huggingface import HUGGING_FACE_NAME


def hf() -> Any:
    """Transformers, which takes long to import."""
    return pytest.importorskip("transformers")


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
SIZES: dict[str, Any] = {
    "max_num_reqs": 2,
    "max_num_tokens": 8,
    "max_seq_len": 16,
    "page_size": 4,
    "capture_sizes": [2, 8],
    "seq_len_buckets": [],
    "compiler": "eager",
}
PROMPTS = [[5, 9, 14], [3, 44, 21, 8, 30], [17]]
STOCK = "sdpa"


def llama(config: Any = None) -> Any:
    torch.manual_seed(0)
    config = hf().LlamaConfig(**TEXT, attn_implementation=STOCK) if config is None else config
    model = hf().LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.4)
    return model


def own_tokens(model: Any) -> list[list[int]]:
    """The greedy continuations of the prompts, by the model itself."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, eos_token_id=None
        )
        rows.append(made[0, len(prompt) :].tolist())
    return rows


def tokens(lm: CausalLM) -> list[list[int]]:
    return lm.generate(PROMPTS, max_new_tokens=3, progress=False)


def attention_of(model: Any) -> list[str]:
    """The attention implementation that each module reads."""
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.fixture
def model() -> Any:
    return llama()


def test_close_gives_the_model_back_and_it_can_be_captured_again(model: Any) -> None:
    config, expected = model.config, own_tokens(model)
    lm = CausalLM(model, **SIZES)
    for _ in range(2):
        lm.capture()
        with pytest.raises(ShapeError):  # a request that is too long
            lm.generate([[0] * 40], max_new_tokens=1)
        assert set(attention_of(model)) == {HUGGING_FACE_NAME}
        assert tokens(lm) == expected
        lm.close()
        assert model.config is config
        assert set(attention_of(model)) == {STOCK}
        assert own_tokens(model) == expected
    lm.close()
    assert model.config is config
    with pytest.raises(CaptureError, match="mixes the tokens"):  # the former attention, over the tokens of all requests
        lm.manager.capture()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", ["__call__", "generate"])
def test_a_plain_call_beside_a_living_server_says_how_to_make_it(model: Any, way: str, rows: int) -> None:
    ids = torch.tensor([PROMPTS[0]] * rows)
    given = {"attention_mask": torch.ones_like(ids), **({"max_new_tokens": 2} if way == "generate" else {})}

    def plain() -> Any:
        with torch.no_grad():
            return getattr(model, way)(ids, **given)[0]

    expected, own = plain(), own_tokens(model)
    lm = CausalLM(model, **SIZES)
    assert tokens(lm) == own
    with pytest.raises((ContextError, ShapeError)) as error:
        plain()
    (remedy,) = re.findall(r"if a CausalLM serves the model, `(.*?)` gives it back", error.value.remedy)
    eval(remedy, {"lm": lm})
    torch.testing.assert_close(plain(), expected)
    assert tokens(lm) == own
    lm.close()


def test_a_second_decoder_has_no_problem_of_our_own_operator() -> None:
    """Dynamo makes a symbol of the scale, which differs from that of the first."""
    for width in (8, 16):
        model = llama(hf().LlamaConfig(**{**TEXT, "head_dim": width}, attn_implementation=STOCK))
        expected, lm = own_tokens(model), CausalLM(model, **SIZES)
        assert tokens(lm) == expected
        assert lm.report().problems == ()


def test_another_model_of_the_same_config_is_not_affected(model: Any) -> None:
    other = llama(model.config)
    expected = own_tokens(other)
    lm = CausalLM(model, **SIZES)
    assert tokens(lm) == expected
    figures = lm.report().figures
    assert figures.subject == "LlamaForCausalLM"
    assert [use.serves for use in figures.kernels].count("all steps") == 1
    assert figures.traffic[0].histogram == lm.stats().histogram
    assert lm.report()["Attention"].rows
    assert other.config._attn_implementation == STOCK
    assert own_tokens(other) == expected
    later = llama(other.config)
    assert own_tokens(later) == expected
    lm.close()
    assert other.config is model.config


class Pools(torch.nn.Module):
    """Mixes the tokens of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    "call", [CausalLM.capture, pytest.param(tokens, marks=pytest.mark.soak)], ids=["capture", "generate"]
)
def test_a_capture_that_fails_gives_the_model_back(model: Any, call: Any) -> None:
    config = model.config
    model.model.norm = Pools()
    lm = CausalLM(model, **SIZES)
    with pytest.raises(CaptureError, match="mixes the tokens"):
        call(lm)
    assert model.config is config
    assert set(attention_of(model)) == {STOCK}
    lm.close()
    assert model.config is config


def settings_of(model: Any) -> list[tuple[int, str, str]]:
    """Each module's config object, and the implementations that it names."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [(id(config), config._attn_implementation, config._experts_implementation) for config in configs]


@pytest.mark.parametrize("shares", ["model", "modules"])
@pytest.mark.parametrize("is_first_in_first_out", [True, False])
def test_modules_are_given_back_in_any_order(shares: str, is_first_in_first_out: bool) -> None:
    """Of one model that two serve, and of two models around one stack of layers; with experts."""
    config = hf().MixtralConfig(**TEXT, num_local_experts=2, attn_implementation=STOCK)
    torch.manual_seed(0)
    model = other = hf().MixtralForCausalLM(config).eval()
    if shares == "modules":
        other = hf().MixtralForCausalLM(config).eval()
        other.model, other.lm_head = model.model, model.lm_head
    before = [settings_of(model), settings_of(other)]
    lms = [CausalLM(each, mode="NONE", **SIZES) for each in (model, other)]
    assert model.model.config is other.model.config
    first, second = (0, 1) if is_first_in_first_out else (1, 0)
    lms[first].close()
    assert {(attention, experts) for _, attention, experts in settings_of(model.model)} == {
        (HUGGING_FACE_NAME, EXPERTS_NAME)
    }
    lms[second].close()
    assert [settings_of(model), settings_of(other)] == before


def test_a_construction_that_fails_leaves_another_one_serving(model: Any) -> None:
    config, expected = model.config, own_tokens(model)
    lm = CausalLM(model, mode="NONE", **SIZES)
    with pytest.raises(OptionError):
        CausalLM(model, **SIZES, no_such_option=1)
    assert set(attention_of(model)) == {HUGGING_FACE_NAME}
    assert tokens(lm) == expected
    lm.close()
    assert model.config is config
    assert set(attention_of(model)) == {STOCK}


class Tuned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_tuned, self.other = True, 1


def test_a_value_that_the_user_has_set_since_stays() -> None:
    module = Tuned()
    served = ServedModel(module)
    with served.changed():
        module.is_tuned = False
    module.is_tuned = None  # type: ignore[assignment]
    served.give_back()
    assert module.is_tuned is None


# -- rotary frequencies ----------------------------------------------------------------------------------------------

TRAINED = 16
SMALL_ROPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [20.0, 30.0, 40.0, 50.0]}
CHANGING: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {**FACTORS, "original_max_position_embeddings": TRAINED},
}


def rotary_of(rope_type: str, parameters: dict[str, Any]) -> Any:
    """The rotary embedding of a small Llama."""
    longest = TRAINED if rope_type == "dynamic" else 4 * TRAINED
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **parameters}
    config = hf().LlamaConfig(**SMALL_ROPE, max_position_embeddings=longest, rope_parameters=rope)
    return hf().LlamaModel(config).rotary_emb


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


@pytest.mark.parametrize("is_first_in_first_out", [True, False])
@pytest.mark.parametrize("rope_type", CHANGING)
def test_frequencies_stay_fixed_while_another_one_serves(rope_type: str, is_first_in_first_out: bool) -> None:
    rotary, users = rotary_of(rope_type, CHANGING[rope_type]), []
    for _ in range(2):
        users.append(ServedModel(rotary))
        with users[-1].changed():
            fix_frequencies(rotary, TRAINED)
    fixed, frequencies = rotary.rope_type, rotary.inv_freq
    first, second = users if is_first_in_first_out else users[::-1]
    first.give_back()
    assert rotary.rope_type == fixed != rope_type
    assert rotary.inv_freq is frequencies
    second.give_back()
    assert rotary.rope_type == rope_type
    assert rotary.inv_freq is not frequencies


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


def test_layers_of_each_type_have_their_own() -> None:
    rope = {
        "full_attention": {"rope_type": "longrope", "rope_theta": 1e4, **CHANGING["longrope"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    small = {**SMALL_ROPE, "num_hidden_layers": 2, "layer_types": list(rope)}
    config = hf().Gemma3TextConfig(
        **small, head_dim=8, num_key_value_heads=1, max_position_embeddings=4 * TRAINED, rope_parameters=rope
    )
    rotary = hf().Gemma3TextModel(config).rotary_emb
    positions = torch.arange(TRAINED).unsqueeze(0)
    expected = {of: rotary(torch.zeros(1), positions, of) for of in rope}
    with pytest.raises(OptionError, match="Gemma3RotaryEmbedding"):
        fix_frequencies(rotary, TRAINED + 1)
    rotary(torch.zeros(1), torch.arange(2 * TRAINED).unsqueeze(0), "full_attention")
    fix_frequencies(rotary, TRAINED)
    assert rotary.rope_type["sliding_attention"] == "default"
    for of, angle in expected.items():
        torch.testing.assert_close(rotary(torch.zeros(1), positions, of), angle, rtol=0, atol=0)


KEPT: list[torch.Tensor] = []


class Meddling:
    """A drafter of the user: its code runs between two steps, and exchanges a weight."""

    def __init__(self, model: Any) -> None:
        self.model, self.lengths = model, list[int]()

    def propose(self, request: Request, text: Any, limit: int) -> list[int]:
        if len(text) == len(PROMPTS[0]) + 3:  # after steps of the same key
            self.lengths.append(len(text))
            exchanged(self.model)
        return []


def exchanged(model: Any) -> None:
    """Turn the sign of the head's weight, at another address; the old memory lives on, so that no graph is dropped."""
    KEPT.append(model.lm_head.weight.data)
    model.lm_head.weight.data = -KEPT[-1]


def check_signs(model: Any, found: list[int], lengths: list[int]) -> None:
    """Each token is that of the head with the sign that it has after the exchanges at these lengths of the text."""
    text = list(PROMPTS[0])
    for token in found:
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1] * (-1) ** sum(length <= len(text) for length in lengths)
        assert token == int(logits.argmax())
        text.append(token)


def test_weights_that_a_caller_exchanges_between_steps_are_read(model: Any) -> None:
    plain, lengths = copy.deepcopy(model), list[int]()
    lm = CausalLM(model, **SIZES)
    lm.manager.capture()
    with Generation(lm.manager) as generation:
        generation.add(Request.of("one", PROMPTS[0], 5))
        found: list[int] = []
        while not generation.is_done():
            found += [new.token for new in generation.step()]
            if len(found) == 3:  # after steps of the same key
                lengths.append(len(PROMPTS[0]) + len(found))
                exchanged(model)
    lm.close()
    check_signs(plain, found, lengths)


def test_weights_that_a_drafter_exchanges_are_read(model: Any) -> None:
    plain, drafter = copy.deepcopy(model), Meddling(model)
    lm = CausalLM(model, draft_tokens=1, **SIZES)
    (found,) = lm.generate(PROMPTS[:1], max_new_tokens=5, progress=False, drafter=drafter)
    lm.close()
    assert drafter.lengths
    check_signs(plain, found, drafter.lengths)
