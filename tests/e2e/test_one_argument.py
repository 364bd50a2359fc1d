"""``torch.compile(model, backend="cgpass")`` and nothing else: stock models on ragged batches, beside eager."""

from __future__ import annotations

import pytest

from tests.e2e.encoder_table import TABLE, measured, row_of
from tests.e2e.pagetable import TORCH, TRANSFORMERS, is_version_of_page
from tests.e2e.stock_encoders import ENCODERS

IN_EVERY_RUN = ("BertModel", "ConvNextModel", "MPNetModel", "Aimv2VisionModel")
FEWEST_ENCODERS = 40

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.soak) for name in ENCODERS]
)
def test_an_encoder_is_equal_to_eager_and_its_row_is_on_the_page(name: str) -> None:
    outcome = measured(name)
    assert outcome.problem == ""
    if is_version_of_page():
        assert row_of(name, outcome) == TABLE.rows()[name]


def test_the_page_has_every_encoder_and_none_that_differs() -> None:
    found = TABLE.rows()
    assert found.keys() == ENCODERS.keys()
    assert len(found) >= FEWEST_ENCODERS
    results = [row.split(" | ")[1] for row in found.values()]
    assert all(result == "equal" or result.startswith("refused: ") for result in results)
    assert {encoder.kind for encoder in ENCODERS.values()} == {"text", "images", "sound"}
    assert f"torch {TORCH}" in TABLE.text()
    assert f"transformers {TRANSFORMERS}" in TABLE.text()
