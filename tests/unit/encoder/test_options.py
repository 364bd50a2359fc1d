"""Options: what is missing follows from the model, and what contradicts it is refused with its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpass import EncoderCudaGraphManager, EncoderOptions, GraphpassError
from graphpass.encoder import EncoderAxis, EncoderCudaGraphConfig, PackingCosts
from graphpass.encoder.options import checked_config, keys_of
from graphpass.errors import EncoderConfigError
from tests.unit.encoder import toy


def config(**given: Any) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(("image",), ("patches",), 8, **given)


def made(encoder: toy.ToyEncoder, **options: Any) -> EncoderCudaGraphManager:
    return EncoderCudaGraphManager(encoder, options=EncoderOptions(**options), device="cpu", dtype=torch.float32)


def test_what_is_missing_is_inferred() -> None:
    keys = keys_of(EncoderOptions(), config(patches_per_token=4), (16, 4096))
    assert (keys[0].tokens, keys[0].patches, keys[0].items, keys[0].frames) == (4096, 16384, 32, None)
    assert (keys[-1].tokens, keys[-1].patches, keys[-1].items) == (16, 64, 1)
    assert len(keys) == 49
    assert [key.tokens for key in keys] == sorted((key.tokens for key in keys), reverse=True)


def test_options_that_are_set_stay() -> None:
    options = EncoderOptions(token_budgets=[8, 64, 16], max_items_per_batch=5, max_frames_per_batch=7)
    keys = keys_of(options, config(max_frames=9), (1, 64))
    assert [(key.tokens, key.items, key.frames) for key in keys] == [(64, 5, 7), (16, 5, 7), (8, 5, 7)]


@pytest.mark.parametrize(("asked", "of_model", "items"), [(5, 9, 5), (9, 5, 9), (None, 5, 5), (None, None, 32)])
def test_the_options_items_come_before_the_models(asked: int | None, of_model: int | None, items: int) -> None:
    options = EncoderOptions(token_budgets=[64], max_items_per_batch=asked)
    assert [key.items for key in keys_of(options, config(max_items=of_model), (1, 64))] == [items]


def test_a_limit_of_items_that_the_budgets_hold_is_accepted() -> None:
    """A model's limit and the usual one stay valid over any budgets; only the user's value is refused."""
    for options in ({"max_items_per_batch": 4}, {"max_items_per_batch": 32, "token_budgets": [128]}, {}):
        for of_model in (None, 256):
            keys = keys_of(EncoderOptions(**options), config(max_items=of_model), (4, 128))
            assert keys[0].items == options.get("max_items_per_batch", 32)
            assert keys[-1].items == max(1, min(keys[0].items, keys[-1].tokens // 4))


def test_small_budgets_have_room_for_as_many_frames_as_items() -> None:
    """Each one that a graph allows for costs its attention; a clip with smaller frames fits the largest budget."""
    keys = keys_of(EncoderOptions(token_budgets=[16, 64, 128]), config(max_frames=32, max_items=32), (16, 128))
    assert [(key.tokens, key.items, key.frames) for key in keys] == [(128, 8, 32), (64, 4, 4), (16, 1, 1)]
    asked = EncoderOptions(token_budgets=[16, 64, 128], max_frames_per_batch=20)
    assert {key.frames for key in keys_of(asked, config(max_frames=32), (16, 128))} == {20}


def test_an_item_has_some_tokens_so_small_budgets_have_fewer_items() -> None:
    keys = keys_of(EncoderOptions(token_budgets=[16, 64, 640]), config(max_items=20), (16, 640))
    assert [key.items for key in keys] == [20, 4, 1]


def test_each_path_and_axis_value_has_graphs_and_shares_the_allowance() -> None:
    axes = (EncoderAxis("size", (224, 384)), EncoderAxis("longest", (64, 256, 1024), rounds_up=True))
    keys = keys_of(EncoderOptions(max_graphs=50), config(paths=("image", "video"), axes=axes), (1, 1000))
    assert len({(key.path, key.axes) for key in keys}) == 12
    assert len({key.tokens for key in keys}) == 4
    assert len({key.descriptor for key in keys}) == len(keys) == 48
    assert {key.tokens for key in keys[:12]} == {1000}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"token_budgets": []}, r"\[\]"),
        ({"token_budgets": [8, 8]}, "8 2 times"),
        ({"token_budgets": [0]}, "found 0"),
        ({"token_budgets": [4, 8], "max_items_per_batch": 5}, "at most 4 items.*max_items_per_batch=5"),
        ({"max_items_per_batch": 0}, "max_items_per_batch=0"),
        ({"max_items_per_batch": 1.5}, r"max_items_per_batch=1\.5"),
        ({"max_frames_per_batch": -1}, "max_frames_per_batch=-1"),
        ({"max_pool_bytes": 0}, "max_pool_bytes=0"),
        ({"max_eager_tokens": 0}, "max_eager_tokens=0"),
        ({"max_graphs": 0}, "max_graphs=0"),
        ({"log_every": 0}, "log_every=0"),
        ({"token_budgets": 8}, "integers, each once; found 8"),
        ({"token_budgets": ["8", 16]}, "found '8'"),
        ({"enable": "no"}, "enable='no'"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"compile": 0}, "compile=0"),
        ({"compiler": "tvm"}, "inductor.*compiler='tvm'"),
        ({"compiler": "eager", "compile": False}, "compile=False.*compiler='eager'"),
        ({"costs": "guessed"}, "costs='guessed'"),
    ],
)
def test_options_that_no_model_could_have(options: dict[str, Any], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers) as caught:
        EncoderOptions(**options)
    assert isinstance(caught.value, GraphpassError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "encoder", "numbers"),
    [
        ({"token_budgets": [8, 64]}, {}, "from 1, its smallest item, to 32, its largest batch; found 64"),
        ({"max_items_per_batch": 256}, {"budget_range": (4, 128)}, "at most 32 items.*=256, and budgets from 4 to 128"),
        (
            {"max_items_per_batch": 33, "token_budgets": [128]},
            {"budget_range": (4, 128)},
            "at most 32 items of 4 tokens in 128 tokens; found max_items_per_batch=33",
        ),
        ({"token_budgets": [2, 3]}, {"budget_range": (4, 32)}, "from 4.*found 3"),
        ({}, {"budget_range": (0, 32)}, "minimum=0, maximum=32"),
        ({}, {"budget_range": (33, 32)}, "minimum=33, maximum=32"),
        ({"max_frames_per_batch": 4}, {}, "does not count frames; found max_frames_per_batch=4"),
        ({"max_frames_per_batch": 9}, {"max_frames": 8}, "at most 8; found max_frames_per_batch=9"),
        ({"max_graphs": 3}, {"paths": ("a", "b", "c", "d")}, "room for 0"),
        ({"compile": True}, {}, "compile_encoder.*ToyEncoder"),
        (
            {"token_budgets": [4, 8], "costs": PackingCosts({4: 1.0}, lambda tokens: 1.0)},
            {},
            r"budget 8 has no cost.*\{4: 1\.0\}",
        ),
    ],
)
def test_options_that_contradict_the_model(options: dict[str, Any], encoder: dict[str, Any], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        made(toy.ToyEncoder(**encoder), **options)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({"patches_per_token": 0}, r"patches_per_token.*found 0"),
        ({"token_multiple": 0}, r"token_multiple.*found 0"),
        ({"max_frames": 0}, r"max_frames.*found 0"),
        ({"max_items": -2}, r"max_items.*found -2"),
        ({"paths": ()}, "paths"),
        ({"paths": ("a", "a")}, r"\['a', 'a'\]"),
        ({"padding": {"pixels": 0}}, r"patches.*found 'pixels'"),
        ({"padding": {"patches": "first"}}, "found 'first'"),
        ({"axes": (EncoderAxis("size", ()),)}, "values of axis 'size'"),
        ({"axes": (EncoderAxis("size", (1,)), EncoderAxis("size", (2,)))}, r"axes.*\['size', 'size'\]"),
        ({"axes": (EncoderAxis("size", (8, 4), rounds_up=True),)}, r"ascending integers; found \(8, 4\)"),
        ({"axes": (EncoderAxis("size", ("s", "t"), rounds_up=True),)}, "ascending integers"),
    ],
)
def test_configurations_that_contradict_themselves(given: dict[str, Any], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        checked_config(config(**given))


def test_widths_are_positive() -> None:
    with pytest.raises(EncoderConfigError, match=r"output_width 1.*found 0"):
        checked_config(EncoderCudaGraphConfig(("image",), ("patches",), (8, 0)))
