# ruff: noqa: E501  (golden text is as wide as a dump)
"""Golden dumps: the keys of a dispatcher in the order of their capture, and what it decides for batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from graphpass import CudagraphDispatcher, LoraKeys
from graphpass.errors import DispatchError

assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline


def keys_of(dispatcher: CudagraphDispatcher) -> str:
    """The keys, as they are captured; afterwards all of them are."""
    lines = []
    for mode, descriptors in dispatcher.capture_plan():
        lines.append(f"{mode}: {', '.join(map(str, descriptors))}")
        for descriptor in descriptors:
            dispatcher.mark_captured(mode, descriptor)
    return "\n".join(lines) + "\n"


def decisions_of(dispatcher: CudagraphDispatcher, batches: Iterable[dict[str, Any]]) -> str:
    """A line for each batch: what it is, and mode, key and reason."""
    lines = []
    for batch in batches:
        step = dispatcher.dispatch(**batch)
        given = " ".join(f"{name}={value}" for name, value in batch.items())
        lines.append(f"{given} -> {step.mode} {step.descriptor}, {step.reason.name}")
    return "\n".join(lines) + "\n"


def test_decode_and_mixed_batches() -> None:
    dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", [1, 2, 4, 8], max_num_reqs=4)
    assert_expected_inline(
        keys_of(dispatcher),
        """\
PIECEWISE: 8 tokens, 4 tokens, 2 tokens, 1 tokens
FULL: 4 tokens num_reqs=4 uniform=True, 2 tokens num_reqs=2 uniform=True, 1 tokens num_reqs=1 uniform=True
""",
    )
    batches = [
        {"num_tokens": 3, "num_reqs": 3, "uniform_decode": True},
        {"num_tokens": 4, "num_reqs": 4, "uniform_decode": True},
        {"num_tokens": 3, "num_reqs": 2},
        {"num_tokens": 8, "num_reqs": 1},
        {"num_tokens": 9, "num_reqs": 2},
        {"num_tokens": 0},
        {"num_tokens": 3, "num_reqs": 3, "uniform_decode": True, "allowed_modes": ("NONE", "PIECEWISE")},
        {"num_tokens": 3, "allowed_modes": ("NONE",)},
        {"num_tokens": 6, "uniform_decode": True},
        {"num_tokens": 9, "uniform_decode": True},
        {"num_tokens": 4, "extra": (("a", 1),)},
    ]
    assert_expected_inline(
        decisions_of(dispatcher, batches),
        """\
num_tokens=3 num_reqs=3 uniform_decode=True -> FULL 4 tokens num_reqs=4 uniform=True, PADDED
num_tokens=4 num_reqs=4 uniform_decode=True -> FULL 4 tokens num_reqs=4 uniform=True, EXACT
num_tokens=3 num_reqs=2 -> PIECEWISE 4 tokens, PADDED
num_tokens=8 num_reqs=1 -> PIECEWISE 8 tokens, EXACT
num_tokens=9 num_reqs=2 -> NONE 9 tokens, TOO_LARGE
num_tokens=0 -> NONE 0 tokens, EMPTY
num_tokens=3 num_reqs=3 uniform_decode=True allowed_modes=('NONE', 'PIECEWISE') -> PIECEWISE 4 tokens, RELAXED
num_tokens=3 allowed_modes=('NONE',) -> NONE 3 tokens, DISABLED
num_tokens=6 uniform_decode=True -> PIECEWISE 8 tokens, RELAXED
num_tokens=9 uniform_decode=True -> NONE 9 tokens, TOO_LARGE
num_tokens=4 extra=(('a', 1),) -> NONE 4 tokens, NO_KEY
""",
    )


def test_what_is_not_captured_yet() -> None:
    dispatcher = CudagraphDispatcher("FULL", [2, 4], max_num_reqs=4)
    batches = [{"num_tokens": 3}, {"num_tokens": 4}, {"num_tokens": 4, "num_reqs": 5}]
    assert_expected_inline(
        decisions_of(dispatcher, batches),
        """\
num_tokens=3 -> NONE 3 tokens, NOT_CAPTURED
num_tokens=4 -> NONE 4 tokens, NOT_CAPTURED
num_tokens=4 num_reqs=5 -> NONE 4 tokens, TOO_LARGE
""",
    )
    with pytest.raises(DispatchError, match=r"not been captured.*; found num_tokens=3; remedy"):
        dispatcher.dispatch(3, allowed_modes=("FULL",))
    lazy = CudagraphDispatcher("FULL", [2, 4], max_num_reqs=4, lazy=True)
    assert_expected_inline(
        decisions_of(lazy, batches),
        """\
num_tokens=3 -> FULL 4 tokens num_reqs=4, PADDED
num_tokens=4 -> FULL 4 tokens num_reqs=4, EXACT
num_tokens=4 num_reqs=5 -> NONE 4 tokens, TOO_LARGE
""",
    )


def test_draft_tokens() -> None:
    dispatcher = CudagraphDispatcher("FULL_DECODE_ONLY", [4, 8], max_num_reqs=2, uniform_decode_query_len=4)
    assert_expected_inline(
        keys_of(dispatcher),
        """\
FULL: 8 tokens num_reqs=2 uniform=True, 4 tokens num_reqs=1 uniform=True
""",
    )
    batches = [
        {"num_tokens": 4, "num_reqs": 1, "uniform_decode": True},
        {"num_tokens": 8, "num_reqs": 2, "uniform_decode": True},
        {"num_tokens": 5, "num_reqs": 2},
        {"num_tokens": 12, "uniform_decode": True},
    ]
    assert_expected_inline(
        decisions_of(dispatcher, batches),
        """\
num_tokens=4 num_reqs=1 uniform_decode=True -> FULL 4 tokens num_reqs=1 uniform=True, EXACT
num_tokens=8 num_reqs=2 uniform_decode=True -> FULL 8 tokens num_reqs=2 uniform=True, EXACT
num_tokens=5 num_reqs=2 -> NONE 5 tokens, DISABLED
num_tokens=12 uniform_decode=True -> NONE 12 tokens, TOO_LARGE
""",
    )
    without_routine = CudagraphDispatcher("PIECEWISE", [8], max_num_reqs=2, uniform_decode_query_len=4, lazy=True)
    assert_expected_inline(
        decisions_of(without_routine, [{"num_tokens": 7, "uniform_decode": True}]),
        """\
num_tokens=7 uniform_decode=True -> PIECEWISE 8 tokens, PADDED
""",
    )


def test_several_sizes() -> None:
    dispatcher = CudagraphDispatcher("FULL", {"batch": [2, 4], "seq": [8, 16]}, max_num_reqs=4)
    assert_expected_inline(
        keys_of(dispatcher),
        """\
FULL: 64 tokens num_reqs=4 batch=4 seq=16, 32 tokens num_reqs=4 batch=2 seq=16, 32 tokens num_reqs=4 batch=4 seq=8, 16 tokens num_reqs=4 batch=2 seq=8
""",
    )
    batches = [{"extra": (("batch", 3), ("seq", 5))}, {"extra": (("batch", 2), ("seq", 17))}]
    assert_expected_inline(
        decisions_of(dispatcher, batches),
        """\
extra=(('batch', 3), ('seq', 5)) -> FULL 32 tokens num_reqs=4 batch=4 seq=8, PADDED
extra=(('batch', 2), ('seq', 17)) -> NONE 34 tokens batch=2 seq=17, TOO_LARGE
""",
    )


def test_adapters() -> None:
    dispatcher = CudagraphDispatcher("FULL", [4], max_num_reqs=4, lora=LoraKeys(3, per_count=True))
    assert_expected_inline(
        keys_of(dispatcher),
        """\
FULL: 4 tokens num_reqs=4 has_lora=True num_active_loras=4, 4 tokens num_reqs=4 has_lora=True num_active_loras=2, 4 tokens num_reqs=4 has_lora=True num_active_loras=1, 4 tokens num_reqs=4
""",
    )
    batches = [{"num_tokens": 3, "num_active_loras": count} for count in range(4)]
    assert_expected_inline(
        decisions_of(dispatcher, batches),
        """\
num_tokens=3 num_active_loras=0 -> FULL 4 tokens num_reqs=4, PADDED
num_tokens=3 num_active_loras=1 -> FULL 4 tokens num_reqs=4 has_lora=True num_active_loras=1, PADDED
num_tokens=3 num_active_loras=2 -> FULL 4 tokens num_reqs=4 has_lora=True num_active_loras=2, PADDED
num_tokens=3 num_active_loras=3 -> FULL 4 tokens num_reqs=4 has_lora=True num_active_loras=4, PADDED
""",
    )
