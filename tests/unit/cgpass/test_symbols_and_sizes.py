"""Which size picks which graph: key fields by symbol, derived symbols, size 1, guards, and Dynamo's recompile limit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpass import BatchDescriptor, GraphRuntime
from graphpass.errors import CaptureError, ShapeError
from tests.unit.cgpass.attended import ATTEND, Make
from tests.unit.compiled import BOTH, Compiled


@pytest.fixture
def keyed(rt: GraphRuntime) -> Make:
    """Split at both ops, sizes as symbols."""
    return functools.partial(Compiled, rt, dynamic=True, splitting_ops=[ATTEND, "cgpasstest::scale"])


# -- two symbols


def two_fields(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = torch.ops.cgpasstest.attend(x.softmax(1) * mask)
    return y.cumsum(1) + x.shape[1]


def reqs_by_length(size: tuple[int, int]) -> BatchDescriptor:
    return BatchDescriptor(size[0] * size[1], num_reqs=size[0], extra=(("seq_len", size[1]),))


TWO_FIELDS: dict[str, Any] = {
    "capture_sizes": {"num_reqs": [2, 3, 4, 6], "seq_len": [2, 3, 4, 6]},
    "dynamic_dims": {"x": {0: "num_reqs", 1: "seq_len"}},
    "key": reqs_by_length,
    "make": lambda size: (torch.randn(*size), torch.rand(*size)),
}


def test_keys_that_a_later_compilation_left_behind_are_named_when_capture_ends(
    keyed: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo makes equal sizes one symbol; its next graph tells them apart and serves the first key from then on."""
    fast = keyed(two_fields, **TWO_FIELDS)
    with caplog.at_level(logging.WARNING, "graphpass"):
        fast.capture("FULL", sizes=((4, 4), (3, 4)))
        (warning,) = [record for record in caplog.records if record.name == "graphpass"]
    for piece in ("compiled g1 after g0 was captured at FULL", str(reqs_by_length((4, 4))), "capturing()"):
        assert piece in warning.message
    assert [problem.what in warning.message for problem in fast.problems] == [True]
    with pytest.raises(CaptureError, match="compiled the function again"):
        fast.check("FULL", sizes=[(4, 4)])
    fast.capture("FULL", sizes=[(4, 4)])
    fast.check("FULL", sizes=[(4, 4)])
    assert fast.problems == (), "until the remedy was followed"


# -- derived symbols, and none


DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": lambda x: torch.ops.cgpasstest.attend(x.flatten()) * 2,
    "halved": lambda x: torch.ops.cgpasstest.attend(x[: x.shape[0] // 2] + 1) * 2,
    "one less": lambda x: torch.ops.cgpasstest.attend(x[1:] + 1) * 2,
    "product": lambda x: torch.ops.cgpasstest.attend(x @ x.t()).flatten() * 2,
    "arange": lambda x: torch.ops.cgpasstest.attend(torch.arange(x.shape[0]).float() * 2) + x.sum(),
    "full of the size": lambda x: torch.ops.cgpasstest.attend(torch.full((x.shape[0] * 2,), x.shape[0])) * 2.0,
}


@pytest.mark.parametrize("name", DERIVED)
def test_sizes_computed_from_the_symbol(keyed: Make, name: str) -> None:
    fast = keyed(DERIVED[name])
    fast.capture(sizes=(8, 4))
    fast.check(sizes=(4, 8, 4))
    assert fast.rt.stats().callables == 1
    for mode in BOTH:
        assert {(size, counts) for (_, size), counts in fast.tally(mode).items()} == {(8, (1, 2)), (4, (1, 3))}


def test_symbols_of_an_input_that_is_no_key_are_no_key(keyed: Make) -> None:
    """The first symbolic size of this graph is the table's, which is the same at every key."""

    def model(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cgpasstest.attend(x + table.sum()) * table.shape[0]

    dims: dict[str, Any] = {"capture_sizes": [4, 8], "dynamic_dims": {"x": 0}}
    fast = keyed(model, make=lambda size: (torch.randn(9, 6), torch.randn(size, 6)), **dims)
    fast.capture("PIECEWISE", sizes=(8, 4))
    fast.check("PIECEWISE", sizes=(4, 8))
    with pytest.raises(ShapeError, match="l_table_"):
        # Another table is no graph's, and must not be taken for one.
        fast.at("PIECEWISE", 4, torch.randn(7, 6), torch.randn(4, 6))


# -- guards


def between(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 4:
        return x + 1
    return x * 2 if x.shape[0] <= 8 else x - 3


#: mode, model, the first size, those outside its guards, a number of their constraints, graphs
GUARDED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], int, list[int], str, int]] = {
    "above four": ("FULL", lambda x: x * 2 if x.shape[0] > 4 else x + 1, 8, [2, 4], "5", 2),
    "between": ("FULL", between, 6, [2, 16], "", 3),
    "divisible": ("PIECEWISE", lambda x: x.view(-1, 4, 5).sum(1) if x.shape[0] % 4 == 0 else x + 1, 8, [2, 6], "4", 2),
    "exactly six": ("FULL", lambda x: x.view(2, 3, 5).sum(0) if x.shape[0] == 6 else x * 2, 8, [6], "6", 2),
    "of twice the size": (
        "PIECEWISE",
        lambda x: torch.cat([x, x]) * 2 if torch.cat([x, x]).shape[0] > 10 else x + 1,
        8,
        [2, 4],
        "",
        2,
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_sizes_outside_the_guards_are_listed_and_captured_as_graphs_of_their_own(keyed: Make, name: str) -> None:
    mode, model, first, excluded, number, callables = GUARDED[name]
    sizes = [2, 4, 6, 8, 16]
    # No size is as wide as the rows: Dynamo would take the two for one.
    fast = keyed(model, make=lambda size: (torch.randn(size, 5),), capture_sizes=sizes, dynamic_dims={"x": 0})
    fast.capture(mode, sizes=[first])
    listed = {size: note for note in fast.rt.notes for size in sizes if f"g0: num_tokens={size} is outside" in note}
    assert sorted(listed) == excluded
    assert all(number in note.partition("guards")[2] for note in listed.values()), "with the constraint"
    fast.capture(mode, sizes=[size for size in sizes if size != first])
    fast.check(mode, sizes=sizes)
    assert fast.rt.stats().callables == callables
    counts = sorted((size, *counts) for (_, size), counts in fast.tally(mode).items())
    assert counts == [(size, 1, 2) for size in sizes]
