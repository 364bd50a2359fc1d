"""Which keys there are: sizes of one ladder, fields that are each rounded up in their own, and adapter counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass import CudagraphDispatcher, DispatchReason, LoraKeys
from graphpass.dispatch.grid import capture_sizes_within, decode_sizes
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
REQUESTS = {"num_reqs": [16, 1, 4, 4], "seq_len": [32, 64, 128]}


def lazy_dispatcher(mode: str, capture_sizes: dict[str, list[int]], **options: int) -> CudagraphDispatcher:
    return CudagraphDispatcher(mode, capture_sizes, max_num_reqs=16, lazy=True, **options)  # type: ignore[arg-type]


def seq_len(size: int) -> tuple[tuple[str, int], ...]:
    return (("seq_len", size),)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"num_tokens": 120, "num_reqs": 3}, "field 'seq_len'"),
        ({"num_tokens": 120, "extra": seq_len(40)}, "field 'num_reqs'"),
        ({"num_reqs": 3, "extra": seq_len(-1)}, "field 'seq_len'"),
        ({"extra": (("num_reqs", -3), ("seq_len", 1))}, "field 'num_reqs'"),
        ({"num_reqs": 3, "extra": (("seq_len", "long"),)}, "field 'seq_len'"),
        ({"num_reqs": 3, "extra": (("sequence", 40),)}, "field 'seq_len'"),
        ({"num_reqs": -3, "extra": seq_len(40)}, "of at least 0"),
        ({"num_reqs": 3, "num_tokens": -1, "extra": seq_len(40)}, "of at least 0"),
    ],
)
def test_missing_and_negative_fields_are_named(batch: dict[str, object], problem: str) -> None:
    with pytest.raises(DispatchError, match=problem):
        lazy_dispatcher("FULL", REQUESTS).dispatch(**batch)  # type: ignore[arg-type]


def test_fields_of_a_foreign_descriptor() -> None:
    dispatcher = lazy_dispatcher("PIECEWISE", REQUESTS)
    with pytest.raises(DispatchError, match="'seq_len'"):
        dispatcher.fields(BatchDescriptor(64))
    with pytest.raises(DispatchError, match="'num_reqs'"):
        dispatcher.fields(BatchDescriptor(65, extra=seq_len(64)))
    assert CudagraphDispatcher("FULL", [8], max_num_reqs=4).fields(BatchDescriptor(8, 4)) == {"num_tokens": 8}


def test_extra_beside_the_fields_is_matched_exactly() -> None:
    dispatcher = lazy_dispatcher("FULL", REQUESTS)
    key = BatchDescriptor(4 * 64, num_reqs=4, extra=(("causal", True), ("seq_len", 64)))
    dispatcher.add_key(FULL, key)
    assert dispatcher.dispatch(num_reqs=1, extra=(("seq_len", 1), ("causal", True))).descriptor == key
    assert dispatcher.dispatch(num_reqs=1, extra=(("seq_len", 1), ("causal", False))).reason is DispatchReason.NO_KEY
    assert dispatcher.dispatch(num_reqs=5, extra=(("seq_len", 1), ("causal", True))).reason is DispatchReason.TOO_LARGE


@pytest.mark.parametrize(
    "capture_sizes", [{}, {"num_reqs": []}, {"num_reqs": [0]}, {"num_reqs": [1], "seq_len": [1.5]}]
)
def test_refused_ladders(capture_sizes: dict[str, list[int]]) -> None:
    with pytest.raises(DispatchError):
        lazy_dispatcher("FULL", capture_sizes)


# -- sizes of one ladder -----------------------------------------------------------------------------------------------


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


# -- adapter counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "key_counts", "table"),
    [
        (LoraKeys(1), (0, 2), (0, 2, 2)),
        (LoraKeys(4), (0, 5), (0, 5, 5, 5, 5, 5)),
        (LoraKeys(4, without=False), (5,), (5, 5, 5, 5, 5, 5)),
        (LoraKeys(1, per_count=True), (0, 1, 2), (0, 1, 2)),
        (LoraKeys(4, per_count=True), (0, 1, 2, 4, 5), (0, 1, 2, 4, 4, 5)),
        (LoraKeys(5, per_count=True), (0, 1, 2, 4, 6), (0, 1, 2, 4, 4, 6, 6)),
        (LoraKeys(5, per_count=True, without=False), (1, 2, 4, 6), (1, 1, 2, 4, 4, 6, 6)),
    ],
)
def test_counts(lora: LoraKeys, key_counts: tuple[int, ...], table: tuple[int, ...]) -> None:
    assert lora.key_counts() == key_counts
    assert lora.count_table() == table
    dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", [4, 8], max_num_reqs=8, lora=lora, lazy=True)
    for mode in (PIECEWISE, FULL):
        assert {(key.num_active_loras, key.has_lora) for key in dispatcher.keys[mode]} == {
            (count, count > 0) for count in key_counts
        }
        assert len(dispatcher.keys[mode]) == 2 * len(key_counts)
    for uniform in (False, True):
        for num_active_loras, count in enumerate(table):
            step = dispatcher.dispatch(3, uniform_decode=uniform, num_active_loras=num_active_loras)
            assert (step.descriptor.num_tokens, step.descriptor.num_active_loras) == (4, count)
            assert step.descriptor in dispatcher.keys[step.mode]


@pytest.mark.parametrize("max_loras", [0, -1])
def test_there_is_an_adapter(max_loras: int) -> None:
    with pytest.raises(DispatchError, match="max_loras"):
        LoraKeys(max_loras)


def test_descriptor_with_adapters_but_no_count_takes_the_largest() -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [4], max_num_reqs=4, lora=LoraKeys(2, per_count=True), lazy=True)
    step = dispatcher.dispatch_descriptor(BatchDescriptor(4, has_lora=True))
    assert step.descriptor == BatchDescriptor(4, has_lora=True, num_active_loras=3)
    assert step.reason is DispatchReason.EXACT


@pytest.mark.parametrize(
    ("lora", "descriptor", "match"),
    [
        (None, BatchDescriptor(4, num_active_loras=1), "has_lora"),
        (LoraKeys(2), BatchDescriptor(4, num_active_loras=1), "has_lora"),
        (None, BatchDescriptor(4, has_lora=True), "lora=None"),
    ],
)
def test_descriptor_that_contradicts_itself(lora: LoraKeys | None, descriptor: BatchDescriptor, match: str) -> None:
    dispatcher = CudagraphDispatcher("PIECEWISE", [4], max_num_reqs=4, lora=lora, lazy=True)
    with pytest.raises(DispatchError, match=match):
        dispatcher.dispatch_descriptor(descriptor)
