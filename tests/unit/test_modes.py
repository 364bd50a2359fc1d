"""Runtime modes and pairs, as a table."""

from __future__ import annotations

import copy
import pickle

import pytest

from graphpass.errors import OptionError
from graphpass.modes import CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "largest", "separate", "piecewise", "without_piecewise"),
    [
        (NONE, NONE, NONE, NONE, False, False, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE, PIECEWISE, False, True, NONE),
        (FULL, FULL, FULL, FULL, False, False, FULL),
        (DECODE_ONLY, FULL, NONE, FULL, True, False, DECODE_ONLY),
        (BOTH, FULL, PIECEWISE, FULL, True, True, DECODE_ONLY),
    ],
)
def test_what_a_mode_means(
    mode: CUDAGraphMode,
    decode: CUDAGraphMode,
    mixed: CUDAGraphMode,
    largest: CUDAGraphMode,
    separate: bool,
    piecewise: bool,
    without_piecewise: CUDAGraphMode,
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.max_cudagraph_mode() is largest
    assert mode.separate_routine() is separate
    assert mode.is_valid_runtime_mode() is not separate
    assert mode.requires_piecewise_compilation() is piecewise
    assert mode.without_piecewise() is without_piecewise
    assert {runtime for runtime in (NONE, PIECEWISE, FULL) if mode.has_mode(runtime)} == {decode, mixed}


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_name_text_and_truth(mode: CUDAGraphMode) -> None:
    assert str(mode) == f"{mode}" == mode.name
    assert bool(mode) is (mode is not NONE)
    for spelling in (mode.name, mode.name.lower(), mode.name.title(), mode):
        assert CUDAGraphMode.parse(spelling) is mode


@pytest.mark.parametrize("asked", [DECODE_ONLY, BOTH])
@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_has_mode_refuses_pairs(mode: CUDAGraphMode, asked: CUDAGraphMode) -> None:
    with pytest.raises(OptionError, match=asked.name):
        mode.has_mode(asked)


@pytest.mark.parametrize("unknown", ["", "FULLER", "full and piecewise", None, 2, (2, 0)])
def test_unknown_modes_are_refused(unknown: object) -> None:
    with pytest.raises(OptionError, match="FULL_AND_PIECEWISE") as refused:
        CUDAGraphMode.parse(unknown)  # type: ignore[arg-type]
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_modes_stay_themselves_when_copied(mode: CUDAGraphMode) -> None:
    assert copy.deepcopy(mode) is mode
    assert pickle.loads(pickle.dumps(mode)) is mode
