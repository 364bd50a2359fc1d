"""Indices in padding: a size whose padding could name entries that do not exist is not padded."""

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


def run(model: Callable[..., Any], *sizes: int) -> gp.GraphRuntime:
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
    with torch.no_grad():
        for _ in range(3):
            for size in sizes:
                x = torch.randn(3, size, 4)
                torch.testing.assert_close(compiled(x), model(x))
    return gp.runtime_of(compiled)


def verdicts(runtime: gp.GraphRuntime) -> dict[str, str]:
    return {size.field: str(size.verdict) for record in runtime.callables() for size in record.sizes}


@pytest.mark.parametrize(
    "model", [positions_of_rows, positions_by_index, positions_picked, positions_counted, positions_gathered]
)
def test_positions_beyond_a_table_are_never_read(model: Callable[..., Any]) -> None:
    runtime = run(model, 5, 9, 7)
    assert verdicts(runtime)["x[1]"] == "unproved"
    assert runtime.stats().replayed >= 3, "sizes that recur are captured as they are"


def test_indices_that_repeat_real_ones_are_valid() -> None:
    def model(ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, TABLE) * 2

    compiled = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
    with torch.no_grad():
        for size in (5, 7, 5, 7, 5, 7):
            ids = torch.randint(10, (3, size))
            torch.testing.assert_close(compiled(ids), model(ids))
    assert verdicts(gp.runtime_of(compiled))["ids[1]"] == "proved"


@pytest.mark.parametrize(("pad", "verdict"), [(0, "proved"), (-100, "unproved"), (10**6, "unproved")])
def test_a_declared_index_has_to_exist(pad: int, verdict: str) -> None:
    def model(ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, TABLE)

    options = {"compiler": "aot_eager", "padding": {"ids": pad}, "on_fallback": "silent"}
    compiled = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    with torch.no_grad():
        for size in (5, 7, 5, 7, 5, 7):
            ids = torch.randint(10, (3, size))
            torch.testing.assert_close(compiled(ids), model(ids))
    assert verdicts(gp.runtime_of(compiled))["ids[1]"] == verdict


def test_positions_within_the_padded_tensor_itself_are_whole() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(x.shape[0])] + 1

    compiled = torch.compile(model, backend="cgpass", dynamic=True, options={"compiler": "aot_eager"})
    with torch.no_grad():
        for size in (5, 7, 5, 7, 5, 7):
            x = torch.randn(size, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert verdicts(gp.runtime_of(compiled))["x[0]"] == "proved"
