"""What a dispatcher takes and refuses; its decisions are golden texts and a property."""

from __future__ import annotations

import pytest

from graphpass import CudagraphDispatcher, DispatchReason
from graphpass.errors import DispatchError, OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = [1, 2, 4, 8, 16]


def dispatcher_for(mode: str, query_len: int = 1, *, max_num_reqs: int = 8, lazy: bool = True) -> CudagraphDispatcher:
    return CudagraphDispatcher(mode, SIZES, max_num_reqs=max_num_reqs, uniform_decode_query_len=query_len, lazy=lazy)


def test_modes_are_taken_by_name_in_any_case() -> None:
    dispatcher = CudagraphDispatcher("full_and_piecewise", [4, 8], max_num_reqs=8)
    dispatcher.add_key("Piecewise", BatchDescriptor(12))
    dispatcher.mark_captured("piecewise", BatchDescriptor(12))
    assert dispatcher.is_captured("PIECEWISE", BatchDescriptor(12))
    assert dispatcher.mode.has_mode("full")
    step = dispatcher.dispatch(11, allowed_modes=["none", "piecewise"])
    assert (step.mode, step.descriptor) == (PIECEWISE, BatchDescriptor(12))
    with pytest.raises(OptionError, match="'fulll'"):
        dispatcher.dispatch(11, allowed_modes=["fulll"])
    with pytest.raises(OptionError, match="FULL_AND_PIECEWISE"):
        CudagraphDispatcher("FULLER", [1], max_num_reqs=1)


BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
REFUSED_BATCHES: list[tuple[str, int, dict[str, object], str]] = [
    # nothing fits, and NONE is not allowed
    ("PIECEWISE", 1, {"num_tokens": 4, "allowed_modes": {FULL}}, "allow NONE"),
    ("PIECEWISE", 1, {"num_tokens": 17, "allowed_modes": {PIECEWISE}}, "allow NONE"),
    ("FULL_AND_PIECEWISE", 1, {"num_tokens": 17, "allowed_modes": {PIECEWISE, FULL}}, "allow NONE"),
    ("FULL_AND_PIECEWISE", 1, {"num_tokens": 0, "allowed_modes": {PIECEWISE, FULL}}, "allow NONE"),
    ("NONE", 1, {"num_tokens": 4, "allowed_modes": {PIECEWISE, FULL}}, "allow NONE"),
    *(
        ("FULL_AND_PIECEWISE", 1, {"num_tokens": num_tokens, "allowed_modes": allowed}, "allowed_modes")
        for num_tokens in (0, 4, 99)
        for allowed in ((), set(), {BOTH}, {NONE, CUDAGraphMode.FULL_DECODE_ONLY}, ["full_decode_only"], "FULL")
    ),
    *(
        (mode, 1, {"uniform_decode": uniform, **batch}, "-1")
        for mode in ("NONE", "FULL", "FULL_AND_PIECEWISE")
        for batch in ({"num_tokens": -1}, {"num_tokens": 4, "num_reqs": -1})
        for uniform in (False, True)
    ),
    ("FULL", 1, {"num_reqs": 3}, "num_tokens"),
    ("FULL_DECODE_ONLY", 3, {"num_tokens": 7, "uniform_decode": True}, "multiple of 3"),
    ("FULL_AND_PIECEWISE", 3, {"num_tokens": 7, "uniform_decode": True}, "multiple of 3"),
    *(
        ("PIECEWISE", 1, {"num_tokens": 4, "extra": extra}, "extra")
        for extra in ((("a", 1), ("a", 2)), ("ab",) * 2, ((1, 2),), 5, (("a",),), (("a", []),))
    ),
]


@pytest.mark.parametrize(("mode", "query_len", "batch", "match"), REFUSED_BATCHES)
def test_a_batch_that_cannot_be_is_refused(mode: str, query_len: int, batch: dict[str, object], match: str) -> None:
    with pytest.raises(DispatchError, match=match) as refused:
        dispatcher_for(mode, query_len).dispatch(**batch)  # type: ignore[arg-type]
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("capture_sizes", [0, 1]),
        ("capture_sizes", [-4]),
        ("capture_sizes", [1.5]),
        ("capture_sizes", []),
        ("max_num_reqs", 0),
        ("uniform_decode_query_len", 0),
        ("max_num_tokens", 0),
    ],
)
def test_refused_configuration(argument: str, value: object) -> None:
    arguments = {"capture_sizes": [4], "max_num_reqs": 4} | {argument: value}
    with pytest.raises(DispatchError) as refused:
        CudagraphDispatcher("FULL_AND_PIECEWISE", **arguments)  # type: ignore[arg-type]
    assert isinstance(refused.value, ValueError)
    assert refused.value.expected
    assert refused.value.remedy


def test_no_size_is_needed_for_mode_none() -> None:
    assert CudagraphDispatcher("NONE", [], max_num_reqs=1).dispatch(3).reason is DispatchReason.DISABLED


@pytest.mark.parametrize(
    ("mode", "descriptor"),
    [
        (PIECEWISE, BatchDescriptor(3)),
        (PIECEWISE, BatchDescriptor(4, 4)),
        (FULL, BatchDescriptor(4)),
        (NONE, BatchDescriptor(4)),
        (CUDAGraphMode.FULL_AND_PIECEWISE, BatchDescriptor(4)),
    ],
)
def test_only_keys_are_captured(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
    dispatcher = dispatcher_for("FULL_AND_PIECEWISE", lazy=False)
    with pytest.raises(DispatchError, match="capture_plan"):
        dispatcher.mark_captured(mode, descriptor)
    assert not dispatcher.is_captured(mode, descriptor)


def test_a_removed_key_serves_no_batch() -> None:
    dispatcher = dispatcher_for("FULL_AND_PIECEWISE")
    for key in dispatcher.keys[PIECEWISE]:
        dispatcher.remove_key("piecewise", key)
    dispatcher.remove_key(PIECEWISE, BatchDescriptor(4))  # none
    assert dispatcher.capture_plan()[0][0] is FULL
    assert dispatcher.dispatch(1, uniform_decode=True).mode is FULL
    assert dispatcher.dispatch(3).reason is DispatchReason.TOO_LARGE
    assert dispatcher.dispatch(3, allowed_modes={NONE, FULL}).reason is DispatchReason.DISABLED
    dispatcher.add_key(PIECEWISE, BatchDescriptor(4))
    assert dispatcher.dispatch(3).descriptor == BatchDescriptor(4)


def test_adding_a_key_twice_keeps_its_capture() -> None:
    dispatcher = dispatcher_for("PIECEWISE", lazy=False)
    dispatcher.mark_captured(PIECEWISE, BatchDescriptor(4))
    dispatcher.add_key(PIECEWISE, BatchDescriptor(4))
    assert dispatcher.is_captured(PIECEWISE, BatchDescriptor(4))
    assert len(dispatcher.keys[PIECEWISE]) == len(SIZES)


@pytest.mark.parametrize(
    ("dispatcher_mode", "mode", "descriptor"),
    [
        ("FULL_AND_PIECEWISE", NONE, BatchDescriptor(4)),
        ("FULL_AND_PIECEWISE", CUDAGraphMode.FULL_AND_PIECEWISE, BatchDescriptor(4)),
        ("PIECEWISE", FULL, BatchDescriptor(4, 4)),
        ("FULL_DECODE_ONLY", PIECEWISE, BatchDescriptor(4)),
        ("FULL_AND_PIECEWISE", PIECEWISE, BatchDescriptor(0)),
        ("FULL_AND_PIECEWISE", PIECEWISE, BatchDescriptor(4, 4)),
        ("FULL_AND_PIECEWISE", PIECEWISE, BatchDescriptor(4, uniform=True)),
        ("FULL_AND_PIECEWISE", FULL, BatchDescriptor(4, 0)),
        ("FULL_AND_PIECEWISE", FULL, BatchDescriptor(4, 3, uniform=True)),
        ("FULL_AND_PIECEWISE", PIECEWISE, BatchDescriptor(4, has_lora=True, num_active_loras=1)),
        ("FULL_AND_PIECEWISE", PIECEWISE, BatchDescriptor(4, has_lora=True)),
    ],
)
def test_keys_that_no_batch_could_get_are_refused(
    dispatcher_mode: str, mode: CUDAGraphMode, descriptor: BatchDescriptor
) -> None:
    dispatcher = dispatcher_for(dispatcher_mode)
    before = dispatcher.keys
    with pytest.raises(DispatchError, match=f"never be dispatched.*; found {mode} {descriptor}; remedy"):
        dispatcher.add_key(mode, descriptor)
    assert dispatcher.keys == before


@pytest.mark.parametrize(
    ("query_len", "num_reqs", "num_tokens", "max_query_len", "expected"),
    [
        (1, 5, 5, 1, (FULL, 8)),
        (1, 5, 9, 5, (PIECEWISE, 16)),
        (1, 1, 1, 1, (FULL, 1)),
        (3, 2, 6, 3, (FULL, 6)),
        (3, 3, 6, 3, (PIECEWISE, 8)),  # some requests are shorter
        (3, 6, 6, 1, (PIECEWISE, 8)),
        (1, 17, 17, 1, (NONE, None)),
        (1, 0, 0, 0, (NONE, None)),
    ],
)
def test_runtime_mode(
    query_len: int, num_reqs: int, num_tokens: int, max_query_len: int, expected: tuple[CUDAGraphMode, int | None]
) -> None:
    dispatcher = dispatcher_for("FULL_AND_PIECEWISE", query_len)
    assert dispatcher.runtime_mode(num_reqs, num_tokens, max_query_len) == expected
