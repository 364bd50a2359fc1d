"""What attention support leaves of a mode, as a table."""

from __future__ import annotations

from itertools import product

import pytest

from graphpass import AttentionSupport, resolve_mode
from graphpass.errors import OptionError
from graphpass.keys import CUDAGraphMode

NEVER, SINGLE, UNIFORM, ALWAYS = AttentionSupport


@pytest.mark.parametrize(
    ("asked", "support", "query_len", "partitioned", "not_partitioned"),
    [
        ("FULL", ALWAYS, 1, "FULL", "FULL"),
        ("FULL", ALWAYS, 4, "FULL", "FULL"),
        ("FULL", UNIFORM, 4, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("FULL", SINGLE, 1, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("FULL", SINGLE, 4, "PIECEWISE", "NONE"),
        ("FULL", NEVER, 1, "PIECEWISE", "NONE"),
        ("FULL_DECODE_ONLY", ALWAYS, 1, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", UNIFORM, 2, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", SINGLE, 1, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", SINGLE, 2, "PIECEWISE", "NONE"),
        ("FULL_DECODE_ONLY", NEVER, 1, "PIECEWISE", "NONE"),
        ("FULL_AND_PIECEWISE", ALWAYS, 1, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", UNIFORM, 2, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", SINGLE, 2, "PIECEWISE", "NONE"),
        ("FULL_AND_PIECEWISE", NEVER, 1, "PIECEWISE", "NONE"),
        ("PIECEWISE", NEVER, 1, "PIECEWISE", "NONE"),
        ("PIECEWISE", ALWAYS, 1, "PIECEWISE", "NONE"),
        ("NONE", ALWAYS, 1, "NONE", "NONE"),
        ("NONE", NEVER, 3, "NONE", "NONE"),
    ],
)
def test_resolution(
    asked: str, support: AttentionSupport, query_len: int, partitioned: str, not_partitioned: str
) -> None:
    for piecewise, expected in ((True, partitioned), (False, not_partitioned)):
        mode, reason = resolve_mode(asked.lower(), support, query_len=query_len, piecewise=piecewise)
        assert mode is CUDAGraphMode[expected]
        assert reason.startswith(f"{asked} is kept: " if asked == expected else f"{asked} became {expected}: ")


def test_every_answer_has_a_reason_and_is_stable() -> None:
    for asked, support, query_len, piecewise in product(CUDAGraphMode, AttentionSupport, (1, 3), (True, False)):
        mode, reason = resolve_mode(asked, support, query_len=query_len, piecewise=piecewise)
        assert reason.partition(": ")[2]
        assert resolve_mode(mode, support, query_len=query_len, piecewise=piecewise)[0] is mode
        assert piecewise or not mode.requires_piecewise_compilation()


def test_support_levels_include_each_other() -> None:
    assert NEVER < SINGLE < UNIFORM < ALWAYS
    assert " ".join(map(str, AttentionSupport)) == "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS"


@pytest.mark.parametrize(
    ("mode", "query_len", "problem"), [("FULL", 0, "query_len"), ("FULL", -1, "query_len"), ("FULLEST", 1, "FULL_AND_")]
)
def test_what_is_refused(mode: str, query_len: int, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        resolve_mode(mode, ALWAYS, query_len=query_len, piecewise=True)
