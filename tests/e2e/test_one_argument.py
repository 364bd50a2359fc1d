"""``torch.compile(model, backend="cgpass")`` and nothing else: stock models on ragged batches, beside eager."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

import graphpass as gp
from tests.e2e.stock_models import MODELS

IN_EVERY_RUN = ("bert", "convnext")
LARGEST, NUM_BATCHES, MAX_GRAPHS_WHERE_PROVED = 33, 40, 14


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Every tensor of a model's result."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tuple(result.values())) if torch.is_tensor(leaf)]


def rows(table: str, runtime: gp.GraphRuntime) -> list[tuple[str, ...]]:
    """The rows of one table of the report."""
    return [row for found in runtime.report().tables if found.title == table for row in found.rows]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.soak) for name in MODELS]
)
def test_ragged_batches_replay_and_equal_eager(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval()
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager"})
    rng = random.Random(0)
    sizes = [rng.randint(1, LARGEST) for _ in range(NUM_BATCHES)]
    with torch.no_grad():
        fast(**inputs(sizes[0]))
        runtime = gp.runtime_of(fast)
        for _ in range(2):
            replays = 0
            for size in sizes:
                batch, before = inputs(size), runtime.traffic.num_calls(with_graph=True)
                found, expected = tensors_of(fast(**batch)), tensors_of(model(**batch))
                assert len(found) == len(expected)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
                replays += runtime.traffic.num_calls(with_graph=True) > before
    verdicts = {(row[1], row[2]) for row in rows("Padding", runtime) if row[2] in ("proved", "runtime", "unproved")}
    limited = sum(int(row[4]) for row in rows("Calls", runtime) if "max_graphs" in row[3])
    graphs = runtime.stats().captured
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {replays} of {NUM_BATCHES} calls replay, {graphs} graphs, {verdicts}\n")
    assert replays >= 0.9 * (NUM_BATCHES - limited)
    if all(verdict == "proved" for _, verdict in verdicts):
        assert graphs <= MAX_GRAPHS_WHERE_PROVED
