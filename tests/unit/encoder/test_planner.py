"""From sizes to keys: each limit of a key by itself decides whether two items share a replay."""

from __future__ import annotations

from typing import Any

import pytest

from graphpass.encoder import EncoderAxis, EncoderCudaGraphConfig, EncoderGraphKey, EncoderItemSpec, PackedBatch
from graphpass.encoder.costs import EncoderCosts
from graphpass.encoder.planner import BatchPlanner

CONFIG = EncoderCudaGraphConfig(
    ("image",),
    ("patches",),
    8,
    paths=("image", "video"),
    axes=(EncoderAxis("size", ("s", "m")), EncoderAxis("longest", (10, 20), rounds_up=True)),
    max_frames=4,
)
KEYS = [
    EncoderGraphKey(tokens, 2 * tokens, items, 2 * items, path, (("size", size), ("longest", longest)))
    for tokens, items in ((20, 2), (10, 1))
    for path in CONFIG.paths
    for size in ("s", "m")
    for longest in (10, 20)
]
HALF: dict[str, Any] = {"output_tokens": 10, "input_size": 20, "frames": 2, "path": "image", "axes": ("s", 10)}
"""Two of it fill the larger key."""


def item(**changes: Any) -> EncoderItemSpec:
    given = {**HALF, **changes}
    return EncoderItemSpec(**{**given, "axes": tuple(zip(("size", "longest"), given["axes"], strict=True))})


def planned(specs: list[EncoderItemSpec], has_costs: bool) -> list[PackedBatch]:
    """Sharing is cheaper than two replays, and an eager call is dearest."""
    replay = {key: 1.0 + key.tokens / 100 + dict(key.axes)["longest"] / 1000 for key in KEYS}  # type: ignore[operator]
    groups = {(path, size) for path in CONFIG.paths for size in ("s", "m")}
    costs = EncoderCosts(replay, dict.fromkeys(groups, lambda tokens: 100.0 + tokens))
    return list(BatchPlanner(CONFIG, KEYS, costs if has_costs else None, 0).plan(specs))


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        ({}, [20]),
        ({"output_tokens": 11, "input_size": 20}, [10, 20]),
        ({"input_size": 21}, [10, 20]),
        ({"frames": 3}, [10, 20]),
        ({"output_tokens": 9}, [20]),
        ({"path": "video"}, [10, 10]),
        ({"axes": ("m", 10)}, [10, 10]),
        ({"axes": ("s", 20)}, [20]),
        ({"axes": ("s", 21)}, [10, None]),
        ({"axes": ("l", 10)}, [10, None]),
        ({"input_size": 41}, [10, None]),
    ],
    ids=str,
)
def test_each_limit_takes_part(other: dict[str, Any], tokens: list[int | None], has_costs: bool) -> None:
    specs = [item(), item(**other)]
    batches = planned(specs, has_costs)
    found = [batch.budget.tokens if batch.budget else None for batch in batches]
    assert sorted(found, key=str) == sorted(tokens, key=str)
    for batch in batches:
        if batch.budget is not None:
            mine = [specs[place] for place in batch.items]
            assert sum(spec.output_tokens for spec in mine) <= batch.budget.tokens
            assert sum(spec.input_size for spec in mine) <= batch.budget.patches
            assert sum(spec.frames for spec in mine) <= (batch.budget.frames or 0)
            assert max(dict(spec.axes)["longest"] for spec in mine) <= dict(batch.budget.axes)["longest"]  # type: ignore[operator,type-var]
            assert {(spec.path, spec.axes[0]) for spec in mine} == {(batch.budget.path, batch.budget.axes[0])}


@pytest.mark.parametrize("has_costs", [False, True])
def test_the_number_of_items_takes_part(has_costs: bool) -> None:
    batches = planned([item(output_tokens=1, input_size=1, frames=1)] * 3, has_costs)
    assert sorted(len(batch.items) for batch in batches) == [1, 2]
