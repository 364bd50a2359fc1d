"""Guesses out of a text's own past, against a search from the definition."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.errors import OptionError
from graphpass.text import NgramDrafter, Request


def searched(text: Sequence[int], limit: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The longest ending that stood before, at its latest place; what followed goes on as long as is asked for."""
    for length in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ending = text[len(text) - length :]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == ending:
                made = list(text)
                for at in range(start + length, start + length + limit):
                    made.append(made[at])
                return made[len(text) :]
    return []


def proposed(drafter: NgramDrafter, request: Request, text: Sequence[int], limit: int) -> list[int]:
    found: list[int] = drafter.propose(request, np.array(text, dtype=np.int64), limit).tolist()
    return found


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ([7], 3, []),
        ([1, 2, 3], 3, []),
        ([1, 2, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 1, [4]),  # the latest place ...
        ([5, 1, 2, 3, 8, 1, 2, 4, 5, 1, 2], 1, [3]),  # ... of the longest ending
        ([8, 8], 4, [8, 8, 8, 8]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a loop goes on
        ([1, 2, 3, 4, 2], 9, [3, 4, 2, 3, 4, 2, 3, 4, 2]),
    ],
)
def test_guesses(text: list[int], limit: int, expected: list[int]) -> None:
    assert proposed(NgramDrafter(), Request.of("a", text, 1), text, limit) == expected


LENGTHS = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    growth=st.lists(st.integers(1, 5), max_size=40),
    limit=st.integers(1, 6),
    lengths=LENGTHS,
)
def test_guesses_are_those_of_a_search(
    text: list[int], growth: list[int], limit: int, lengths: tuple[int, int]
) -> None:
    """However much the text has grown since the last guess."""
    shortest, longest = lengths
    drafter, request, size = NgramDrafter(max_ngram=longest, min_ngram=shortest), Request.of("a", [0], 1), 1
    for more in [*growth, 0]:
        expected = searched(text[:size], limit, longest, shortest)
        found = proposed(drafter, request, text[:size], limit)
        assert found == expected
        assert len(found) in (0, limit)
        size = min(size + more, len(text))


def test_requests_do_not_mix_and_may_start_again() -> None:
    drafter = NgramDrafter()
    first, second = Request.of("a", [1], 1), Request.of("b", [1], 1)
    assert proposed(drafter, first, [1, 2, 1], 1) == [2]
    assert proposed(drafter, second, [1, 3, 1], 1) == [3]
    assert proposed(drafter, first, [4, 1], 1) == []
    assert proposed(drafter, first, [4, 1, 4], 1) == [1]


def test_an_index_goes_with_its_request() -> None:
    drafter, request = NgramDrafter(), Request.of("a", [1], 1)
    proposed(drafter, request, [1, 2, 1], 1)
    assert len(drafter._indexes) == 1
    del request
    gc.collect()
    assert len(drafter._indexes) == 0


def test_each_new_token_costs_the_same_whatever_the_length() -> None:
    drafter, request = NgramDrafter(), Request.of("a", [1], 1)
    text = np.arange(50_000, dtype=np.int64) % 911
    drafter.propose(request, text[:-2], 1)
    index = drafter._indexes[request]
    before = dict(index._next)
    drafter.propose(request, text[:-1], 1)
    assert sum(place != before.get(gram) for gram, place in index._next.items()) == 3


@pytest.mark.parametrize("lengths", [(3, 0), (0, 0), (1, 2), (True, True), (2.0, 1)])
def test_lengths_are_checked(lengths: tuple[Any, Any]) -> None:
    with pytest.raises(OptionError, match="lengths of n-grams"):
        NgramDrafter(max_ngram=lengths[0], min_ngram=lengths[1])
