"""The ladder that a report suggests, taken from its text and declared: more calls replay, also beside exact sizes."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from tests.unit.cgpass.attended import Make
from tests.unit.models import module

CALLS = 50


def embedded(forward: Callable[..., Any]) -> nn.Module:
    return module(forward, words=nn.Embedding(50, 6), layer=nn.Linear(6, 6)).eval()


#: Each pads the batch, and mixes the second dimension in a way that no proof covers.
RAGGED: dict[str, nn.Module] = {
    "a mean": embedded(lambda self, ids: self.layer(self.words(ids).mean(1))),
    "a sort": embedded(lambda self, ids: self.layer(self.words(ids.sort(1)[0]))),
}


def traffic(most: int, calls: int = CALLS) -> list[tuple[torch.Tensor]]:
    sizes, drawn = random.Random(0), torch.Generator().manual_seed(0)
    shapes = [(sizes.randint(2, 6), sizes.randint(2, most)) for _ in range(calls)]
    return [(torch.randint(50, shape, generator=drawn),) for shape in shapes]


def ladder_in(remedy: str) -> dict[str, list[int]]:
    found = re.search(r"capture_sizes=(\{.*?\})", remedy)
    assert found is not None, remedy
    ladder: dict[str, list[int]] = ast.literal_eval(found[1])
    return ladder


@pytest.mark.parametrize("name", RAGGED)
def test_a_suggested_ladder_raises_replays(compiled: Make, name: str) -> None:
    model, calls = RAGGED[name], traffic(13)
    fast = compiled(model, dynamic=True)
    before = fast.serve(calls)
    ladder = ladder_in(fast.problem("were the first of their sizes").remedy)
    assert f"capture_sizes={ladder}" in str(fast.rt.report()), "the same is suggested for this traffic"
    fast = compiled(model, dynamic=True, capture_sizes=ladder)
    assert fast.serve(calls) > before + 10, "also without a capture ahead"
    fast = compiled(model, dynamic=True, capture_sizes=ladder)
    with torch.no_grad():
        gp.precapture(fast.fast, *calls[0])
    assert fast.serve(calls) == len(calls)
    assert not any("first of their sizes" in problem.what for problem in fast.problems)
