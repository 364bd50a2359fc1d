"""Attention over pages against plain attention over contiguous keys: eager steps, FULL keys, stock models, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from graphpass import AttentionSupport, BatchDescriptor, CUDAGraphMode
from graphpass.errors import ContextError, OptionError, OutOfPagesError, ShapeError
from graphpass.text import LayerMask, PageAllocator, PagedKVCache, PagedLayer, PagedRequests
from tests.unit.text.paged_reference import (
    TOLERANCE,
    Heads,
    Paged,
    StepTensors,
    assert_right,
    run,
    run_eager,
    uniform_key,
)

GROUPED = Heads(4, 2, 16)
PLAIN_HEADS = [GROUPED, Heads(4, 4, 16), Heads(6, 1, 64), Heads(4, 2, 16, window=5), Heads(2, 2, 16, window=1)]
HEADS = [
    *PLAIN_HEADS,
    Heads(4, 2, 16, chunk=4),
    Heads(2, 2, 8, chunk=6, window=4),
    Heads(4, 2, 16, value_dim=6),
    Heads(4, 2, 16, softcap=1.5),
    Heads(6, 2, 16, has_sinks=True),
    Heads(4, 2, 8, chunk=5, value_dim=12, softcap=2.0, has_sinks=True),
]
FULL, CLOSE = CUDAGraphMode.FULL, TOLERANCE["cpu", torch.float32]
STEPS = [[5, 3, 9], [4, 1, 2], [1, 1, 1], [3, 3, 3], [1, 1, 1], [1, 6, 1]]
"""Tokens of three requests in turn: prefill, chunks with history, decode, draft tokens, decode, mixed."""


@pytest.mark.parametrize("more_rows", [0, 5], ids=["real rows", "padded rows"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_eager_steps(heads: Heads, page_size: int, more_rows: int) -> None:
    paged = Paged(heads, page_size=page_size, num_pages=-(-120 // page_size) + 3)
    requests = [paged.begin() for _ in range(3)]
    for query_lens in STEPS:
        step, tensors = paged.grow(requests, query_lens)
        metadata = paged.attention.build(step, None)
        assert (metadata.layout.query_len is not None) == (len(set(query_lens)) == 1)
        assert_right(run(paged, tensors, metadata, sum(query_lens) + more_rows), tensors)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_mixed_key_is_refilled(heads: Heads) -> None:
    paged = Paged(heads, support=AttentionSupport.ALWAYS)
    requests = [paged.begin() for _ in range(3)]
    key = BatchDescriptor(20, num_reqs=6)
    metadata = None
    for query_lens in STEPS:
        step, tensors = paged.grow(requests, query_lens)
        assert metadata is None or paged.attention.build(step, key) is metadata
        metadata = paged.attention.build(step, key)
        assert (metadata.layout.query_len, metadata.layout.max_query_len) == (None, 32)
        assert_right(run(paged, tensors, metadata, key.num_tokens), tensors)


def test_no_gradient_reaches_the_cache() -> None:
    paged = Paged(GROUPED)
    query, key = torch.zeros(1, 4, 16, requires_grad=True), torch.zeros(1, 2, 16, requires_grad=True)
    with gp.set_forward_context(paged.attention.build(PagedRequests([1], [1], [[2]]), None)):
        torch.ops.graphpass.paged_attention(query, key, key, torch.zeros(1, 4, 16), 0, 1.0, -1)
    assert not any(pages.requires_grad for pages in paged.pages())


@pytest.mark.parametrize(
    ("key", "query_lens"),
    [(uniform_key(5), [1, 1, 1]), (uniform_key(5, 3), [3, 3, 3]), (BatchDescriptor(20, num_reqs=6), [4, 1, 2])],
    ids=["decode", "drafts", "mixed"],
)
def test_real_rows_have_the_same_bits_whatever_padding_holds(key: BatchDescriptor, query_lens: list[int]) -> None:
    results = []
    for padding in (0.0, 7.5, torch.nan):
        paged = Paged(GROUPED)
        requests = [paged.begin() for _ in range(3)]
        run_eager(paged, requests, [7, 2, 4])
        step, tensors = paged.grow(requests, query_lens)
        metadata = paged.attention.build(step, key)
        outs = run(paged, tensors, metadata, key.num_tokens, padding=padding)
        if not (key.uniform and math.isnan(padding)):  # a query of NaN in a request of its own is the only NaN
            assert_right(outs, tensors)
        results.append([out[: sum(query_lens)] for out in outs])
    assert_right(results[-1], tensors)
    for outs in results[1:]:
        assert all(torch.equal(out, first) for out, first in zip(outs, results[0], strict=True))


@pytest.mark.parametrize(
    "key", [None, uniform_key(5), BatchDescriptor(20, num_reqs=6)], ids=["eager", "decode", "mixed"]
)
def test_only_the_mapped_slots_are_written(key: BatchDescriptor | None) -> None:
    paged = Paged(GROUPED)
    requests = [paged.begin() for _ in range(3)]
    run_eager(paged, requests, [7, 2, 4])
    before = [pages.clone() for pages in paged.pages()]
    step, tensors = paged.grow(requests, [1, 1, 1])
    metadata = paged.attention.build(step, key)
    run(paged, tensors, metadata, 3 if key is None else key.num_tokens)
    expected = torch.zeros(before[0].shape[:2], dtype=torch.bool).flatten()
    expected[metadata.slot_mapping[:3]] = True
    for pages, old in zip(paged.pages(), before, strict=True):
        changed = (pages != old) & ~(pages.isnan() & old.isnan())
        written = changed.flatten(0, 1).any(-1).any(-1)
        assert torch.equal(written[2 * paged.cache.page_size :], expected[2 * paged.cache.page_size :])
    assert metadata.slot_mapping[3:].tolist() == [4 + n % 4 for n in range(len(metadata.slot_mapping) - 3)]
    assert not any(pages[0].any() for pages in paged.pages())


def test_a_page_is_used_again_whatever_its_last_owner_left() -> None:
    paged = Paged(GROUPED, num_pages=3)
    first = paged.begin()
    run_eager(paged, [first], [12])
    for pages in paged.pages():
        pages[2:] = torch.nan
    paged.end(first)
    second = paged.begin()
    run_eager(paged, [second], [5])
    run_eager(paged, [second], [1])
    assert paged.allocator.num_free == 1


@pytest.mark.parametrize("key", [None, uniform_key(4)], ids=["eager", "FULL"])
def test_a_step_without_requests(key: BatchDescriptor | None) -> None:
    paged = Paged(GROUPED)
    metadata = paged.attention.build(PagedRequests([], [], []), key)
    row = torch.zeros(1, 4, 16)
    nothing = StepTensors(row[:0], row[:0, :2], row[:0, :2], row[:0])
    assert_right(run(paged, [nothing, nothing], metadata, 4, padding=7.5), [nothing, nothing])


@pytest.mark.parametrize(
    ("key", "query_len", "query_lens"),
    [
        (uniform_key(4, 3), 3, [3, 3, 3, 3]),
        (BatchDescriptor(4), 1, [1, 1, 1, 1]),
        (BatchDescriptor(20), None, [4, 4, 3, 3, 3, 3]),
        (BatchDescriptor(20, num_reqs=6), None, [4, 4, 3, 3, 3, 3]),
        (BatchDescriptor(3, num_reqs=3, extra=(("max_seq_len", 8),)), None, [1, 1, 1]),
    ],
)
def test_examples_fill_their_key_and_write_no_live_page(
    key: BatchDescriptor, query_len: int | None, query_lens: list[int]
) -> None:
    paged = Paged(GROUPED)
    example = paged.attention.example(key, query_len=query_len)
    assert (example.query_lens, example.seq_lens) == (query_lens, query_lens)
    live = [pages[2:].zero_() for pages in paged.pages()]
    num_tokens = key.num_tokens
    tensors = StepTensors(*(paged.random(num_tokens, n, 16) for n in (4, 2, 2, 4)))
    for built_for in (None, key) if key.num_reqs else (None,):
        outs = run(paged, [tensors, tensors], paged.attention.build(example, built_for), num_tokens)
        assert all(out.isfinite().all() for out in outs)
    assert not any(pages.any() for pages in live)


ERRORS: dict[str, tuple[PagedRequests, BatchDescriptor | None]] = {
    "differ in length": (PagedRequests([1, 1], [1], [[2]]), None),
    "request 1 of the step has invalid lengths": (PagedRequests([1, 3], [1, 2], [[2], [3]]), None),
    "request 0 of the step has invalid lengths": (PagedRequests([0], [2], [[2]]), None),
    "request 1 of the step has too few pages": (PagedRequests([1, 1], [4, 5], [[2], [3]]), None),
    "the null page": (PagedRequests([1, 1], [1, 9], [[2], [3, 0, 4]]), None),
    "the scratch page": (PagedRequests([1], [1], [[1]]), uniform_key(1)),
    "request 1 of the step has an invalid page": (PagedRequests([1, 1], [1, 1], [[41], [42]]), None),
    "expected only the scratch page": (PagedRequests([1], [1], [[2]], is_scratch=True), None),
    "too many requests": (PagedRequests([1] * 3, [1] * 3, [[2], [3], [4]]), uniform_key(2)),
    "too many requests: expected at most 6": (PagedRequests([1] * 7, [1] * 7, [[2]] * 7), None),
    "too many tokens: expected at most 48": (PagedRequests([25, 25], [25, 25], [[2] * 7] * 2), None),
    "too many tokens": (PagedRequests([3, 2], [3, 2], [[2], [3]]), BatchDescriptor(4, num_reqs=4)),
    "longest sequence: expected at most 8": (PagedRequests([1], [9], [[2, 3, 4]]), uniform_key(2, 1, 8)),
    "longest sequence: expected at most 32": (PagedRequests([1], [33], [[2] * 9]), None),
    "not the uniform batch": (PagedRequests([1, 2], [1, 2], [[2], [3]]), uniform_key(2, 2)),
    "cannot serve the key": (PagedRequests([1], [1], [[2]]), uniform_key(7)),
    "whole requests": (PagedRequests([1], [1], [[2]]), BatchDescriptor(5, num_reqs=2, uniform=True)),
}


@pytest.mark.parametrize(("message", "step", "key"), [(m, *case) for m, case in ERRORS.items()], ids=list(ERRORS))
def test_a_step_that_does_not_fit_is_refused(message: str, step: PagedRequests, key: BatchDescriptor | None) -> None:
    """Before anything is written: the metadata of the key stays as it was."""
    paged = Paged(GROUPED)
    sound = PagedRequests([1], [1], [[2]])
    kept = None
    if key is not None and "key" not in message and "whole" not in message:
        fitting = sound if key.num_tokens == key.num_reqs else PagedRequests([2], [2], [[2]])
        kept = paged.attention.build(fitting, key).slot_mapping
    before = None if kept is None else kept.clone()
    with pytest.raises(ShapeError, match=message):
        paged.attention.build(step, key)
    assert kept is None or torch.equal(kept, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 16)}, "do not fit"),
        ({"key": torch.zeros(1, 2, 8)}, "do not fit"),
        ({"value": torch.zeros(1, 2, 16, dtype=torch.float64)}, "do not fit"),
        ({"out": torch.zeros(2, 4, 16)}, "do not fit"),
        ({"layer": 2}, "no such layer"),
        ({"window": 3}, "sliding window"),
        ({"softcap": 3.0}, "soft cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"sinks": torch.zeros(2)}, "do not fit"),
    ],
)
def test_a_call_that_does_not_fit_writes_nothing(change: dict[str, Any], message: str) -> None:
    paged = Paged(GROUPED)
    before = [pages.clone() for pages in paged.pages()]
    arguments = {
        "query": torch.ones(1, 4, 16),
        "key": torch.ones(1, 2, 16),
        "value": torch.ones(1, 2, 16),
        "out": torch.zeros(1, 4, 16),
        "layer": 0,
        "scale": 1.0,
        "window": -1,
    }
    with (
        gp.set_forward_context(paged.attention.build(PagedRequests([1], [1], [[2]]), None)),
        pytest.raises(ShapeError, match=message),
    ):
        torch.ops.graphpass.paged_attention(**{**arguments, **change})
    torch.testing.assert_close(paged.pages(), before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("metadata", [None, object()])
def test_without_its_metadata_the_op_says_what_to_pass(metadata: object) -> None:
    tensors = (torch.zeros(1, 2, 8),) * 4
    with gp.set_forward_context(metadata), pytest.raises(ContextError, match="attn_metadata"):
        torch.ops.graphpass.paged_attention(*tensors, 0, 1.0, -1)
    with pytest.raises(ContextError, match="set_forward_context"):
        torch.ops.graphpass.paged_attention(*tensors, 0, 1.0, -1)


def test_pages_are_allocated_and_freed() -> None:
    allocator = PageAllocator(3)
    first = allocator.allocate(2)
    assert (first, allocator.num_free) == ([2, 3], 1)
    with pytest.raises(OutOfPagesError, match="2 free pages; found 1 of 3"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    for wrong in ([2, 2], [4], [0]):
        with pytest.raises(OptionError, match="each once"):
            allocator.free(wrong)
    allocator.free(first)
    assert (sorted(allocator.allocate(3)), allocator.num_free) == ([2, 3, 4], 0)
    with pytest.raises(OptionError):
        allocator.allocate(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedKVCache([PagedLayer(1, 8)], num_pages=0, page_size=4),
        lambda: PagedKVCache([None], num_pages=4, page_size=4),
        lambda: Paged(GROUPED, max_num_reqs=0),
        lambda: PagedLayer(0, 8),
        lambda: PagedLayer(1, 8, value_dim=-1),
        lambda: LayerMask(window=-3),
        lambda: LayerMask(chunk=True),
    ],
)
def test_sizes_that_cannot_be(make: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        make()
