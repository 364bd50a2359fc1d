"""Items of no tokens: an empty result for each, and nothing that runs for them."""

from __future__ import annotations

import pytest
import torch

from tests.unit.encoder import toy
from tests.unit.encoder.toy import assert_same, made


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("captures", [True, False])
def test_items_without_tokens_run_nothing(captures: bool, levels: int) -> None:
    encoder = toy.ToyEncoder(toy.ToyTower(levels=levels))
    manager = made(encoder, capture=captures)
    forwards = len(encoder.forwards)
    for sizes in ([0], [0, 0, 0], [0, 4, 0]):
        items = toy.images(sizes)
        found = manager.execute(items)
        for size, result in zip(sizes, found, strict=True):
            for part in (result,) if levels == 1 else result:
                assert isinstance(part, torch.Tensor)
                assert (tuple(part.shape), part.dtype) == ((size // 2, toy.WIDTH), torch.float32)
        assert len(encoder.prepared) == (captures and sum(sizes) > 0)
        assert encoder.eager_calls == ([1] if not captures and sum(sizes) else [])
    assert_same(found, toy.one_by_one(encoder, items))
    stats = manager.get_cumulative_stats()
    assert (stats.hits, stats.misses, stats.requests) == (int(captures), int(not captures), 3)
    assert (stats.replays, len(encoder.forwards) - forwards) == (int(captures), 0)


def test_items_without_tokens_have_the_dtype_of_the_other_results() -> None:
    """Under another autocast than at capture the encoder runs eagerly, in the dtype of that autocast."""
    manager = made(toy.ToyEncoder())
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = [result.dtype for result in manager.execute(toy.images([0, 4]))]  # type: ignore[union-attr]
    assert dtypes == [torch.bfloat16] * 2
