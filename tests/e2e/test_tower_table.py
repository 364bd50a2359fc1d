"""Towers of images of any size, and of one: equal and replaying, or refused with a true reason."""

from __future__ import annotations

import pytest

from tests.e2e.hugging_face import CPU as HOST
from tests.e2e.hugging_face import CUDA, Place
from tests.e2e.tower_table import LADDER, NUM_REQUESTS, SHARE, TABLE, measured, row_of
from tests.e2e.towers import FAMILIES, Tower

IN_EVERY_RUN = ("dinov2", "exaone4_5", "glm4v", "paddleocr_vl")
REFUSED = {
    "cosmos3_edge": "Tensor.tolist",
    "hunyuan_vl": "_local_scalar_dense",
    "hy_v4_vl": "_local_scalar_dense",
    "lfm3_vl": "Tensor.tolist",
    "siglip2": "pixel_attention_mask",
    "video_llama_3": "merge_sizes",
}
"""What they read on the host, or need beside patches and grids."""


def case(family: Tower, place: Place) -> object:
    """Some families in every run, or all of them on a GPU."""
    in_soak = [] if str(family) in IN_EVERY_RUN else [pytest.mark.soak]
    return pytest.param(family, place, marks=in_soak if place is HOST else pytest.mark.cuda, id=f"{family}-{place}")


@pytest.mark.parametrize(("family", "place"), [case(family, place) for place in (HOST, CUDA) for family in FAMILIES])
def test_a_tower_is_equal_and_replays_or_is_refused(family: Tower, place: Place) -> None:
    if not family.is_there:
        pytest.skip("this transformers does not have it")
    outcome = measured(family, place)
    assert bool(outcome.refusal) == (str(family) in REFUSED)
    if outcome.refusal:
        assert REFUSED[str(family)] in outcome.refusal
        return
    assert outcome.difference < (place.tolerance if place is HOST else 1.5 * outcome.rounding)
    assert outcome.replayed >= SHARE * NUM_REQUESTS
    assert outcome.graphs <= len(LADDER)
    if place is HOST:
        assert row_of(family, outcome) == TABLE.rows()[str(family)]


def test_the_page_has_every_family() -> None:
    rows = TABLE.rows()
    assert sorted(map(str, FAMILIES)) == sorted(rows)
    assert {name for name, row in rows.items() if "refused" in row} == REFUSED.keys()
