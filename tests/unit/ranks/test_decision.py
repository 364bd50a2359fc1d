"""One decision for all ranks, from rows of integers: the maximum, the minimum, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass import BatchDescriptor, CudagraphDispatcher, CUDAGraphMode, Dispatch, DispatchReason, LoraKeys
from graphpass.ranks.decision import BATCH_WIDTH, AgreedStep, RankBatch, agree, extras_of

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
EMPTY = Dispatch(NONE, BatchDescriptor(0), DispatchReason.EMPTY)
IDLE_TOKENS = 2


def captured(
    mode: str = "FULL_AND_PIECEWISE", sizes: Any = (2, 4, 8), *, query_len: int = 1, lora: LoraKeys | None = None
) -> CudagraphDispatcher:
    dispatcher = CudagraphDispatcher(mode, sizes, max_num_reqs=8, uniform_decode_query_len=query_len, lora=lora)
    for key_mode, keys in dispatcher.capture_plan():
        for key in keys:
            dispatcher.mark_captured(key_mode, key)
    return dispatcher


@dataclass(frozen=True)
class Asked:
    """What one rank's dispatcher is asked; None: no batch."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    loras: int = 0
    extra: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_reqs": self.num_reqs,
            "uniform_decode": self.uniform,
            "num_active_loras": self.loras,
            "extra": self.extra,
        }


def decided(dispatcher: CudagraphDispatcher, asked: Sequence[Asked | None]) -> tuple[AgreedStep, list[Dispatch]]:
    """The agreed step and each rank's part of it, each rank's batch having gone through a row of integers."""
    extras = extras_of(dispatcher)
    own = [EMPTY if one is None else dispatcher.dispatch(**one.arguments()) for one in asked]
    batches = [
        RankBatch() if one is None else RankBatch.of(step, one.arguments(), dispatcher, extras)
        for one, step in zip(asked, own, strict=True)
    ]
    rows = [batch.to_row() for batch in batches]
    assert max(map(len, rows)) <= BATCH_WIDTH
    read = [RankBatch.from_row(row, len(dispatcher.capture_fields)) for row in rows]
    assert read == batches
    agreed = agree(read, dispatcher, extras, idle_tokens=IDLE_TOKENS)
    shapes = [
        EMPTY.descriptor if one is None else dispatcher.dispatch(**one.arguments(), allowed_modes=[NONE]).descriptor
        for one in asked
    ]
    return agreed, [agreed.of_rank(rank, own[rank], shapes[rank]) for rank in range(len(asked))]


@pytest.mark.parametrize(
    ("mode", "asked", "expected", "reasons"),
    [
        ("FULL_AND_PIECEWISE", [Asked(3), Asked(4)], (PIECEWISE, 4), "padded exact"),
        ("FULL_AND_PIECEWISE", [Asked(3), Asked(7)], (PIECEWISE, 8), "agreed padded"),
        ("FULL_AND_PIECEWISE", [Asked(3, uniform=True), Asked(4, uniform=True)], (FULL, 4), "padded exact"),
        ("FULL_AND_PIECEWISE", [Asked(3, uniform=True), Asked(4)], (PIECEWISE, 4), "agreed exact"),
        ("FULL_AND_PIECEWISE", [Asked(3, uniform=True), None], (FULL, 4), "padded agreed"),
        ("FULL_AND_PIECEWISE", [Asked(3), Asked(9)], (NONE, None), "agreed too_large"),
        ("FULL_AND_PIECEWISE", [None, Asked(9)], (NONE, None), "agreed too_large"),
        ("FULL_AND_PIECEWISE", [None, None], (NONE, None), "empty empty"),
        ("FULL_DECODE_ONLY", [Asked(3, uniform=True), Asked(4)], (NONE, None), "agreed disabled"),
        ("FULL_DECODE_ONLY", [Asked(3), Asked(4)], (NONE, None), "disabled disabled"),
        ("FULL", [Asked(3, uniform=True), Asked(7)], (FULL, 8), "agreed padded"),
        ("PIECEWISE", [Asked(3, uniform=True), Asked(7)], (PIECEWISE, 8), "agreed padded"),
        ("NONE", [Asked(3), Asked(7)], (NONE, None), "disabled disabled"),
    ],
)
def test_two_ranks(mode: str, asked: list[Asked | None], expected: tuple[Any, Any], reasons: str) -> None:
    agreed, steps = decided(captured(mode), asked)
    assert (agreed.mode, agreed.descriptor and agreed.descriptor.num_tokens) == expected
    assert " ".join(str(step.reason) for step in steps) == reasons
    if not agreed.mode:
        assert agreed.num_tokens_across_dp == tuple(
            (one.num_tokens if one else IDLE_TOKENS) if agreed.has_work else 0 for one in asked
        )


def test_the_reason_names_the_rank() -> None:
    agreed, _ = decided(captured(), [Asked(3), Asked(9), Asked(1)])
    assert agreed.reason is DispatchReason.TOO_LARGE
    assert agreed.why == "rank 1 (9 tokens) has no graph, because the batch is above the largest key"
    agreed, _ = decided(captured(), [Asked(3, uniform=True), Asked(5, uniform=True), Asked(4)])
    assert agreed.why == "rank 2 (4 tokens, mixed) can run at most PIECEWISE; common size: num_tokens 5"
    # That a mode is switched off for one rank is less of a surprise than that another is too large.
    agreed, _ = decided(captured("FULL_DECODE_ONLY"), [Asked(3), Asked(9, uniform=True)])
    assert agreed.reason is DispatchReason.TOO_LARGE


def test_ranks_that_fit_one_by_one_may_not_fit_together() -> None:
    dispatcher = captured("FULL", {"num_reqs": [1, 4], "seq_len": [8, 16]})
    dispatcher.forget_captured()
    for keys in dispatcher.keys.values():
        for key in keys:
            if key.num_tokens < 64:
                dispatcher.mark_captured(FULL, key)
    few = Asked(16, num_reqs=1, extra=(("seq_len", 16),))
    many = Asked(32, num_reqs=4, extra=(("seq_len", 8),))
    for alone in (few, many):
        assert dispatcher.dispatch(**alone.arguments()).mode is FULL
    agreed, steps = decided(dispatcher, [few, many, None])
    assert agreed.mode is NONE
    assert agreed.why.startswith("the ranks together (num_reqs 4, seq_len 16) have no graph")
    assert [step.reason for step in steps] == [DispatchReason.AGREED] * 3
    assert agreed.num_tokens_across_dp == (16, 32, IDLE_TOKENS)
    assert steps[0].descriptor.num_tokens == 16
    agreed, _ = decided(captured("FULL", {"num_reqs": [1, 4], "seq_len": [8, 16]}), [few, many, None])
    assert agreed.num_tokens_across_dp == (64, 64, 64)


def test_uniform_ranks_whose_largest_fields_make_no_whole_requests_are_mixed() -> None:
    dispatcher = captured("FULL_AND_PIECEWISE", {"num_reqs": [2, 3], "seq_len": [2, 3]}, query_len=6)
    asked = [
        Asked(6, num_reqs=2, uniform=True, extra=(("seq_len", 3),)),
        Asked(6, num_reqs=3, uniform=True, extra=(("seq_len", 2),)),
    ]
    agreed, _ = decided(dispatcher, asked)
    assert (agreed.mode, agreed.num_tokens_across_dp) == (PIECEWISE, (9, 9))


def test_an_extra_is_agreed_too() -> None:
    dispatcher = captured("PIECEWISE")
    images = (("images", "few"),)
    dispatcher.add_key("PIECEWISE", BatchDescriptor(8, extra=images))
    dispatcher.mark_captured("PIECEWISE", BatchDescriptor(8, extra=images))
    assert extras_of(dispatcher) == ((), images)
    agreed, _ = decided(dispatcher, [Asked(3, extra=images), Asked(5, extra=images), None])
    assert agreed.descriptor == BatchDescriptor(8, extra=images)
    agreed, steps = decided(dispatcher, [Asked(3, extra=images), Asked(5), None])
    assert (agreed.mode, agreed.reason) == (NONE, DispatchReason.NO_KEY)
    assert agreed.why == "ranks 0, 1 differ in their 'extra'"
    assert [step.reason for step in steps] == [DispatchReason.AGREED] * 3
    agreed, _ = decided(dispatcher, [Asked(3, extra=(("images", "none such"),)), Asked(5)])
    assert (agreed.mode, agreed.reason) == (NONE, DispatchReason.NO_KEY)


@st.composite
def loads(draw: st.DrawFn) -> list[Asked | None]:
    query_len = draw(st.sampled_from([1, 2]))
    one = st.builds(
        lambda requests, uniform, loras, more: Asked(
            requests * query_len + (0 if uniform else more), requests, uniform, loras, (("max_seq_len", 3 + more),)
        ),
        st.integers(1, 7),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, 15),
    )
    found = draw(st.lists(st.none() | one, min_size=1, max_size=5))
    return [Asked(query_len), *found]  # what comes first says the query length


@given(loads(), st.sampled_from([mode.name for mode in CUDAGraphMode]), st.randoms(use_true_random=False))
def test_all_ranks_run_the_same_whatever_they_bring(asked: list[Asked | None], mode: str, random: Any) -> None:
    first = asked.pop(0)
    assert first is not None
    sizes = {"num_tokens": [2, 4, 8, 12], "max_seq_len": [8, 16]}
    dispatcher = captured(mode, sizes, query_len=first.num_tokens, lora=LoraKeys(2))
    keys = [(mode, key) for mode, keys in dispatcher.capture_plan() for key in keys]
    common = dispatcher.with_captured(random.sample(keys, len(keys) // 2 if random.random() < 0.5 else len(keys)))
    agreed, steps = decided(common, asked)
    working = [one for one in asked if one is not None]
    alone = [None if one is None else common.dispatch(**one.arguments()) for one in asked]
    least = min((int(own.mode.value) for own in alone if own is not None), default=0)

    assert {step.mode for step in steps} == {agreed.mode}
    assert int(agreed.mode.value) <= least
    if agreed.mode:
        assert {step.descriptor for step in steps} == {agreed.descriptor}
        assert agreed.descriptor is not None
        fields = common.fields(agreed.descriptor)
        assert common.is_captured(agreed.mode, agreed.descriptor)
        assert fields["num_tokens"] >= max(one.num_tokens for one in working)
        assert fields["max_seq_len"] >= max(one.extra[0][1] for one in working)
        assert agreed.descriptor.uniform <= all(one.uniform for one in working)
        assert agreed.descriptor.num_active_loras >= max(one.loras for one in working)
        assert (agreed.descriptor.num_reqs or 99) >= max(one.num_reqs or 0 for one in working)
        assert agreed.num_tokens_across_dp == (agreed.descriptor.num_tokens,) * len(asked)
    for one, own, step in zip(asked, alone, steps, strict=True):
        if own is not None and (own.mode, own.descriptor) == (step.mode, step.descriptor):
            assert step == own
        elif working:
            assert step.reason is DispatchReason.AGREED
        if own is not None and not step.mode:
            assert step.descriptor.num_tokens == one.num_tokens  # type: ignore[union-attr]
    if len(working) == 1:
        (own,) = (own for own in alone if own is not None)
        assert (agreed.mode, agreed.descriptor) == (own.mode, own.descriptor if own.mode else None), "idle is no bound"
