"""A tower served by graphs within its stock model: the same tokens, and nothing else of the model changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphpass import EncoderOptions
from graphpass.encoder import AttachedEncoder, attach
from graphpass.errors import EncoderConfigError
from tests.e2e.hugging_face import CPU, CUDA, Place, difference
from tests.e2e.small_vlms import VLMS, Vlm

QWEN = VLMS[0]
OPTIONS = EncoderOptions(token_budgets=[32, 128, 256], costs=None, compile=False)


def attached_to(model: Any, **options: Any) -> AttachedEncoder:
    return attach(model, options=OPTIONS, min_tokens=8, max_tokens=256, **options)


def generated(model: Any, prompt: Mapping[str, torch.Tensor]) -> list[int]:
    with torch.no_grad():
        tokens: list[int] = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    return tokens


def features(model: Any, prompt: Mapping[str, torch.Tensor], **named: Any) -> Any:
    with torch.no_grad():
        return model.get_image_features(prompt["pixel_values"], prompt["image_grid_thw"], **named)


def leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [leaf for part in value for leaf in leaves(part)]


def flat(output: Any) -> dict[str, list[torch.Tensor]]:
    return {name: leaves(value) for name, value in output.items()}


def assert_equal_features(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        for mine, stock in zip(found[name], parts, strict=True):
            assert difference(mine, stock) < CPU.tolerance


@pytest.mark.parametrize("place", [CPU, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=str)
@pytest.mark.parametrize("vlm", VLMS, ids=str)
def test_generate_returns_the_same_tokens(vlm: Vlm, place: Place) -> None:
    """Of prompts with one image and with many, and once more after it is detached."""
    model = vlm.build(place.device, torch.float32)
    prompts = [vlm.prompt(model, count, seed) for seed, count in enumerate((1, 2, 5))]
    expected = [generated(model, prompt) for prompt in prompts]
    assert len({tuple(tokens[-8:]) for tokens in expected}) > 1
    attached = attached_to(model)
    assert [generated(model, prompt) for prompt in prompts] == expected
    stats = attached.manager.get_cumulative_stats()
    assert (stats.hits, stats.misses) == (8, 0)
    assert "tokens=" in str(attached.report())
    attached.detach()
    assert [generated(model, prompt) for prompt in prompts] == expected
    assert attached.manager.get_cumulative_stats().requests == 3


@pytest.mark.parametrize("vlm", VLMS, ids=str)
def test_image_features_are_the_towers_in_every_field(vlm: Vlm) -> None:
    model = vlm.build()
    prompt = vlm.prompt(model, 4, 0)
    expected = features(model, prompt)
    attached = attached_to(model)
    assert_equal_features(features(model, prompt), expected)
    assert attached.manager.get_cumulative_stats().hits == 4
    assert "hidden_states" in features(model, prompt, output_hidden_states=True)
    assert attached.manager.get_cumulative_stats().requests == 1, "the stock tower runs for more than its usual output"
    assert "such as hidden states" in str(attached.report())


def test_the_model_is_saved_loaded_moved_and_copied_as_before() -> None:
    model = QWEN.build()
    prompt = QWEN.prompt(model, 2, 0)
    names, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    expected, tower = features(model, prompt), model.get_encoder("image")
    attached = attached_to(model)
    served = model.get_encoder("image")
    assert (list(model.state_dict()), list(map(id, model.parameters()))) == (names, parameters)
    assert isinstance(served, type(tower))
    assert (served.dtype, served.spatial_merge_size) == (tower.dtype, tower.spatial_merge_size)
    twin = copy.deepcopy(model)
    assert type(twin.get_encoder("image")) is type(tower)
    assert_equal_features(features(twin, prompt), expected)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    assert type(torch.load(stored, weights_only=False).get_encoder("image")) is type(tower)
    assert attached.manager.get_cumulative_stats().requests == 0
    model.to(torch.float64)
    in_double = features(model, {**prompt, "pixel_values": prompt["pixel_values"].double()})
    assert in_double.pooler_output[0].dtype == torch.float64
    assert attached.manager.get_cumulative_stats().requests == 0
    assert "the weights are on another device" in str(attached.report())
    model.to(torch.float32)
    assert_equal_features(features(model, prompt), expected)
    assert attached.manager.get_cumulative_stats().hits == 2
    attached.detach()
    assert model.get_encoder("image") is tower
    attached.detach()


def test_the_stock_tower_runs_where_gradients_are_asked_for() -> None:
    model = QWEN.build()
    prompt = QWEN.prompt(model, 2, 0)
    model(**prompt).logits.sum().backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    attached = attached_to(model)
    model(**prompt).logits.sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert attached.manager.get_cumulative_stats().requests == 0


def test_a_second_one_is_refused_until_the_first_is_detached() -> None:
    model = QWEN.build()
    attached = attached_to(model)
    for modality in ("image", "video"):
        with pytest.raises(EncoderConfigError, match=r"found one that is attached; remedy: detach\(\)"):
            attached_to(model, modality=modality)
    attached.detach()
    attached_to(model).detach()


@pytest.mark.parametrize("name", ["nowhere", "lm_head", ""])
def test_a_tower_that_is_not_replaced_is_refused_and_all_is_undone(name: str) -> None:
    """Where ``set_encoder`` writes it elsewhere, in place of another module, or nowhere."""
    model = QWEN.build()
    before = dict(model.named_modules())

    def set_encoder(self: Any, encoder: Any, modality: str) -> None:
        if name:
            setattr(self, name, encoder)

    model.__class__ = type("Other", (type(model),), {"set_encoder": set_encoder})
    with pytest.raises(EncoderConfigError, match="another module after set_encoder"):
        attached_to(model)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None], ids=["module", "nothing"])
def test_what_has_no_tower_is_refused(model: Any) -> None:
    with pytest.raises(EncoderConfigError, match="cannot be attached"):
        attach(model)
    language = QWEN.build().model.language_model
    with pytest.raises(EncoderConfigError, match="with an encoder of image"):
        attach(language)
