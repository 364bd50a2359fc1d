"""``torch.compile(model, backend="cgpass")`` and nothing else: stock models on ragged batches, beside eager."""

from __future__ import annotations

import importlib.metadata
import random
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.e2e.encoder_table import PAGE, TORCH, TRANSFORMERS, measured, row_of, rows_of_page
from tests.e2e.one_argument import compare
from tests.e2e.stock_encoders import DECODERS, ENCODERS

RAGGED = (
    *("BertModel", "RobertaModel", "DistilBertModel", "AlbertModel", "ElectraModel", "MPNetModel", "T5EncoderModel"),
    *("ViTModel", "DeiTModel", "BeitModel", "Dinov2Model", "CLIPVisionModel", "SiglipVisionModel", "SwinModel"),
    *("ConvNextModel", "ResNetModel", "MobileNetV2Model", "SegformerModel"),
    *("WhisperEncoder", "Wav2Vec2Model", "HubertModel", *DECODERS),
)
RAGGED_IN_EVERY_RUN, IN_EVERY_RUN = ("BertModel", "ConvNextModel"), ("MPNetModel", "Aimv2VisionModel")
LARGEST, NUM_BATCHES, MAX_GRAPHS_WHERE_PROVED = 33, 40, 14
FEWEST_ENCODERS = 40
IS_VERSION_OF_PAGE = torch.__version__.startswith(TORCH) and importlib.metadata.version("transformers") == TRANSFORMERS

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")


def some_in_every_run(names: Iterable[str], some: Iterable[str]) -> list[Any]:
    return [name if name in some else pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.mark.parametrize("name", some_in_every_run(RAGGED, RAGGED_IN_EVERY_RUN))
def test_ragged_batches_replay_and_equal_eager(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, rng = {**ENCODERS, **DECODERS}[name], random.Random(0)
    sizes = [rng.randint(1, LARGEST) for _ in range(NUM_BATCHES)]
    outcome = compare(encoder.build(), lambda: [encoder.inputs(size, encoder.lengths[0]) for size in sizes])
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {outcome}\n")
    assert (outcome.problem, outcome.refusal) == ("", "")
    assert outcome.replays >= 0.9 * (NUM_BATCHES - outcome.limited)
    if all(verdict == "proved" for _, verdict in outcome.verdicts):
        assert outcome.graphs <= MAX_GRAPHS_WHERE_PROVED


@pytest.mark.parametrize("name", some_in_every_run(ENCODERS, IN_EVERY_RUN))
def test_an_encoder_is_equal_to_eager_and_its_row_is_on_the_page(name: str) -> None:
    outcome = measured(name)
    assert outcome.problem == ""
    if IS_VERSION_OF_PAGE:
        assert row_of(name, outcome) == rows_of_page()[name]


def test_the_page_has_every_encoder_and_none_that_differs() -> None:
    found = rows_of_page()
    assert found.keys() == ENCODERS.keys()
    assert len(found) >= FEWEST_ENCODERS
    results = [row.split(" | ")[1] for row in found.values()]
    assert all(result == "equal" or result.startswith("refused: ") for result in results)
    assert {encoder.kind for encoder in ENCODERS.values()} == {"text", "images", "sound"}
    page = PAGE.read_text(encoding="utf-8")
    assert f"torch {TORCH}" in page
    assert f"transformers {TRANSFORMERS}" in page
