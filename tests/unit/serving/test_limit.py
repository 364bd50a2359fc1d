"""A capture within a limit of memory, and its progress."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphpass
from graphpass import BatchDescriptor, CUDAGraphMode
from graphpass.progress import capture_progress
from graphpass.serving.estimate import Key, PoolModel, capture_within

NOTHING_KNOWN = PoolModel({}, {}, {})


def keys(*sizes: int) -> list[Key]:
    return [(CUDAGraphMode.FULL, BatchDescriptor(size)) for size in sizes]


class Pool:
    """Grows with each capture by the next number of a list (or by its key's), whatever was captured before."""

    def __init__(self, growths: Sequence[int] | dict[Key, int], held: Sequence[Key] = (), num_bytes: int = 0) -> None:
        self.growths, self.total, self.contents = growths, num_bytes, list(held)
        self.captures = self.drops = self.stays = 0

    def num_bytes(self) -> int:
        return self.total

    def capture(self, key: Key) -> None:
        assert key not in self.contents, "no key is captured twice"
        grows = self.growths
        self.total += grows[key] if isinstance(grows, dict) else grows[self.captures % len(grows)]
        self.captures += 1
        self.contents.append(key)

    def drop(self) -> None:
        self.drops += 1
        self.total, self.contents = self.stays, []

    def fill(self, max_bytes: int, missing: Sequence[Key], model: PoolModel = NOTHING_KNOWN) -> tuple[Key, ...]:
        ways = {"num_bytes": self.num_bytes, "capture": self.capture, "drop": self.drop}
        return capture_within(max_bytes, list(self.contents), missing, model, **ways)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(0, 200),
    st.dictionaries(st.integers(1, 28), st.integers(0, 60)),
)
def test_the_pool_ends_below_the_limit_whatever_it_does(
    growths: list[int], num_missing: int, num_held: int, max_bytes: int, believed: dict[int, int]
) -> None:
    every = keys(*range(num_held + num_missing, 0, -1))
    model = PoolModel({key: believed.get(key[1].num_tokens, 0) for key in every}, {}, {})
    pool = Pool(growths, held=every[:num_held], num_bytes=min(num_held, max_bytes))
    left_out = pool.fill(max_bytes, every[num_held:], model)
    assert pool.num_bytes() <= max_bytes
    assert sorted(map(str, [*left_out, *pool.contents])) == sorted(map(str, every)), "each key is one or the other"
    assert pool.captures <= 5 * len(every)


def test_a_good_model_spares_every_repetition() -> None:
    every = keys(8, 4, 2, 1)
    takes = dict(zip(every, (40, 30, 30, 10), strict=True))
    pool = Pool(takes)
    left_out = pool.fill(85, every, PoolModel(takes, takes, {}))
    assert (left_out, pool.captures, pool.drops) == (tuple(every[2:3]), 3, 0)
    assert pool.num_bytes() == 80


def test_a_pool_that_others_keep_is_not_filled_any_further() -> None:
    pool = Pool([10])
    pool.stays = 30
    assert len(pool.fill(15, keys(8, 4, 2))) == 3
    assert pool.captures == 2


# Progress bars: shown on terminals, unless somebody turns them off.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "progress", "is_shown"),
    [
        (Terminal, None, True),
        (Terminal, False, False),
        (Terminal, True, True),
        (io.StringIO, None, False),
        (io.StringIO, False, False),
        (io.StringIO, True, True),
        (lambda: None, None, False),
    ],
)
def test_a_bar_is_shown_on_a_terminal_or_where_it_is_asked_for(
    stderr: Callable[[], Any], progress: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = stderr()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(capture_progress([1, 2, 3], progress)) == [1, 2, 3]
    assert bool(screen and screen.getvalue()) == is_shown


def test_another_value_is_refused() -> None:
    with pytest.raises(graphpass.errors.OptionError, match="progress"):
        graphpass.graphed(torch.nn.Linear(3, 3), progress="never")
