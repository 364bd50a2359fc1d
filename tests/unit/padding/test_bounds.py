"""Indices in padding: a size whose padding could name entries that do not exist is not padded, or they are made 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding

import graphpass as gp

TABLE = torch.arange(40.0).view(10, 4)


def positions_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x + embedding(torch.arange(x.shape[1]), TABLE)


def positions_by_index(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE[torch.arange(x.shape[1])]


def positions_picked(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE.index_select(0, torch.arange(x.shape[1]))


def positions_counted(x: torch.Tensor) -> torch.Tensor:
    return x + embedding(torch.ones_like(x[..., 0], dtype=torch.long).cumsum(1) - 1, TABLE)


def positions_gathered(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[1])[None, :, None].expand(x.shape[0], -1, 4)
    return x + TABLE[None].expand(x.shape[0], -1, -1).gather(1, rows)


def features(size: int) -> torch.Tensor:
    return torch.randn(3, size, 4)


def indices(size: int) -> torch.Tensor:
    return torch.randint(10, (3, size))


def run(
    model: Callable[..., Any], draw: Callable[[int], torch.Tensor], *sizes: int, **options: Any
) -> tuple[dict[str, str], gp.GraphRuntime]:
    """The verdicts after three calls at each size, and the runtime."""
    options |= {"on_fallback": "silent"}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        for size in sizes * 3:
            x = draw(size)
            torch.testing.assert_close(compiled(x), model(x))
    runtime = gp.runtime_of(compiled)
    return {size.field: str(size.verdict) for record in runtime.callables() for size in record.sizes}, runtime


POSITIONS = pytest.mark.parametrize(
    "model", [positions_of_rows, positions_by_index, positions_picked, positions_counted, positions_gathered]
)


@POSITIONS
def test_positions_beyond_a_table_are_never_read(model: Callable[..., Any]) -> None:
    verdicts, runtime = run(model, features, 5, 9, 7, compiler="eager")
    assert verdicts["x[1]"] == "unproved"
    assert runtime.stats().replayed >= 3, "sizes that recur are captured as they are"


@POSITIONS
def test_positions_beyond_a_table_are_made_0(model: Callable[..., Any]) -> None:
    verdicts, runtime = run(model, features, 5, 9, 7, compiler="aot_eager")
    assert verdicts["x[1]"] == "made"
    assert any(key.padding for key in runtime.report().figures.keys)


@pytest.mark.parametrize(
    ("padding", "verdict"),
    [({}, "proved"), ({"ids": 0}, "proved"), ({"ids": -100}, "unproved"), ({"ids": 10**6}, "unproved")],
    ids=["repeated", "first", "negative", "large"],
)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_index_in_padding_has_to_exist(padding: dict[str, int], verdict: str, compiler: str) -> None:
    def model(ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, TABLE) * 2

    options = {"padding": padding} if padding else {}
    found = run(model, indices, 5, 7, compiler=compiler, **options)[0]["ids[1]"]
    assert found == (verdict if compiler == "eager" else "made")


def test_positions_within_the_padded_tensor_itself_are_whole() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(x.shape[0])] + 1

    assert run(model, lambda size: torch.randn(size, 4), 5, 7, compiler="eager")[0]["x[0]"] == "proved"
