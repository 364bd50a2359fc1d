"""Capture sizes, decode sizes and rounding up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass.dispatch.sizes import capture_sizes_within, decode_sizes
from graphpass.errors import DispatchError

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("sizes", "max_num_tokens", "query_len", "kept"),
    [
        ([8, 1, 4, 4, 2], None, 1, (1, 2, 4, 8)),
        ([8, 16, 8191], None, 1, (8, 16, 8191)),  # the largest is off the stride
        ([8, 16, 8191], 8191, 1, (8, 16, 8191)),
        ([8, 16, 32], 20, 1, (8, 16)),
        ([8, 21, 24], 20, 3, (8, 21)),  # 20 tokens are 7 requests of 3, less one token
        ([8], 8, 1, (8,)),
    ],
)
def test_capture_sizes(sizes: list[int], max_num_tokens: int | None, query_len: int, kept: tuple[int, ...]) -> None:
    assert capture_sizes_within(sizes, max_num_tokens, query_len) == kept


@pytest.mark.parametrize(("sizes", "max_num_tokens"), [([], None), ([8], 7)])
def test_no_size_left(sizes: list[int], max_num_tokens: int | None) -> None:
    with pytest.raises(DispatchError, match="no size to capture"):
        capture_sizes_within(sizes, max_num_tokens, 1)


@pytest.mark.parametrize(
    ("sizes", "max_num_reqs", "query_len", "expected"),
    [
        ([1, 2, 4, 8, 16], 16, 1, (1, 2, 4, 8, 16)),
        ([1, 2, 4, 8, 16], 6, 1, (1, 2, 4, 6)),  # the largest decode batch has its own size
        ([1, 2, 4, 8, 16], 100, 1, (1, 2, 4, 8, 16)),
        ([1, 2, 4, 8, 16], 16, 3, (3, 6, 9, 18)),
        ([1, 2, 4, 8, 16], 5, 3, (3, 6, 9, 15)),
        ([2], 8, 4, (4,)),
        ([7], 7, 1, (7,)),
    ],
)
def test_decode_sizes(sizes: list[int], max_num_reqs: int, query_len: int, expected: tuple[int, ...]) -> None:
    assert decode_sizes(sizes, max_num_reqs, query_len) == expected


@given(SIZES, st.integers(1, 40), st.integers(1, 7))
def test_decode_sizes_follow_the_definition(sizes: list[int], max_num_reqs: int, query_len: int) -> None:
    expected = {
        tokens
        for tokens in range(1, 60 * 8)
        if tokens % query_len == 0
        and (any(size <= tokens < size + query_len for size in sizes) or tokens == max_num_reqs * query_len)
        and tokens <= max_num_reqs * query_len
        and tokens - query_len < max(sizes)
    }
    made = decode_sizes(sizes, max_num_reqs, query_len)
    assert list(made) == sorted(expected)
    assert made
