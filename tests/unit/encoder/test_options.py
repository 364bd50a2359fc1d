"""Options and budgets: what is missing follows from the model, and what contradicts it is refused with its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass import EncoderCudaGraphManager, EncoderOptions, GraphpassError
from graphpass.encoder import (
    EncoderAxis,
    EncoderCudaGraphConfig,
    PackingCosts,
    generate_budgets,
    smallest_fitting_budget,
)
from graphpass.encoder.options import checked_budgets, checked_config, fine_budgets, keys_of
from graphpass.errors import EncoderConfigError
from tests.unit.encoder import toy


def config(**given: Any) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(("image",), ("patches",), 8, **given)


def made(encoder: toy.ToyEncoder, **options: Any) -> EncoderCudaGraphManager:
    return EncoderCudaGraphManager(encoder, options=EncoderOptions(**options), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "of_model", "limits", "keys"),
    [
        ({"token_budgets": [8, 64], "max_items_per_batch": 5, "max_frames_per_batch": 7}, {"max_frames": 9}, (1, 64),
            [(64, 5, 7), (8, 5, 7)]),
        # the option before the model's limit, that before the usual one
        ({"token_budgets": [64], "max_items_per_batch": 9}, {"max_items": 5}, (1, 64), [(64, 9, None)]),
        ({"token_budgets": [64]}, {"max_items": 5}, (1, 64), [(64, 5, None)]),
        ({"token_budgets": [64]}, {}, (1, 64), [(64, 32, None)]),
        # an item has some tokens, so small budgets have fewer items; only the user's limit is refused
        ({"token_budgets": [16, 64, 640]}, {"max_items": 20}, (16, 640),
            [(640, 20, None), (64, 4, None), (16, 1, None)]),
        ({"token_budgets": [128]}, {"max_items": 256}, (4, 128), [(128, 32, None)]),
        # as many frames as items: each one that a graph allows for costs its attention
        ({"token_budgets": [16, 64, 128]}, {"max_frames": 32, "max_items": 32}, (16, 128),
            [(128, 8, 32), (64, 4, 4), (16, 1, 1)]),
        ({"token_budgets": [16, 128], "max_frames_per_batch": 20}, {"max_frames": 32}, (16, 128),
            [(128, 8, 20), (16, 1, 20)]),
    ],
)  # fmt: skip
def test_keys_follow_from_options_and_the_model(
    options: dict[str, Any], of_model: dict[str, Any], limits: tuple[int, int], keys: list[tuple[int, int, int | None]]
) -> None:
    found = keys_of(EncoderOptions(**options), config(**of_model), limits)
    assert [(key.tokens, key.items, key.frames) for key in found] == keys


def test_what_is_missing_is_inferred() -> None:
    keys = keys_of(EncoderOptions(), config(patches_per_token=4), (16, 4096))
    assert (keys[0].tokens, keys[0].patches, keys[0].items, keys[0].frames) == (4096, 16384, 32, None)
    assert (keys[-1].tokens, keys[-1].patches, keys[-1].items) == (16, 64, 1)
    assert len(keys) == 49
    assert [key.tokens for key in keys] == sorted((key.tokens for key in keys), reverse=True)


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
        ({"token_budgets": [8, 8]}, r"\[8, 8\]"),
        ({"token_budgets": [0]}, r"\[0\]"),
        ({"token_budgets": [4, 8], "max_items_per_batch": 5}, "at most 4 items.*max_items_per_batch=5"),
        ({"max_items_per_batch": 0}, "max_items_per_batch=0"),
        ({"max_frames_per_batch": -1}, "max_frames_per_batch=-1"),
        ({"max_pool_bytes": 0}, "max_pool_bytes=0"),
        ({"max_eager_tokens": 0}, "max_eager_tokens=0"),
        ({"max_graphs": 0}, "max_graphs=0"),
        ({"log_every": 0}, "log_every=0"),
        ({"token_budgets": 8}, "integers, each once; found token_budgets=8"),
        ({"enable": "no"}, "enable='no'"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"compiler": "tvm"}, "inductor.*compiler='tvm'"),
        ({"compiler": "eager", "compile": False}, "compile=False.*compiler='eager'"),
        ({"tune": "measure", "compile": False}, "compile=False.*tune='measure'"),
        ({"tune": "always"}, "'measure' or None; found tune='always'"),
        ({"tune_seconds": 0}, "above 0; found tune_seconds=0"),
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
        ({"token_budgets": [8, 64]}, {}, "from 1, the smallest item, to 32, the largest batch.*=64"),
        ({"max_items_per_batch": 256}, {"budget_range": (4, 128)}, "at most 32 items.*=256, and budgets from 4 to 128"),
        (
            {"max_items_per_batch": 33, "token_budgets": [128]},
            {"budget_range": (4, 128)},
            "at most 32 items of 4 tokens in 128 tokens; found max_items_per_batch=33",
        ),
        ({"token_budgets": [2, 3]}, {"budget_range": (4, 32)}, "from 4.*=3"),
        ({}, {"budget_range": (0, 32)}, "minimum=0, maximum=32"),
        ({}, {"budget_range": (33, 32)}, "minimum=33, maximum=32"),
        ({"max_frames_per_batch": 4}, {}, "does not count frames; found max_frames_per_batch=4"),
        ({"max_frames_per_batch": 9}, {"max_frames": 8}, "at most 8; found max_frames_per_batch=9"),
        ({"max_graphs": 3}, {"paths": ("a", "b", "c", "d")}, "max_graphs=0"),
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
    ("minimum", "maximum", "ratio", "budgets"),
    [
        (64, 4096, 2, [64, 128, 256, 512, 1024, 2048, 4096]),
        (64, 1000, 2, [64, 128, 256, 512, 1000]),
        (5, 5, 2, [5]),
        (1, 3, 2, [1, 2, 3]),
        (1, 6, 1.1, [1, 2, 3, 4, 5, 6]),
        (10, 40, 1.5, [10, 15, 22, 33, 40]),
    ],
)
def test_a_ladder_grows_by_its_ratio_and_ends_at_the_maximum(
    minimum: int, maximum: int, ratio: float, budgets: list[int]
) -> None:
    assert generate_budgets(minimum, maximum, ratio=ratio) == budgets


@pytest.mark.parametrize(("tokens", "budget"), [(0, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_the_smallest_fitting_budget(tokens: int, budget: int | None) -> None:
    assert smallest_fitting_budget([4, 8], tokens) == budget


def worst_padding(budgets: list[int]) -> float:
    return max((1 - (small + 1) / large for small, large in itertools.pairwise(budgets)), default=0)


def test_the_default_number_of_graphs_pads_little() -> None:
    budgets = fine_budgets(16, 4096, max_graphs=EncoderOptions().max_graphs)
    assert len(budgets) <= EncoderOptions().max_graphs
    assert worst_padding(budgets) <= 0.125
    assert set(budgets) >= {4096, 2048, 1024, 512, 256, 128, 64, 32, 16}


@given(st.integers(1, 300), st.integers(0, 5000), st.integers(2, 40))
def test_a_fine_ladder_keeps_to_its_length_and_halves_where_it_can(minimum: int, above: int, max_graphs: int) -> None:
    budgets = fine_budgets(minimum, minimum + above, max_graphs=max_graphs)
    assert budgets == sorted(set(budgets))
    assert (budgets[0], budgets[-1]) == (minimum, minimum + above)
    assert len(budgets) <= max_graphs
    if max_graphs > math.log2((minimum + above) / minimum) + 1:
        assert worst_padding(budgets) <= 0.5


def test_budgets_are_multiples_of_what_items_are() -> None:
    budgets = fine_budgets(50, 1620, max_graphs=8, multiple=50)
    assert {budget % 50 for budget in budgets} == {0}
    assert (budgets[0], budgets[-1]) == (50, 1600)


def test_one_graph_is_the_largest() -> None:
    assert fine_budgets(2, 100, max_graphs=1) == [100]


CONTRADICTIONS: list[tuple[Callable[[], object], str]] = [
    # budgets of the user
    (lambda: checked_budgets([4, 2.5], 4, 100), r"\[4, 2\.5\]"),  # type: ignore[list-item]
    (lambda: checked_budgets([4, True], 4, 100), r"\[4, True\]"),
    # ladders
    (lambda: generate_budgets(0, 4), "minimum=0, maximum=4"),
    (lambda: generate_budgets(9, 4), "minimum=9, maximum=4"),
    (lambda: generate_budgets(1, 4, ratio=1), "ratio=1"),
    (lambda: generate_budgets(1, 4, ratio=math.inf), "ratio=inf"),
    (lambda: fine_budgets(1, 8, max_graphs=0), "max_graphs=0"),
    (lambda: fine_budgets(8, 4, max_graphs=3), "minimum=8, maximum=4"),
    (lambda: fine_budgets(3, 4, max_graphs=3, multiple=5), "minimum=1, maximum=0"),
    # configurations
    (lambda: checked_config(config(patches_per_token=0)), r"patches_per_token.*found 0"),
    (lambda: checked_config(config(token_multiple=0)), r"token_multiple.*found 0"),
    (lambda: checked_config(config(max_frames=0)), r"max_frames.*found 0"),
    (lambda: checked_config(config(max_items=-2)), r"max_items.*found -2"),
    (lambda: checked_config(config(paths=())), "paths"),
    (lambda: checked_config(config(paths=("a", "a"))), r"\['a', 'a'\]"),
    (lambda: checked_config(config(padding={"pixels": 0})), r"patches.*found 'pixels'"),
    (lambda: checked_config(config(padding={"patches": "first"})), "found 'first'"),
    (lambda: checked_config(config(axes=(EncoderAxis("size", ()),))), "values of axis 'size'"),
    (lambda: checked_config(config(axes=(EncoderAxis("size", (1,)),) * 2)), r"axes.*\['size', 'size'\]"),
    (lambda: checked_config(config(axes=(EncoderAxis("size", (8, 4), True),))), r"ascending integers; found \(8, 4\)"),
    (lambda: checked_config(config(axes=(EncoderAxis("size", ("s", "t"), True),))), "ascending integers"),
    (
        lambda: checked_config(EncoderCudaGraphConfig(("image",), ("patches",), (8, 0))),
        r"output_width 1.*found 0",
    ),
]


@pytest.mark.parametrize(("call", "numbers"), CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_with_its_numbers(call: Callable[[], object], numbers: str) -> None:
    with pytest.raises(EncoderConfigError, match=numbers):
        call()


def test_budgets_of_the_user_ascend() -> None:
    assert checked_budgets([100, 2, 8], 4, 100) == (2, 8, 100)
