"""Calls of known sizes and weights: nothing is looked up, and nothing is missed that changed since the last call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cgpass.autodispatch
from cgpass.paddingcheck import PaddedCall
from graphpass.capture.replay import EntryTable
from graphpass.compat import memory
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import module


def tags(self: Any, ids: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two inputs of one dtype, two weights, and results of several kinds."""
    rows = self.last(self.table(ids) + kinds[..., None])
    return rows, rows.argmax(-1), ids + kinds


@pytest.fixture
def tagger(compiled: Make) -> Compiled:
    model = module(tags, table=nn.Embedding(10, 4), last=nn.Linear(4, 4))
    return compiled(model, dynamic=True, make=batch)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 10, (size, 3)), torch.randint(0, 10, (size, 3))


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every search for the graph of a call."""
    found, find = list[int](), EntryTable.find

    def counted(table: EntryTable, *args: Any) -> Any:
        found.append(1)
        return find(table, *args)

    monkeypatch.setattr(EntryTable, "find", counted)
    return found


@pytest.mark.parametrize("size", [4, 5])
def test_later_calls_of_a_size_look_nothing_up(size: int, tagger: Compiled, lookups: list[int]) -> None:
    for _ in range(4):
        tagger(*batch(size))
    lookups.clear()
    tagger.serve([size] * 3)
    assert not lookups
    (use,) = [use for use in tagger.rt.counts().values() if use.captured]
    assert use.replayed == 6


@pytest.mark.parametrize("weight", ["table", "last"])
def test_a_weight_that_is_exchanged_between_calls_is_read(weight: str, tagger: Compiled) -> None:
    given, parameter = batch(5), getattr(tagger.model, weight).weight
    first, second = parameter.data, torch.randn_like(parameter)
    for data in (first, first, first, first, second, second, second, first, second):
        parameter.data = data
        agrees(tagger(*given), tagger.model(*given))


def test_padding_is_checked_once_a_key(compiled: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the key's own size have nothing to check, and the first padded one is, although its graph is known."""
    checked, check = list[int](), cgpass.autodispatch.fault_of_padding

    def noted(call: PaddedCall) -> Any:
        checked.append(next(len(arg) for arg in call.args if isinstance(arg, torch.Tensor)))
        return check(call)

    monkeypatch.setattr(cgpass.autodispatch, "fault_of_padding", noted)
    fast = compiled(lambda x: x.relu(), dynamic=True, capture_sizes=[4, 8])
    fast.serve([8, 8, 8, 5, 6, 5, 5, 3, 3, 4])
    assert checked == [5, 3]


def test_the_device_of_the_arguments_is_asked_for_captures_of_others(
    compiled: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the first capture, when the runtime has no device yet."""
    asked, is_busy = list[Any](), list[bool]()

    def answer(device: Any) -> bool:
        asked.append(device)
        return bool(is_busy)

    monkeypatch.setattr(memory, "is_capturing_stream", answer)
    fast = compiled(lambda x: x * 2 + 1, dynamic=False)
    for busy in (False, True, True, False, False):
        is_busy[:] = [True] * busy
        agrees(fast(torch.ones(4)), torch.full((4,), 3.0))
        assert not (busy and fast.captured), "a capture inside another one"
    assert fast.captured == 1
    assert set(asked) == {torch.device("cpu")}
