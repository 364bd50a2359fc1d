"""Negative indices from data on real graphs: the real size is an input on the device of the index."""

from __future__ import annotations

import pytest

from tests.unit.cgpass.test_negative_indices import NUM_CALLS, PROGRAMS, compiled, num_padded, run

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", ["x[i]", "x[i, j]", "take", "x[i] += 1 in the argument", "index_fill"])
def test_negative_indices_count_from_the_real_end(name: str, mode: str, compiler: str) -> None:
    fast = compiled(PROGRAMS[name], compiler=compiler, mode=mode)
    assert run(PROGRAMS[name], fast, "cuda") == 0
    assert num_padded(fast) == NUM_CALLS - 1
